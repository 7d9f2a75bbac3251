"""Shared by the tests of the commands."""

from pathlib import Path

import pytest


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command runs that leaves things behind; its lines are not folded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LOOSESTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path
