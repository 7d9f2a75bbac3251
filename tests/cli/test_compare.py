"""`loosestep compare`: one table and one report about all runs, those that diverged included."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.commands import TINY, loosestep
from loosestep.report.outcome import Outcome
from loosestep.runfolder.folder import RunFolder

pytestmark = [pytest.mark.usefixtures("own_folder", "warm_ranks"), pytest.mark.slow]


def test_a_comparison_is_one_table_and_one_report_and_goes_on_where_it_was() -> None:
    strategies = "allreduce,localsgd:period=2,delay=1"
    arguments = ["compare", TINY, "--strategies", strategies, "--seeds", "1", "--name", "both"]
    output = loosestep(*arguments, "--gradients", "24")
    assert re.search(r"localsgd:period=2, delay=1 +\d+\.\d %", output)
    assert "Report: runs/both/report.html" in output
    for run in ("allreduce-seed0", "localsgd-period=2-delay=1-seed0"):
        assert (Path("runs/both") / run / "report.html").is_file()
        assert (Path("runs/both") / run / "timeline.json").is_file()
    again = loosestep(*arguments, "--gradients", "24")  # nothing is trained twice
    assert again.splitlines()[-5:] == output.splitlines()[-5:]
    other = loosestep(*arguments, "--gradients", "30", "--lr", "0.2", "--nodes", "2", code=2)
    for difference in (
        "gradients is 24 there and 30 now",
        "lr is not given there and 0.2 now",
        "nodes is 1 there and 2",
    ):
        assert difference in other
    assert re.search(
        r"page\.html \(\d\.\d MB\)", loosestep("report", "runs/both", "-o", "page.html")
    )


def test_seeds_that_diverged_are_in_the_table_and_are_not_tried_again() -> None:
    arguments = [
        "compare",
        TINY,
        "--strategies",
        "allreduce",
        "--seeds",
        "2",
        "--gradients",
        "8",
        "--name",
        "odd",
    ]
    output = loosestep(*arguments, "--set", "breaks=1")
    assert "allreduce, seed 1: diverged" in output
    assert re.search(r"allreduce \(1 of 2 runs diverged\) +\d+\.\d %", output)
    assert "1 of 2 runs diverged" in Path("runs/odd/report.html").read_text()
    assert Path("runs/odd/allreduce-seed1/report.html").is_file()
    metrics = RunFolder(Path("runs/odd/allreduce-seed1")).metrics()
    assert loosestep(*arguments, "--set", "breaks=1").splitlines()[-3:] == output.splitlines()[-3:]
    assert RunFolder(Path("runs/odd/allreduce-seed1")).metrics() == metrics


def test_a_comparison_of_which_all_runs_diverged_fails_and_says_so_in_the_report() -> None:
    arguments = [
        "compare",
        TINY,
        "--strategies",
        "allreduce",
        "--seeds",
        "1",
        "--gradients",
        "8",
        "--name",
        "none",
    ]
    assert "every run diverged" in loosestep(*arguments, "--set", "scale=nan", code=2)
    assert "allreduce: diverged" in Path("runs/none/report.html").read_text()


def test_a_comparison_that_failed_says_how_it_goes_on_and_does() -> None:
    arguments = [
        "compare",
        TINY,
        "--strategies",
        "allreduce",
        "--seeds",
        "1",
        "--gradients",
        "8",
        "--name",
        "broken",
    ]
    flag = Path("flag").absolute()
    flag.touch()
    output = loosestep(*arguments, "--set", f"fails={flag}", code=2)
    assert (
        "rank 0 on node 0: the flag is set; the same command with --name broken goes on from there"
        in output
    )
    assert Path("runs/broken/allreduce-seed0/report.html").is_file()
    flag.unlink()
    assert re.search(r"allreduce +\d+\.\d %", loosestep(*arguments, "--set", f"fails={flag}"))


def test_a_search_gives_each_strategy_its_best_learning_rate() -> None:
    arguments = [
        "compare",
        TINY,
        "--strategies",
        "allreduce",
        "--seeds",
        "1",
        "--gradients",
        "16",
        "--lr-search",
    ]
    output = loosestep(*arguments, "--name", "searched")
    found = json.loads(Path("runs/searched/search.jsonl").read_text())
    tried = dict(found["tried"])
    assert {0.15, 0.3, 0.6} <= tried.keys()  # the recipe's own, and its neighbours
    assert tried[found["best"]] == max(tried.values())
    trials = [
        Outcome.read(RunFolder(path.parent))
        for path in Path("runs/searched/search").glob("*/config.toml")
    ]
    assert {trial.config.lr: trial.quality for trial in trials} == tried
    assert {trial.gradients for trial in trials} == {4}
    assert f"allreduce: learning rate {found['best']:.3g}" in output
    assert RunFolder(Path("runs/searched/allreduce-seed0")).config().lr == found["best"]
