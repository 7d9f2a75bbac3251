"""`--help` and Tab: enough to need nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loosestep.cli import COMMANDS, app, completion
from loosestep.strategies import STRATEGIES
from loosestep.version import __version__


@pytest.fixture(params=["train", "compare", "simulate"])
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The help of a command in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    return CliRunner().invoke(app, [request.param, "--help"]).output


def test_help_names_every_strategy_with_its_fields(page: str) -> None:
    for name, entry in STRATEGIES.entries().items():
        told = re.search(rf"^ +{name} .*\n(?: {{17}}.*\n)*", page, re.MULTILINE)
        assert told, name
        assert all(f"{field}=" in told[0] for field in entry.defaults()), told[0]


def test_help_tells_the_layouts_of_data_and_the_signature_of_a_recipe(page: str) -> None:
    for word in ("transcripts.tsv", "feat/ID.mfc", "train/CLASS/*.png", "train.npz", "--options"):
        assert word in page
    assert "def recipe(options, *, data, seed, device, progress):" in page


def test_help_fits_a_terminal(page: str) -> None:
    assert max(map(len, page.splitlines())) <= 80


def offered(line: str) -> list[str]:
    """What bash is offered at the end of this line."""
    words = line.split(" ")
    variables = {
        "_LOOSESTEP_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="loosestep", env=variables).output.split()


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("loosestep tr", ["train"]),
        ("loosestep train a", ["acoustic"]),
        ("loosestep train m", ["mine.py"]),
        ("loosestep train fold", ["folder/"]),
        ("loosestep train folder/", ["folder/other.py"]),
        ("loosestep train nowhere/", []),
        ("loosestep train vision --strategy da", ["daso", "daso-paper"]),
        ("loosestep compare vision --strategies allreduce,ad", ["allreduce,adpsgd"]),
        ("loosestep train vision --device c", ["cpu", "cuda"]),
        ("loosestep train vision --set mo", ["model=", "momentum="]),
        ("loosestep train acoustic --set ce", ["cells=", "cepstra="]),
        ("loosestep train --set ce", []),
    ],
)
def test_tab_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, completions: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for file in ("mine.py", "notes.txt", "folder/other.py", "folder/data.csv"):
        (tmp_path / file).touch()
    assert offered(line) == completions


# bash itself parts words at : and =, other shells do not
def test_the_last_of_several_strategies_is_completed() -> None:
    assert completion.strategies("daso:period=4,delay=1,loc") == ["daso:period=4,delay=1,localsgd"]


@pytest.mark.processes
def test_the_list_of_commands_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['loosestep', '--help']\n"
        "from loosestep.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'plotly' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_a_command_is_in_the_list_with_what_its_own_help_says() -> None:
    for name, line in COMMANDS.items():
        help_of_its_own = CliRunner().invoke(app, [name, "--help"]).output
        first = re.split(r"[:,;.]", line)[0]
        assert first in " ".join(help_of_its_own.split()), name


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"loosestep {__version__}\n"
