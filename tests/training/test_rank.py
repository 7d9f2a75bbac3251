"""One rank: what is the user's mistake is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loosestep.record.format import RecordingError
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder
from loosestep.training import rank


def test_a_recording_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RecordingError(
            "recording/rank-0 could not be written: the disk is full; free some space"
        )

    monkeypatch.setattr(rank, "train_rank", fails)
    said: list[dict[str, Any]] = []
    assert rank.guarded(RunFolder(tmp_path), Config(recipe="vision"), said.append) == rank.FAILED
    assert [message["kind"] for message in said] == ["error"]
    assert "the disk is full" in said[0]["text"]


def test_cuda_is_a_gpu_for_every_rank_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [rank.own_device("cuda", local_rank) for local_rank in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert rank.own_device("cuda:1", 0) == "cuda:1"
    assert rank.own_device("cpu", 1) == "cpu"
