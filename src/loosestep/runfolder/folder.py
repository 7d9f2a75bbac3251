"""The run folder: where everything of a run lies, and how its lines are written and read.

    config.toml      what the run is            trace.jsonl     every event of every rank, in order of time
    metrics.jsonl    progress and evaluations   checkpoint/     states to resume from, and the final model
    report.html      a page to look at          timeline.json   the same events for Perfetto or Chrome
    recording/       what each rank folded      replay/         the run again, from its recording
    writers/         who writes, one file a rank

While a run goes on each rank writes `trace/rank-N.jsonl`; they become `trace.jsonl` when it is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import json
import math
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from loosestep.events import Event
from loosestep.runfolder.config import Config, TrainingError, read_config, write_whole, writing

EVENTS_HELD = 2_000
PATIENCE = 10.0  # ranks whose launcher was killed end by themselves


@dataclass(frozen=True)
class RunFolder:
    """The names in a run folder."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that exists, or an error that says what is there instead."""
        if not path.is_dir():
            raise TrainingError(
                f"{path} does not exist; a run is a folder that loosestep train has made"
            )
        folder = cls(path)
        if not folder.config_file.is_file():
            raise TrainingError(f"{path} is not a run: there is no {folder.config_file.name} in it")
        return folder

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace_file(self) -> Path:
        return self.path / "trace.jsonl"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def timeline_file(self) -> Path:
        return self.path / "timeline.json"

    @property
    def recording(self) -> Path:
        return self.path / "recording"

    @property
    def replay(self) -> Path:
        return self.path / "replay"

    @property
    def final_model(self) -> Path:
        return self.path / "checkpoint" / "final"

    def trace_of(self, rank: int) -> Path:
        return self.path / "trace" / f"rank-{rank}.jsonl"

    def generation(self, number: int) -> Path:
        """Checkpoints of the ranks that a run has had since it was last resumed with other
        ranks.
        """
        return self.path / "checkpoint" / f"generation-{number}"

    def checkpoints_of(self, config: Config, rank: int) -> Path:
        return self.generation(config.generation) / f"rank-{rank}"

    @contextlib.contextmanager
    def written_by(self, rank: int, *, patience: float = PATIENCE) -> Iterator[None]:
        """Inside, no other process writes what a rank of this run writes; the system sees to it,
        however this process ends. `patience`: seconds to wait for one that is about to end.
        """
        path = self._writers / f"rank-{rank}"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            file = path.open("a+")
        with file:
            self._take(file, patience)
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def require_free(self, *, patience: float = PATIENCE) -> None:
        """Raise while ranks of this run are training."""
        for path in self._writers.glob("rank-*"):
            with path.open("a+") as file:
                self._take(file, patience)

    def _take(self, file: TextIO, patience: float) -> None:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.1)
                    continue
            file.seek(0)
            raise TrainingError(
                f"{self.path} is being written by process {file.read()}, and two would destroy "
                "each other's files; wait for its end, or end it"
            )

    @property
    def _writers(self) -> Path:
        return self.path / "writers"

    def config(self) -> Config:
        return read_config(self.config_file)

    @property
    def complete(self) -> bool:
        """Whether the final model was judged and stored."""
        return self.final_model.is_dir() and any(line["kind"] == "final" for line in self.metrics())

    @property
    def diverged(self) -> bool:
        """Whether the loss of a rank was no number any more: nothing that came of it counts as a
        result.
        """
        return any(
            line["kind"] == "progress" and not math.isfinite(line["loss"])
            for line in self.metrics()
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Every line that is whole; a kill may have cut the last one."""
        return list(read_lines(self.metrics_file))

    def events(self) -> Iterator[dict[str, Any]]:
        """All events of all ranks, in order of time: `{"time", "rank", "kind", "fields"}`."""
        return heapq.merge(*map(read_lines, self._traces()), key=lambda line: float(line["time"]))

    def merge_traces(self) -> None:
        """One file out of those of the ranks, which go."""
        if not self.trace_of(0).parent.is_dir():
            return
        write_whole(self.trace_file, (_dumps(event) + "\n" for event in self.events()))
        shutil.rmtree(self.trace_of(0).parent)

    def forget_metrics_after(self, gradients: int) -> None:
        """A resumed run takes another way from there on: what was written beyond is not part of
        it.
        """
        kept = [
            line
            for line in self.metrics()
            if line["gradients"] <= gradients and line["kind"] not in ("final", "end")
        ]
        write_whole(self.metrics_file, (_dumps(line) + "\n" for line in kept))

    def _traces(self) -> list[Path]:
        files = [self.trace_file] if self.trace_file.is_file() else []
        return files + sorted(self.trace_of(0).parent.glob("rank-*.jsonl"))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; one that is cut short or damaged is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


class Journal:
    """One rank's pen: metrics line by line as they come, events in the background of the steps."""

    def __init__(
        self, folder: RunFolder, rank: int, *, trace_bytes: int = 0, began: float | None = None
    ) -> None:
        """`trace_bytes`: where this rank's trace goes on; what lies beyond was written after the
        checkpoint. `began`: wall time of second 0 of a virtual clock.
        """
        self.rank = rank
        self._folder = folder
        with writing(folder.metrics_file):
            self._metrics = os.open(
                folder.metrics_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
        path = folder.trace_of(rank)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._trace = path.open("ab")
            if self._trace.tell() > trace_bytes:
                self._trace.truncate(trace_bytes)
        self._held: deque[Event] = deque()
        # Events of several machines share the wall clock.
        self._to_wall = time.time() - time.monotonic() if began is None else began

    def metric(self, kind: str, *, gradients: int, **fields: Any) -> None:
        """One line, in one write: several ranks append to the same file."""
        line = {
            "kind": kind,
            "rank": self.rank,
            "gradients": gradients,
            "time": round(time.time(), 3),
            **fields,
        }
        data = (_dumps(line) + "\n").encode()
        with writing(self._folder.metrics_file):
            if os.write(self._metrics, data) < len(data):  # a disk that is full has room for a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def event(self, event: Event) -> None:
        """The sink of a trace, called from whichever thread; the training thread writes."""
        self._held.append(event)

    def flush_when_many(self) -> None:
        """Called every step."""
        if len(self._held) >= EVENTS_HELD:
            self.flush()

    def flush(self) -> int:
        """Write what is held; the size of the file afterwards."""
        with writing(self._folder.trace_of(self.rank)):
            while self._held:
                event = self._held.popleft()
                line = {
                    "time": round(event.time + self._to_wall, 6),
                    "rank": self.rank,
                    "kind": event.kind,
                }
                self._trace.write((_dumps({**line, "fields": event.fields}) + "\n").encode())
            self._trace.flush()
            return self._trace.tell()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            with contextlib.suppress(OSError):  # a full disk, already told
                self._trace.close()
            os.close(self._metrics)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
