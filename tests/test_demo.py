"""The demo: what the diaries say, and the whole of it with real processes, in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from loosestep.demo.diary import Diary, Outcome, spell
from loosestep.demo.report import between, merged
from loosestep.demo.screen import closing_table
from loosestep.trace.events import Event


def outcome(strategy: str, *, seconds: float) -> Outcome:
    diaries = [
        Diary(
            strategy, rank=rank, node=rank // 2, seconds=seconds, accuracy=0.97, bytes_sent=3e6, steps=[1.0, 2.0],
            losses=[1.0, 0.5], accuracies=[(2, 2.0, 0.9)], waits=[(0.5, 1.0)],
        )
        for rank in range(4)
    ]  # fmt: skip
    return Outcome(strategy, diaries)


def test_speed_counts_the_gradients_of_all_ranks() -> None:
    assert outcome("ddp", seconds=4.0).speed == 2.0


def test_the_last_point_of_the_accuracy_curve_is_the_final_model() -> None:
    assert outcome("ddp", seconds=4.0).accuracy_curve() == [(8, 2.0, pytest.approx(0.9)), (8, 4.0, 0.97)]


def test_the_table_compares_with_ddp() -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(closing_table([outcome("ddp", seconds=4.0), outcome("daso:delay=3", seconds=1.0)]))
    text = console.export_text()
    assert "4.0x" in text
    assert "0.5 s, 50%" in text
    assert "3 MB" in text


def test_waits_and_exchanges_are_read_from_events() -> None:
    diary = Diary("daso", rank=0, node=0, begin=100.0)
    diary.read_events(
        [
            Event(101.0, "start", {"exchange": 1, "step": 4}),
            Event(103.0, "wait", {"seconds": 0.5, "reason": "fold"}),
            Event(103.5, "landed", {"seconds": 2.0}),
        ]
    )
    assert diary.waits == [(2.5, 3.0)]
    assert diary.exchanges == [(1.0, 3.5)]


def test_waits_and_compute_fill_the_whole_time_once() -> None:
    waits = merged([(2.0, 3.0), (1.0, 1.5), (2.5, 4.0)])
    assert waits == [(1.0, 1.5), (2.0, 4.0)]
    assert list(between(waits, 5.0)) == [(0.0, 1.0), (1.5, 2.0), (4.0, 5.0)]


def test_strategies_are_spelled_as_in_python() -> None:
    assert spell("daso:period=4,delay=3") == "DASO(period=4, delay=3)"
    assert spell("ddp") == "torch DDP"


@pytest.mark.slow
def test_the_demo_trains_with_both_and_leaves_a_report_that_needs_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loosestep.demo", "--no-network", "--steps", "8", "--width", "0.25"]
    done = subprocess.run(
        [*command, "--report", str(tmp_path / "report.html")],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch DDP" in done.stdout
    assert "DASO(period=4, delay=3)" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "Who does what when" in page
    assert "Plotly.newPlot" in page
    assert "<script src=" not in page


@pytest.mark.parametrize(
    ("option", "value", "message"), [("--daso", "dasso", "did you mean"), ("--bandwidth", "fast", "fast")]
)
def test_bad_options_are_refused_before_anything_starts(tmp_path: Path, option: str, value: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loosestep.demo", option, value],
        cwd=tmp_path, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_diary_survives_its_file(tmp_path: Path) -> None:
    diary = outcome("daso:delay=3", seconds=1.0).diaries[2]
    diary.write(tmp_path)
    file = tmp_path / "daso-2.json"
    assert Diary(**json.loads(file.read_text())).steps == diary.steps
