"""The learning-rate search, and strategies separated by commas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.training.learning_rate_search import MOST_TRIALS, search, split_strategies


@given(best=st.floats(-3, 3), sign=st.sampled_from([1, -1]))
def test_the_best_rate_near_the_guess_is_found(best: float, sign: int) -> None:
    found, tried = search(
        lambda lr: -sign * abs(math.log2(lr) - best), 1.0, higher_is_better=sign > 0
    )
    assert abs(math.log2(found) - best) <= 0.5 + 1e-9
    assert len(tried) <= MOST_TRIALS


def test_a_rate_that_diverges_is_never_chosen() -> None:
    found, tried = search(lambda lr: None if lr > 0.3 else lr, 1.0, higher_is_better=True)
    assert found == 0.25
    assert tried[1.0] is None


def test_when_everything_diverges_the_answer_is_smaller_still() -> None:
    found, tried = search(lambda lr: None, 1.0, higher_is_better=False)
    assert found < min(tried)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("allreduce", ["allreduce"]),
        ("allreduce,daso", ["allreduce", "daso"]),
        (
            "daso:period=8,delay=2,adpsgd:graph=random-ring,rate=1,delay-by-one",
            ["daso:period=8,delay=2", "adpsgd:graph=random-ring,rate=1", "delay-by-one"],
        ),
        (" daso:period=8 , delay=2 , allreduce ,", ["daso:period=8,delay=2", "allreduce"]),
        (
            "adpsgd:graph={0: [1, 2], 1: [2]},rate=1,daso",
            ["adpsgd:graph={0: [1, 2], 1: [2]},rate=1", "daso"],
        ),
        ("dasso,allreduce", ["dasso", "allreduce"]),
    ],
)
def test_fields_belong_to_the_strategy_before_them(text: str, parts: list[str]) -> None:
    assert split_strategies(text) == parts
