"""The run folder: what cannot be written is said, with the name of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loosestep.runfolder.config import TrainingError
from loosestep.runfolder.folder import Journal, RunFolder


def test_a_line_that_fits_only_in_part_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    with Journal(folder, 0) as journal:
        journal.metric("begin", gradients=0)
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
        with pytest.raises(
            TrainingError, match=r"metrics\.jsonl could not be written: No space left on device"
        ):
            journal.metric("progress", gradients=1)
        monkeypatch.undo()
    assert [line["kind"] for line in folder.metrics()] == ["begin"]


@pytest.mark.parametrize("name", ["trace", "metrics.jsonl"])
def test_a_journal_that_cannot_be_opened_names_the_file(tmp_path: Path, name: str) -> None:
    in_the_way = tmp_path / name
    if name == "trace":
        in_the_way.touch()
    else:
        in_the_way.mkdir()
    with pytest.raises(TrainingError, match=rf"{name}.* could not be written"):
        Journal(RunFolder(tmp_path), 0)
