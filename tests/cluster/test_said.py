"""What a run says once, clearly, where nothing fails and the result is not what was meant."""

import sys
from pathlib import Path

import pytest

from loosestep import launch
from loosestep.strategies import strategy

pytestmark = pytest.mark.usefixtures("warm_ranks")
SCRIPT = str(Path(__file__).parent / "forgets.py")


@pytest.mark.parametrize("arguments", [("localsgd:replica=rank",), ("adpsgd", "in a function")])
def test_a_forgotten_finish_is_told_by_every_rank(arguments):
    with launch.start([sys.executable, SCRIPT, *arguments], nodes=2, ranks_per_node=1) as job:
        job.wait(timeout=60)
        for index, rank in enumerate(job.ranks):
            said = [line for line in rank.output if "has ended without run.finish()" in line]
            assert len(said) == 1, rank.output
            assert f"rank {index} has ended" in said[0]


@pytest.mark.parametrize("spec", ["daso", "adpsgd:replica=node"])
def test_one_node_is_told_to_be_plain_synchronous_training(spec):
    assert "plain synchronous training" in strategy(spec).note([2])
    assert "one rank" in strategy(spec).note([1])
    assert strategy(spec).note([1, 1]) is None
    assert strategy("allreduce").note([2]) is None
    with launch.start([sys.executable, SCRIPT, spec], nodes=1, ranks_per_node=2) as job:
        job.wait(timeout=60)
        notes = ["plain synchronous training" in "".join(rank.output) for rank in job.ranks]
        assert notes == [True, False]
