"""The report: one page, nothing from outside, drawn by a real browser."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loosestep.events import Event
from loosestep.report.outcome import Outcome
from loosestep.report.page import columns, common_target, rows, write_report
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import Journal, RunFolder

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # nothing comes from outside: what a plot needs from there is missing
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=8000",
]


def make_run(
    path: Path, strategy: str, *, seed: int = 0, gain: float = 0.0, diverges: bool = False
) -> Outcome:
    """The folder of a run of two ranks that was never made."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    Config(
        recipe="vision", strategy=strategy, seed=seed, nodes=2, command="loosestep train </script>"
    ).write(folder.config_file)
    for rank in (0, 1):
        with Journal(folder, rank) as journal:
            if rank == 0:
                quality = {"name": "accuracy", "better": "higher"}
                journal.metric(
                    "begin",
                    gradients=0,
                    recipe="vision",
                    quality=quality,
                    total=40,
                    lr=0.1,
                    optimizer="sgd",
                    schedule="constant",
                    epoch=10,
                    nodes=[[0], [1]],
                    task={"data": "<digits>"},
                )
            for step in range(1, 21):
                fields = {
                    "loss": 2.0 / step,
                    "consensus_distance": 0.1 * step,
                    "bytes_sent": 1000 * step,
                }
                journal.metric(
                    "progress", gradients=2 * step, step=step, seconds=0.1 * step, **fields
                )
                at = 100.0 + 0.1 * step
                journal.event(Event(at, "wait", {"seconds": 0.02, "reason": "fold"}))
                journal.event(Event(at, "step", {"step": step}))
                journal.event(Event(at + 0.01, "start", {}))
                journal.event(Event(at + 0.05, "landed", {"seconds": 0.04}))
                journal.event(Event(at + 0.06, "fold", {"staleness": 1}))
            if rank == 0:
                journal.metric(
                    "evaluation", gradients=20, seconds=1.0, metrics={"accuracy": 0.5 + gain}
                )
                if diverges:
                    journal.metric("progress", gradients=40, step=20, seconds=2.0, loss=math.nan)
                    continue
                examples = [{"name": "<one>", "expected": "a", "found": "b"}]
                final = {"metrics": {"accuracy": 0.8 + gain}, "examples": examples, "lr": 0.1}
                journal.metric("final", gradients=40, seconds=2.0, **final)
    return Outcome.read(folder)


def test_the_table_tells_mean_and_spread_of_the_seeds(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), "daso", seed=seed, gain=0.1 * seed) for seed in (0, 1)]
    target = common_target(runs)
    assert target == pytest.approx(0.8)
    cells = {column.title: column.cell(runs) for column in columns(runs, target)}
    assert cells["accuracy"] == "85.0 ± 7.1 %"
    assert cells["gradients/s"] == "20 ± 0"
    assert cells["s to 80.0 %"] == "2.0 ± 0.0"
    assert cells["waiting"] == "21%"
    assert cells["MB/gradient"] == "0.001"
    assert cells["staleness"] == "1.0"
    missed = {column.title: column.cell(runs) for column in columns(runs, 0.85)}
    assert missed["s to 85.0 %"] == "1 of 2 runs"


def test_runs_that_diverged_are_told_beside_the_mean_of_the_others(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(i), "daso", seed=i, gain=0.1 * i, diverges=i == 2) for i in range(3)
    ]
    runs += [make_run(tmp_path / str(i), "adpsgd", seed=i, diverges=True) for i in (3, 4)]
    target = common_target(runs)
    assert target == pytest.approx(0.8)  # not the .5 and .7 of those that diverged
    told = columns(runs, target)
    (name, quality, *_), diverged = rows(runs, told)
    assert (name, quality) == ("daso (1 of 3 runs diverged)", "85.0 ± 7.1 %")
    assert diverged == ["adpsgd: diverged", *["-"] * len(told)]
    write_report(runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "daso (1 of 3 runs diverged)" in page
    assert "adpsgd: diverged" in page
    assert "Not complete" not in page


def test_ranks_that_are_no_more_are_not_counted_again(tmp_path: Path) -> None:
    before = make_run(tmp_path / "run", "daso")
    assert [end["bytes_sent"] for end in before.ends] == [20_000, 20_000]
    with Journal(before.folder, 0) as journal:
        journal.metric("begin", gradients=40, nodes=[[0]])
        journal.metric("end", gradients=50, seconds=3.0, bytes_sent=40_000)
    assert [end["bytes_sent"] for end in Outcome.read(before.folder).ends] == [40_000]


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    outcome = make_run(tmp_path / "run", "daso")
    page = tmp_path / "report.html"
    page.write_text("before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TrainingError, match=r"report\.html could not be written: No space left"):
        write_report([outcome], page)
    assert page.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


def test_a_page_needs_nothing_from_outside_and_escapes_what_users_write(tmp_path: Path) -> None:
    outcome = make_run(tmp_path / "run", "daso")
    page = tmp_path / "report.html"
    write_report([outcome], page, timeline=tmp_path / "timeline.json")
    text = page.read_text()
    assert len(text) < 8_000_000
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', text)
    assert "train &lt;/script&gt;" in text
    assert "&lt;digits&gt;" in text
    assert text.count("plotly.js v") == 1
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["name"] for event in spans} == {"compute", "wait", "exchange"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)


def test_a_run_that_has_just_begun_is_told_apart_from_no_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="does not exist"):
        RunFolder.open(tmp_path / "nothing")
    with pytest.raises(TrainingError, match="is not a run"):
        RunFolder.open(tmp_path)
    Config(recipe="vision").write(tmp_path / "config.toml")
    with pytest.raises(TrainingError, match="nothing is known of this run yet"):
        Outcome.read(RunFolder.open(tmp_path))


def test_a_cut_line_is_passed_over(tmp_path: Path) -> None:
    outcome = make_run(tmp_path / "run", "daso")
    file = outcome.folder.metrics_file
    file.write_bytes(file.read_bytes()[:-9])
    assert outcome.folder.metrics() == list(outcome.metrics)[:-1]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_every_plot_without_a_complaint(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / strategy, strategy) for strategy in ("daso", "adpsgd")]
    page = tmp_path / "report.html"
    write_report(runs, page)
    command = [
        "chromium",
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "CONSOLE" not in done.stderr
    figures = done.stdout.count('class="plotly-graph-div')
    assert figures == 7
    assert done.stdout.count("modebar-container") >= figures  # each has been drawn
