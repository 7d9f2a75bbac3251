"""Memory that the ranks of one node share: averaging inside a node without the network stack.

Every rank has two slots and writes them in turn. An operation is: write your slot, meet (a datagram
to every other rank), read everybody's. Whoever meets for the next operation has finished reading
this one, so a slot is written again only when nobody reads it any more.

Memory and sockets lie in a folder that only this user may enter, under a name that follows from the
run's secret. It is removed as soon as everybody has everything open: nothing is left by a crash.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from loosestep.core.messages.sealed_store import SealedStore

FOLDER = Path("/dev/shm")
MEMORY = "memory"
LIMIT = 32 << 20  # bytes in all: containers often have 64 MB
LARGEST = 4 << 20
SLICE = 0.25  # seconds between two looks at the heartbeats
HERE = struct.Struct("<IQ")  # rank, number of the meeting; then a note
NOTE = 256  # bytes of a note, at most


class Watch(Protocol):
    """Who knows about lost ranks."""

    def check(self) -> None:
        """Raise if somebody is lost."""

    def suspect(self) -> None:
        """Somebody does not answer."""


class Meeting:
    """A barrier of the ranks of a node: everybody tells everybody that it is there, by Unix
    datagrams.

    Ten times cheaper than a collective of the process group, and there is one for every bucket of
    gradients.
    """

    def __init__(self, folder: Path, *, index: int, size: int) -> None:
        """Listen in `folder`, which nobody else's processes can enter."""
        self._index = index
        self._size = size
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / str(index)))
        self._socket.settimeout(SLICE)
        self._lines: dict[int, socket.socket] = {}  # to the others
        self._number = 0
        # what each rank said, by meeting
        self._notes: list[dict[int, bytes]] = [{} for _ in range(size)]

    def reach(self) -> bool:
        """Connect to the others, who listen; whether all could be reached. The folder may go."""
        for rank in range(self._size):
            if rank != self._index:
                line = self._lines[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                line.settimeout(SLICE)
                try:
                    line.connect(str(self._folder / str(rank)))
                except OSError:
                    return False
        return True

    def meet(self, watch: Watch, note: bytes = b"") -> list[bytes]:
        """Wait for everybody; everybody's note, in rank order. `watch` is asked now and then,
        and raises when somebody is lost.
        """
        self._number += 1
        message = HERE.pack(self._index, self._number) + note
        self._notes[self._index][self._number] = note
        for rank in range(self._size):
            if rank != self._index:
                self._tell(rank, message, watch)
        while missing := [
            rank for rank, notes in enumerate(self._notes) if self._number not in notes
        ]:
            try:
                heard = self._socket.recv(HERE.size + NOTE)
            except TimeoutError:
                if not all(map(self._is_there, missing)):
                    watch.suspect()
                watch.check()
            else:
                if heard:  # not just somebody who looks whether this rank is there
                    rank, number = HERE.unpack_from(heard)
                    self._notes[rank][number] = heard[HERE.size :]
        return [notes.pop(self._number) for notes in self._notes]

    def _is_there(self, rank: int) -> bool:
        """Whether a rank's socket is open."""
        try:
            self._lines[rank].send(b"", socket.MSG_DONTWAIT)
        except BlockingIOError:  # its queue is full
            return True
        except OSError:  # refused; after that the line is not connected any more
            return False
        return True

    def _tell(self, rank: int, message: bytes, watch: Watch) -> None:
        while True:
            try:
                self._lines[rank].send(message)
                return
            except TimeoutError:  # its queue is full
                watch.check()
            except OSError:  # it is gone: the heartbeats will say so
                watch.suspect()
                watch.check()
                time.sleep(SLICE)

    def close(self) -> None:
        for each in (self._socket, *self._lines.values()):
            each.close()


class Slots:
    """The slots of all ranks; `turn` alternates with every operation."""

    def __init__(
        self, memory: mmap.mmap, meeting: Meeting, *, index: int, size: int, capacity: int
    ) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).view(2, size, capacity)
        self._index = index
        self.capacity = capacity
        self.meeting = meeting
        self._turn = 0
        self._views: dict[tuple[int, int, torch.dtype, int], torch.Tensor] = {}

    def next(self, like: torch.Tensor) -> torch.Tensor:
        """The own slot of the next turn, to be written."""
        self._turn = 1 - self._turn
        return self.read(self._index, like)

    def read(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """The values in a rank's slot, as many and of the dtype of `like`; not a copy, and
        always the same tensor.
        """
        key = (self._turn, rank, like.dtype, like.numel())
        if key not in self._views:
            self._views[key] = self._bytes[self._turn, rank].view(like.dtype)[: like.numel()]
        return self._views[key]

    def pieces(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """A flat tensor in pieces that fit into a slot."""
        return iter(values.split(self.capacity // values.element_size()))


def slot_bytes(size: int) -> int:
    """What fits into one slot, of two for each rank."""
    return min(LARGEST, LIMIT // (2 * size)) // 4096 * 4096


def open_slots(store: SealedStore, *, index: int, size: int) -> Slots | None:
    """Make the memory (index 0) or open it (the others); None where this rank cannot."""
    if not FOLDER.is_dir():
        return None
    capacity = slot_bytes(size)
    length = 2 * size * capacity
    folder = _folder_of(store)
    try:
        if index == 0:
            folder.mkdir(mode=0o700)
            handle = os.open(folder / MEMORY, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # a full folder is an error here, not a crash at the first write
            os.posix_fallocate(handle, 0, length)
            store.set(MEMORY, "there")
        elif store.get(MEMORY) == b"there" and _is_ours(folder):
            handle = os.open(folder / MEMORY, os.O_RDWR | os.O_NOFOLLOW)
        else:
            return None
    except OSError:
        if index == 0:
            store.set(MEMORY, "none")
        return None
    try:
        meeting = Meeting(folder, index=index, size=size)
        memory = mmap.mmap(handle, length)
        return Slots(memory, meeting, index=index, size=size, capacity=capacity)
    finally:
        os.close(handle)


def forget(store: SealedStore, index: int) -> None:
    """Everybody has opened everything: take the names away."""
    if index == 0:
        shutil.rmtree(_folder_of(store), ignore_errors=True)


def _folder_of(store: SealedStore) -> Path:
    """Every rank of the run comes to the same name by itself, and nobody else does."""
    return FOLDER / f"loosestep-{store.secret_name('node')}"


def _is_ours(folder: Path) -> bool:
    """Whether a folder, not a link to one, is this user's and nobody else's."""
    there = folder.lstat()
    private = stat.S_ISDIR(there.st_mode) and not there.st_mode & 0o077
    return private and there.st_uid == os.geteuid()
