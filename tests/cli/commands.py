"""The commands as a user types them."""

from __future__ import annotations

import sys
from pathlib import Path

from typer.testing import CliRunner

from loosestep.cli import app

TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:recipe"
COMMAND = [sys.executable, "-c", "from loosestep.cli import main; main()"]


def loosestep(*arguments: str, code: int = 0) -> str:
    """Run a command; the output. The commands that start ranks start them as processes."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output
