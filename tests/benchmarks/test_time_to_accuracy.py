"""When a task counts as learnt."""

import math

import pytest

from time_to_accuracy import Plan

PLAN = Plan(lasts=1.0, every=0.25, seconds=0.0)


def test_the_target_is_a_share_of_the_best_end_of_a_peer() -> None:
    assert PLAN.target([[0.2, 0.8], [0.9, 0.6], [], [math.nan]]) == pytest.approx(0.95 * 0.8)


def test_the_target_of_a_loss_lies_above_the_best() -> None:
    assert Plan(lasts=1.0, every=0.25, seconds=0.0, higher=False).target([[3.0, 1.9], [2.5]]) == pytest.approx(2.0)


def test_the_first_moment_at_or_past_the_target_counts() -> None:
    assert PLAN.reached([math.nan, 0.5, 0.8, 0.7], 0.8) == 0.75


def test_a_target_that_is_never_met_takes_for_ever() -> None:
    assert PLAN.reached([0.1, 0.2], 0.8) == math.inf
    assert PLAN.reached([], 0.8) == math.inf
