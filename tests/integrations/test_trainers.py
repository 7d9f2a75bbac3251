"""The examples of trainers, as users run them, on two nodes of one rank; and what trainers do by default is refused."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from loosestep import launch

ROOT = Path(__file__).parents[2]


def run(script: Path, *, ranks_per_node: int = 1) -> list[str]:
    """What each rank prints, in rank order."""
    with launch.start([sys.executable, str(script)], nodes=2, ranks_per_node=ranks_per_node) as job:
        result = job.wait(timeout=110)
    told = ["\n".join(rank.output) for rank in job.ranks]
    assert result.exit_code == 0, "\n".join(told)
    return told


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_trainers_example_learns_and_ends_with_the_same_parameters_everywhere(library):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (loosestep[{library}])")
    told = [re.search(r"loss ([\d.]+), checksum (\S+)", text) for text in run(ROOT / f"examples/{library}_daso.py")]
    assert all(told)
    assert told[0][2] == told[1][2]
    assert all(float(one[1]) < 2.0 for one in told)  # 8 and more untrained, 3.4 for the language model


def test_the_fsdp_example_learns():
    assert re.search(r"loss \d+\.\d+ after 15 exchanges", run(ROOT / "examples/fsdp.py", ranks_per_node=2)[0])


def test_the_ddp_that_trainers_set_up_by_default_is_refused_with_what_to_do():
    for library in ("accelerate", "lightning", "transformers"):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    for text in run(Path(__file__).parent / "refused.py"):
        lines = {line.split(": ")[0]: line for line in text.splitlines() if "_by_default" in line}
        assert "prepare_model(model, evaluation_mode=True)" in lines["accelerate_by_default"]
        assert "integrations.transformers.attach(trainer, strategy)" in lines["transformers_by_default"]
        assert "LoosestepStrategy" in lines["lightning_by_default"]
