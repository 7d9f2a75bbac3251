"""What is kept of a training run, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quality
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder

CONFIG = Config(recipe="vision", strategy="daso")


def folder_with(path: Path, *lines: dict[str, Any]) -> RunFolder:
    path.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFolder(path)


def end(rank: int, *, waited: float, exchanges: int) -> dict[str, Any]:
    return {
        "kind": "end",
        "rank": rank,
        "gradients": 100,
        "seconds": 10.0,
        "wait_seconds": waited,
        "exchanges": exchanges,
        "folds": 5,
        "bytes_sent": 50_000_000,
        "staleness_mean": 1.0 + rank,
    }


def test_figures_are_of_all_ranks_and_per_gradient(tmp_path: Path) -> None:
    final = {
        "kind": "final",
        "rank": 0,
        "gradients": 100,
        "seconds": 10.0,
        "metrics": {"accuracy": 0.75},
    }
    folder = folder_with(
        tmp_path, final, end(0, waited=1.0, exchanges=20), end(1, waited=3.0, exchanges=5)
    )
    judged = quality.judge(folder, CONFIG, tail=[])
    assert judged["quality"] == 0.75
    assert judged["waiting"] == pytest.approx(0.2)
    assert judged["exchanges_a_gradient"] == pytest.approx(0.25)
    assert judged["folds_a_gradient"] == pytest.approx(0.1)
    assert judged["megabytes_a_step"] == pytest.approx(1.0)
    assert judged["staleness"] == pytest.approx(1.5)


def test_a_run_without_an_end_has_no_quality_and_says_why(tmp_path: Path) -> None:
    judged = quality.judge(
        folder_with(tmp_path, end(0, waited=0.0, exchanges=0)), CONFIG, tail=["rank 0", "diverged"]
    )
    assert (judged["quality"], judged["problem"]) == (None, "rank 0 diverged")


def test_results_that_were_told_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    for seed in (0, 1):
        quality.tell({"name": "DASO", "seed": seed, "quality": 0.123456}, file)
    assert quality.read_results([file]) == [
        {"name": "DASO", "seed": seed, "quality": 0.1235} for seed in (0, 1)
    ]
