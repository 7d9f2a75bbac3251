"""Memory of a shadow that two processes of one rank see, and the lock over it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loosestep.core.gossip.memory import WIDTH

Array = NDArray[Any]

_PAGE = 4096


class FileLock:
    """A lock over a file, between threads and between processes. The system takes it from a
    process that dies.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._threads.release()


class Room:
    """Vectors and a table in memory that has no name, so that nothing is left of it."""

    def __init__(
        self, count: int, chunks: int, size: int, dtype: np.dtype[Any], *, file: int | None = None
    ) -> None:
        """`file`: memory that another process has made, with the same figures."""
        head = -(-(1 + chunks) * WIDTH * 8 // _PAGE) * _PAGE
        each = -(-size * dtype.itemsize // _PAGE) * _PAGE
        total = head + count * each
        self.figures = (count, chunks, size, dtype.str)
        self.file = os.memfd_create("loosestep", os.MFD_CLOEXEC) if file is None else file
        if file is None:
            os.ftruncate(self.file, total)
        self._memory = mmap.mmap(self.file, total)
        numbers = (1 + chunks) * WIDTH
        self.table: Array = np.frombuffer(self._memory, np.int64, numbers).reshape(-1, WIDTH)
        self.vectors: list[Array] = [
            np.frombuffer(self._memory, dtype, size, head + index * each) for index in range(count)
        ]
        self.lock = FileLock(self.file)

    def close(self) -> None:
        """Let go of it, as soon as nothing refers to it."""
        self.vectors = []
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        with contextlib.suppress(BufferError):
            self._memory.close()
