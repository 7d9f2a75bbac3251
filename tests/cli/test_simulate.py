"""`loosestep simulate` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loosestep.cli import app
from loosestep.runfolder.folder import RunFolder

pytestmark = pytest.mark.usefixtures("own_folder")
TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:recipe"


def simulate(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", TINY, *arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_names_that_look_like_markup_and_one_speed(tmp_path: Path) -> None:
    said = simulate("--gradients", "8", "--compute", "10ms", "--name", "a[/b]c")
    assert "run folder runs/a[/b]c" in said
    assert Path("runs/a[/b]c/report.html").exists()
    figures = said.partition("virtual time")[2]
    assert figures.count("per second") + figures.count("gradients/s") == 1


def test_a_recipe_is_trained_on_virtual_ranks_and_reported(tmp_path: Path) -> None:
    said = simulate(
        "--strategy",
        "adpsgd:graph=random-ring",
        "--nodes",
        "4",
        "--ranks-per-node",
        "2",
        "--gradients",
        "160",
        "--compute",
        "100ms",
        "--slow",
        "3:10x",
        "--kill",
        "5@1s",
        "--name",
        "eight",
    )
    folder = RunFolder(tmp_path / "runs" / "eight")
    assert "on 8 virtual ranks" in said
    assert "66 per second" in said  # six at ten a second, one at one, one that is killed after ten
    assert "rank 5 was killed after 1 s; the others went on without it" in said
    assert folder.report_file.stat().st_size > 100_000
    assert "slow {3: 10.0}" in folder.config().environment["simulated"]
    refused = CliRunner().invoke(app, ["resume", str(folder.path), "--gradients", "320"])
    assert refused.exit_code == 2
    assert "was simulated" in refused.output


def test_a_simulation_that_diverged_leaves_a_report_too(tmp_path: Path) -> None:
    said = simulate(
        "--gradients", "8", "--compute", "1ms", "--set", "scale=nan", "--name", "odd", code=2
    )
    assert "training loss is nan" in said
    assert "daso: diverged" in (tmp_path / "runs/odd/report.html").read_text()


def test_timing_only_trains_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    said = simulate(
        "--nodes",
        "64",
        "--ranks-per-node",
        "4",
        "--timing-only",
        "--compute",
        "100ms",
        "--gradients",
        "5120",
    )
    assert "ranks 256" in said
    assert "of the speed without communication" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--compute", "fast"], "expected a duration such as 20ms"),
        (["--bandwidth", "10"], "expected a rate such as 500mbit"),
        (["--slow", "3"], "expected RANK:FACTORx"),
        (["--slow", "9:2x", "--nodes", "2"], "slow names rank 9, but there are only ranks 0 to 1"),
        (["--kill", "soon"], "--kill 'soon': expected RANK@TIME"),
        (["--join", "1"], "--join '1': expected RANK@TIME"),
        (["--strategy", "dasso"], "did you mean 'daso'?"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], told: str) -> None:
    said = simulate("--compute", "10ms", *arguments, code=2)
    assert told in said
    assert "Traceback" not in said
