"""The run folder: what cannot be written is said, with the name of the file."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.processes
def test_two_processes_cannot_write_one_run_and_a_kill_frees_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    text = (
        "import sys, time; from pathlib import Path; "
        "from loosestep.runfolder.folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).written_by(1):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)"
    )
    command = [sys.executable, "-c", text, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with folder.written_by(0):
            pass
        with pytest.raises(TrainingError, match=f"is being written by process {other.pid} on "):
            folder.require_free(patience=0)
        with (
            pytest.raises(TrainingError, match="would destroy"),
            folder.written_by(1, patience=0),
        ):
            pass
        other.kill()
    folder.require_free()
    with folder.written_by(1):
        pass
