"""The speed of a training run, read from its metrics."""

from __future__ import annotations

from typing import Any

import pytest

import gpu_quality


def progress(rank: int, begin: float, seconds_a_step: float, steps: int) -> list[dict[str, Any]]:
    return [
        {"kind": "progress", "rank": rank, "time": begin + step * seconds_a_step, "step": step}
        for step in range(5, steps + 1, 5)
    ]


def test_speeds_of_ranks_add_up() -> None:
    lines = progress(0, 100.0, 0.1, 100) + progress(1, 100.0, 0.1, 100)
    assert gpu_quality.gradients_per_second(lines) == pytest.approx(20.0)


def test_steps_before_all_ranks_are_warm_and_after_the_first_has_ended_do_not_count() -> None:
    lines = progress(0, 100.0, 0.1, 100) + progress(1, 104.0, 0.1, 100)
    assert gpu_quality.gradients_per_second(lines) == pytest.approx(20.0)


def test_a_setting_can_be_tried_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "DASO, 2 nodes of 2 ranks=daso:period=2,delay=2@0.1"
    monkeypatch.setattr("sys.argv", ["gpu_quality.py", "--try", text])
    [(name, setting)] = gpu_quality.settings(gpu_quality.parse())
    assert (name, *setting) == ("DASO, 2 nodes of 2 ranks", "daso:period=2,delay=2", 2, 2, 0.1)
