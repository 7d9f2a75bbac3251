"""Whether gossip helps, judged by how far apart learners are in steps and how often they meet."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import loosestep
from loosestep import simulate
from loosestep.core.engines import usefulness
from loosestep.core.engines.usefulness import ENOUGH, EVERY, Usefulness
from loosestep.core.replica.replica import Replica


def measured(length: float, steps: int = 3 * EVERY) -> Usefulness:
    """After steps that each change every parameter by so much."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    useful = Usefulness(Replica(model), "adpsgd")
    for step in range(1, steps):
        with torch.no_grad():
            for param in model.parameters():
                param += length
        useful.before(step)
        with torch.no_grad():  # what a boundary folds is no step
            for param in model.parameters():
                param -= 100.0
        useful.after(step)
    return useful


def test_the_distance_is_told_in_steps_of_the_optimizer_without_what_was_folded() -> None:
    assert measured(0.5).distance_in_steps(3.0) == pytest.approx(6.0, rel=1e-3)
    assert measured(0.5, steps=2).distance_in_steps(3.0) is None  # not known yet


@pytest.mark.parametrize(
    ("step", "exchanges", "limit", "told"),
    [
        (ENOUGH, 0.04 * ENOUGH, None, True),
        (ENOUGH, 0.06 * ENOUGH, None, False),
        (ENOUGH - 1, 0.0, None, False),  # too early to say
        (ENOUGH, 0.2 * ENOUGH, 0.01, True),  # the pace has settled where it does not help
    ],
)
def test_what_is_too_rare_is_told_with_what_to_do(
    step: int, exchanges: float, limit: float | None, told: bool
) -> None:
    advice = measured(0.5).advice(
        step, exchanges=exchanges, wanted=1.0, limit=limit, distance=3.0, age=12.0
    )
    assert (advice is not None) == told
    if advice is not None:
        assert "12 steps old, and learners are 6 steps from their mean" in advice
        for way in ("codec='bf16'", "slowdown=", "replica='node'", "daso"):
            assert way in advice


def test_who_asks_for_few_exchanges_is_not_told_that_they_are_few() -> None:
    advice = measured(0.5).advice(
        ENOUGH, exchanges=0.011 * ENOUGH, wanted=0.02, limit=None, distance=3.0, age=12.0
    )
    assert advice is None


def train(rank: int) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(40))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(model, optimizer, "adpsgd", deadline=20) as run:
        run._engine._budget.rate = 0.01  # as low as a pace that steps cannot bear
        for _ in range(120):
            optimizer.zero_grad()
            (model[0] - rank).square().sum().backward()
            optimizer.step()
        stats = run.stats
    assert stats["exchanges_per_step"] == pytest.approx(stats["exchanges"] / 120)
    assert stats["distance_in_steps"] > 0


def test_a_run_tells_it_once() -> None:
    with patch.object(usefulness, "ENOUGH", 60), pytest.warns(UserWarning, match="alone") as told:
        simulate(train, ranks=3)
    assert len(told) == 1
