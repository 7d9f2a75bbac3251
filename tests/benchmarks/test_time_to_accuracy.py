"""When a task counts as learnt."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from peers import find
from time_to_accuracy import STEP, Effort, Plan, Trials, at_gradients, climb

PLAN = Plan(lasts=1.0, every=0.25, search=1.0, seconds=0.0)


def test_the_target_is_a_share_of_the_best_median_end_of_a_peer() -> None:
    curves = {
        "torch DDP": [[0.2, 0.8], [0.9, 0.6], [0.3, 0.7]],
        "decent-dp, ring": [[0.8, 0.6], [0.8, 0.5]],
        "torch DDP, bf16 hook": [[]],
        "torchft LocalSGD, period 8": [[0.9, math.nan]],
        "daso": [[0.9, 0.99]],
    }
    assert PLAN.target(curves) == pytest.approx(0.95 * 0.7)
    assert math.isnan(PLAN.target({"daso": [[0.9]]}))


def test_the_target_of_a_loss_lies_above_the_best() -> None:
    loss = Plan(lasts=1.0, every=0.25, search=1.0, seconds=0.0, higher=False)
    assert loss.target({"torch DDP": [[3.0, 1.9]], "decent-dp, ring": [[2.5]]}) == pytest.approx(
        2.0
    )


def test_the_first_moment_at_or_past_the_target_counts() -> None:
    assert PLAN.reached([math.nan, 0.5, 0.8, 0.7], 0.8) == 0.75


def test_a_target_that_is_never_met_takes_for_ever() -> None:
    assert PLAN.reached([0.1, 0.2], 0.8) == math.inf
    assert PLAN.reached([], 0.8) == math.inf


def test_who_is_much_later_than_the_fastest_has_one_seed() -> None:
    fast = [0.1, 0.77, 0.2, 0.2, 0.2]
    slow = [0.1, 0.2, 0.3, 0.3, 0.9]
    assert PLAN.near({"a": fast, "b": slow, "c": [0.1, 0.7], "d": []}, 0.8) == {"a"}
    assert PLAN.near({"b": slow, "c": [0.1, 0.7], "d": []}, 0.8) == {"b"}
    assert PLAN.near({"c": [0.1, 0.7], "d": []}, 0.8) == set()
    loss = Plan(lasts=1.0, every=0.25, search=1.0, seconds=0.0, higher=False)
    assert loss.near({"a": [3.0, 2.1], "b": [2.3, 2.25]}, 2.0) == {"a"}


@pytest.mark.parametrize("steps", [-3, -1, 0, 1, 2, 3])
def test_the_search_finds_the_best_rate_on_either_side(steps: int) -> None:
    tried = []

    def value(rate: float) -> float:
        tried.append(rate)
        return -abs(math.log(rate / 0.02) / math.log(STEP) - steps)

    assert climb(value, 0.02) == pytest.approx(0.02 * STEP**steps, rel=1e-3)
    assert len(set(tried)) <= abs(steps) + 3


def test_of_two_runs_that_end_alike_the_faster_is_better() -> None:
    assert PLAN.value([math.nan, 0.5, 0.9]) > PLAN.value([math.nan, 0.4, 0.9])
    loss = Plan(lasts=1.0, every=0.25, search=1.0, seconds=0.0, higher=False)
    assert loss.value([3.0, 1.0]) > loss.value([4.0, 1.0])


def test_where_a_loss_comes_from_does_not_choose_a_rate() -> None:
    loss = Plan(lasts=1.0, every=0.25, search=1.0, seconds=0.0, higher=False, skipped=0.5)
    assert loss.value([9.0, 9.0, 2.0, 1.0]) > loss.value([4.0, 3.0, 2.0, 1.5])


def test_a_run_that_failed_or_diverged_is_worse_than_any_other() -> None:
    for plan in (PLAN, Plan(lasts=1.0, every=0.25, search=1.0, seconds=0.0, higher=False)):
        assert plan.value([]) == plan.value([0.5, math.nan]) < plan.value([0.1, 9.0])


def test_runs_of_earlier_calls_are_made_again_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, float, float]] = []

    def train(
        self: Any, peer: Any, bandwidth: str, lr: float, seed: int, lasts: float
    ) -> tuple[list[float], float, Effort]:
        made.append((bandwidth, lr, lasts))
        return [lr], 0.01, Effort(40, 0.5)

    monkeypatch.setattr("harness.script.RAW", tmp_path)
    monkeypatch.setattr(Trials, "_train", train)

    def curves(*, earlier: bool) -> list[list[float]]:
        options = argparse.Namespace(
            earlier=earlier, quick=False, dry=False, peers=[], bandwidth=None
        )
        trials = Trials("digits", PLAN, None, options)  # type: ignore[arg-type]
        peer = find("torch DDP")
        found = [trials.curve(peer, "100mbit", 0.1, 0, lasts) for lasts in (1.0, 2.0, 1.0)]
        # what others took in each run, of those of earlier calls too
        assert trials.stolen == [0.01, 0.01]
        assert trials.effort(peer, "100mbit", 0.1, 0, 2.0) == Effort(40, 0.5)
        return found

    assert curves(earlier=False) == [[0.1]] * 3
    assert curves(earlier=True) == [[0.1]] * 3
    assert made == [("100mbit", 0.1, 1.0), ("100mbit", 0.1, 2.0)]
    curves(earlier=False)
    assert len(made) == 4


def test_quality_after_as_many_gradients_as_the_slowest_made() -> None:
    curve = [0.1, 0.2, 0.3, 0.4]
    assert at_gradients(curve, made=400, gradients=400) == 0.4
    assert at_gradients(curve, made=400, gradients=200) == 0.2
    assert at_gradients(curve, made=400, gradients=1) == 0.1
