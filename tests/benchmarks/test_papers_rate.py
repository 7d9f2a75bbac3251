"""The recursion of the rate's figures, and the constants of the theorem."""

from __future__ import annotations

import math

import numpy as np
import pytest

import papers_rate as script


def test_the_graph_changes_nothing_for_the_mean_on_a_quadratic() -> None:
    found = [
        script.descend(script.Quadratic(), script.Cell("quadratic", graph, 16, 1, 2048), seed=seed)
        for graph in ("ring", "random-ring")
        for seed in range(4)
    ]
    assert np.mean(found[:4]) == pytest.approx(np.mean(found[4:]), rel=0.05)


def test_four_times_the_gradients_halve_the_squared_gradient() -> None:
    short, long = (
        script.descend(script.Quadratic(), script.Cell("quadratic", "ring", 4, 0, total))
        for total in (2048, 8192)
    )
    assert 0.4 < long / short < 0.6


def test_a_late_gradient_at_too_large_a_step_grows() -> None:
    """alpha L < 2 sin(pi / (4 tau + 2)) or nothing."""
    problem = script.Quadratic()
    for total, grows in ((1024, True), (2**17, False)):
        alpha = script.step_size(problem, 64, total)
        assert (alpha > 2 * math.sin(math.pi / 18)) == grows
        squared = script.descend(problem, script.Cell("quadratic", "ring", 64, 4, total))
        assert (squared > 1) == grows


def test_the_gradients_of_the_network_are_those_of_its_loss() -> None:
    network = script.Network()
    model = network.start()
    slope = network._full(model)
    for place in (0, 7, 25):
        ahead = model.copy()
        ahead[place] += 1e-6
        difference = (network._loss(ahead) - network._loss(model)) / 1e-6
        assert slope[place] == pytest.approx(difference, abs=1e-4)


def test_the_theorem_asks_for_more_the_later_and_the_sparser() -> None:
    problem = script.Quadratic()
    assert script.ring_contraction(16) == pytest.approx(
        ((1 + 2 * math.cos(2 * math.pi / 16)) / 3) ** 2
    )
    asked = [script.transient(problem, 16, delay, "random-ring") for delay in (0, 4, 8)]
    assert asked == sorted(asked)
    assert script.transient(problem, 16, 0, "ring") > script.transient(
        problem, 16, 0, "random-ring"
    )
    assert script.bound(problem, 4e6) / script.bound(problem, 1e6) == pytest.approx(0.5, rel=0.01)
