"""Trainers as users run them, on two nodes of one rank: what they do by default is refused, the examples work."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from loosestep import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKER = Path(__file__).parent / "trainer_worker.py"


def run(*command: object, ranks_per_node: int = 1) -> list[str]:
    """What each rank prints, in rank order."""
    with launch.start([sys.executable, *map(str, command)], nodes=2, ranks_per_node=ranks_per_node) as job:
        result = job.wait(timeout=110)
    told = ["\n".join(rank.output) for rank in job.ranks]
    assert result.exit_code == 0, "\n".join(told)
    return told


@pytest.mark.parametrize(
    ("library", "way_out"),
    [
        ("accelerate", "prepare_model(model, evaluation_mode=True)"),
        ("lightning", "strategy=loosestep.integrations.lightning.LoosestepStrategy(...)"),
        ("transformers", "integrations.transformers.attach(trainer, strategy)"),
    ],
)
def test_a_trainers_own_ddp_is_refused_and_its_example_ends_with_the_same_parameters_everywhere(library, way_out):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (loosestep[{library}])")
    told = run(WORKER, library, EXAMPLES / f"{library}_daso.py")
    ends = [re.search(r"loss ([\d.]+), checksum (\S+)", text) for text in told]
    for text, end in zip(told, ends, strict=True):
        assert way_out in re.search("refused: .*", text)[0]
        assert end[2] == ends[0][2]
        assert float(end[1]) < 2.0  # 8 and more untrained, 3.4 for the language model
    if library == "transformers":
        trained, evaluated = (
            [re.findall(f"{what} (.*)", text)[-1] for text in told] for what in ("trained", "evaluated")
        )
        assert trained[0] != trained[1]
        assert evaluated[0] == evaluated[1]  # the mean, which nobody trains
        assert evaluated[0] not in trained


@pytest.mark.parametrize("spec", ["daso-paper", "delay-by-one:older_gradient=true"])
def test_a_best_model_that_the_end_of_the_run_would_change_is_refused(spec):
    pytest.importorskip("transformers", reason="transformers is not installed (loosestep[transformers])")
    from loosestep.integrations.transformers import LoosestepCallback

    asked = SimpleNamespace(load_best_model_at_end=True, parallel_mode=None)
    with pytest.raises(ValueError, match="load_best_model_at_end=False"):
        LoosestepCallback(spec).on_train_begin(asked, None, None, model=None, optimizer=None)


def test_the_fsdp_example_learns():
    end = re.search(r"loss (\d+\.\d+) after 15 exchanges", run(EXAMPLES / "fsdp.py", ranks_per_node=2)[0])
    assert end is not None
    assert float(end[1]) < 8.0  # 16 untrained
