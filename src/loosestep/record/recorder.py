"""Recording: a run tells its tape what it does; `Recorder` writes it down, `NoTape` lets it pass, a
replay answers.

Everything in a run that depends on time goes through its tape, so that a replay can give the same
answers again.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from loosestep.record.format import (
    BEHIND,
    FORMAT,
    MAGIC,
    RecordingError,
    RecordKind,
    frame,
    pack,
    rank_file,
)
from loosestep.version import __version__

DIGEST_SHARE = 0.002  # of the CPU time may be spent on digests of the parameters


class Tape(Protocol):
    """What a run and its engine tell the recording. `binds`: whether the order of events is
    written down, or was. `writer`: where to write it.
    """

    binds: bool
    writer: Recorder | None

    def step(self) -> None:
        """The boundary of an optimizer step begins."""

    def stepped(self, global_steps: int, digest: Callable[[], int]) -> int:
        """It is complete. The global step count that counts."""

    def number(self, value: int) -> int:
        """A number that depends on time: recorded, or the recorded one."""

    def value(self, compute: Callable[[], Any]) -> Any:
        """The same for anything that JSON can hold; not computed in a replay."""

    def ended(self, global_steps: int, digest: Callable[[], int]) -> int:
        """The run was finished. The global step count that counts."""

    def breaking(self, reason: str) -> None:
        """The run ends otherwise; communication still goes on."""

    def aborted(self, reason: str) -> None:
        """It has ended so."""


class NoTape:
    """Nothing is recorded."""

    binds = False
    writer: Recorder | None = None

    def step(self) -> None:
        pass

    def stepped(self, global_steps: int, digest: Callable[[], int]) -> int:
        return global_steps

    def number(self, value: int) -> int:
        return value

    def value(self, compute: Callable[[], Any]) -> Any:
        return compute()

    def ended(self, global_steps: int, digest: Callable[[], int]) -> int:
        return global_steps

    def breaking(self, reason: str) -> None:
        pass

    def aborted(self, reason: str) -> None:
        pass


class Recorder:
    """Appends to the recording of one rank, unbuffered, from whichever thread."""

    binds = True

    def __init__(self, folder: Path, rank: int, header: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.writer: Recorder | None = self
        self._path = rank_file(folder, rank)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._lock = threading.Lock()
        self._begun = time.process_time()
        self._digesting = 0.0
        first, self._crc = frame(json.dumps(header).encode(), 0)
        self._append(MAGIC + first)

    def write(self, body: bytes, behind: bool = False) -> None:
        """One record, in one call."""
        if behind:
            body = bytes([body[0] | BEHIND]) + body[1:]
        with self._lock:
            if self._file >= 0:
                framed, self._crc = frame(body, self._crc)
                self._append(framed)

    def _append(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise RecordingError(
                f"{self._path} could not be written: {error.strerror}; free some space"
            ) from error
        if written < len(data):
            raise RecordingError(
                f"{self._path} could not be written: the disk is full; free some space"
            )

    def step(self) -> None:
        """The boundary of an optimizer step begins."""
        self.write(pack(RecordKind.STEP))

    def stepped(self, global_steps: int, digest: Callable[[], int]) -> int:
        """It is complete; with a digest as often as its cost allows."""
        if self._digesting > DIGEST_SHARE * (time.process_time() - self._begun):
            self.write(pack(RecordKind.STEPPED, global_steps))
            return global_steps
        begun = time.thread_time()
        value = digest()
        self._digesting += time.thread_time() - begun
        self.write(pack(RecordKind.CHECKED, global_steps, value))
        return global_steps

    def number(self, value: int) -> int:
        """Written down."""
        self.write(pack(RecordKind.NUMBER, value))
        return value

    def value(self, compute: Callable[[], Any]) -> Any:
        """Computed and written down."""
        text = json.dumps(compute())
        self.write(pack(RecordKind.VALUE, rest=text.encode()))
        return json.loads(text)  # what a replay will see

    def ended(self, global_steps: int, digest: Callable[[], int]) -> int:
        """The last record."""
        self.write(pack(RecordKind.END, global_steps, digest()))
        self._close()
        return global_steps

    def breaking(self, reason: str) -> None:
        """What is still sent is still recorded."""

    def aborted(self, reason: str) -> None:
        """The last record."""
        self.write(pack(RecordKind.ABORT, rest=reason.encode()))
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """A fingerprint of the bits of tensors, 64 bits of xxh3."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().data)
    return state.intdigest()


def circumstances() -> dict[str, Any]:
    """What bits may depend on, beside the model and the recording."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def make_header(
    *, rank: int, nodes: list[list[int]], strategy: str, layout: list[str]
) -> dict[str, Any]:
    """What a recording says about itself at its beginning."""
    about = {"format": FORMAT, "loosestep": __version__, **circumstances()}
    return {
        **about,
        "rank": rank,
        "nodes": nodes,
        "strategy": strategy,
        "layout": layout,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in names if line.startswith("model name")),
        platform.machine(),
    )
