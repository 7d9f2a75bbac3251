"""Memory that the ranks of one node share: averaging inside a node without the network stack.

Every rank has two slots and writes them in turn. An operation is: write your slot, meet (one small message through the
group), read everybody's. Whoever meets for the next operation has finished reading this one, so a slot is written again
only when nobody reads it any more. The file is unlinked as soon as everybody has it open: nothing is left by a crash.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path("/dev/shm")
LIMIT = 32 << 20  # bytes in all: containers often have 64 MB
LARGEST = 4 << 20


class Slots:
    """The slots of all ranks; `turn` alternates with every operation."""

    def __init__(self, memory: mmap.mmap, *, index: int, size: int, capacity: int) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).view(2, size, capacity)
        self._index, self.capacity = index, capacity
        self._turn = 0

    def write(self, values: torch.Tensor) -> None:
        """Put values into the own slot of the next turn."""
        self._turn = 1 - self._turn
        self.read(self._index, values).copy_(values)

    def read(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """The values in a rank's slot, as many and of the dtype of `like`; not a copy."""
        return self._bytes[self._turn, rank].view(like.dtype)[: like.numel()]

    def pieces(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """A flat tensor in pieces that fit into a slot."""
        return iter(values.split(self.capacity // values.element_size()))


def open_slots(store: dist.Store, *, index: int, size: int) -> Slots | None:
    """Make the memory (index 0) or open it (the others); None where this rank cannot."""
    if not FOLDER.is_dir():
        return None
    capacity = min(LARGEST, LIMIT // (2 * size)) // 4096 * 4096
    length = 2 * size * capacity
    if index == 0:
        path = FOLDER / f"loosestep-{secrets.token_hex(8)}"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.posix_fallocate(handle, 0, length)  # a full folder is an error here, not a crash at the first write
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            store.set("memory", "none")
            return None
        store.set("memory", str(path))
    else:
        path = Path(store.get("memory").decode())
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return None
    try:
        return Slots(mmap.mmap(handle, length), index=index, size=size, capacity=capacity)
    finally:
        os.close(handle)


def forget(store: dist.Store, index: int) -> None:
    """Everybody has opened it: take the name away."""
    if index == 0:
        with contextlib.suppress(OSError):
            Path(store.get("memory").decode()).unlink()
