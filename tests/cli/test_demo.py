"""`loosestep demo`: what a newcomer sees first."""

from __future__ import annotations

import importlib
import re
import webbrowser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loosestep.cli import app
from loosestep.lab import LabError

pytestmark = pytest.mark.usefixtures("own_folder", "warm_ranks")
# in the package this is the name of the command
demo = importlib.import_module("loosestep.cli.demo")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_trains_says_what_it_heard_and_leaves_a_report() -> None:
    arguments = [
        "demo",
        "--no-network",
        "--no-browser",
        "--strategies",
        "daso",
        "--utterances",
        "16",
        "--epochs",
        "4",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"daso +\d+\.\d % → .* %\n", result.output)
    assert re.search(r"said +[A-Z]+", result.output)
    page = re.search(r"Report: (\S+/report\.html)", result.output)
    assert page is not None
    assert "What was recognised" in Path(page[1]).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "fast"], "fast"),
        (["--strategies", "dasso"], "did you mean"),
        (["--utterances", "0"], "8"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not Path("runs").exists()


def test_without_network_namespaces_the_demo_goes_on_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LabError("needs root")

    monkeypatch.setattr(demo, "Lab", refuse)
    said = StringIO()
    assert demo.link(Console(file=said, width=200), "100mbit") is None
    assert "needs root" in said.getvalue()


def test_a_browser_is_opened_only_where_there_is_a_window(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not demo.open_page(tmp_path / "report.html")
    assert not opened
    monkeypatch.setenv("DISPLAY", ":0")
    assert demo.open_page(tmp_path / "report.html")
    assert opened == [(tmp_path / "report.html").as_uri()]
