"""Memory in which the ranks of one host leave values for each other.

A rank writes a value into a slot of its own memory, and the frame that says so holds a header only.
The memory has no name, so that nothing is left of it whoever is killed; peers of the same user find
it through the process that owns it, and map it to read. From its making on the system lets nobody
but its owner write to it, or make it smaller. A slot is written again when the edge has forgotten
its value, that is when the peer has said that it has applied it; an edge that is dropped leaves its
slots as they are, for a peer that was only stopped may still be reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loosestep.core.messages.frames import HEADER_BYTES
from loosestep.core.messages.sockets import Letter

Array = NDArray[Any]

_HEAD = 4096  # bytes before the first slot: the proof that this is the memory that was meant
_PROOF = 32
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: no mapping to write is made any more
_SEALS = 0x1 | 0x2 | 0x4 | _FUTURE_WRITE  # nor is it unsealed, made smaller or larger


def this_host() -> str:
    """What is the same for processes that can read each other's memory and share a loopback; empty
    where that cannot be known.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
            return "/".join([boot.read().strip(), *spaces, str(os.getuid())])
    except OSError:
        return ""


@dataclass(slots=True, eq=False)
class Buffer(Letter):
    """A chunk's value, never changed while an edge refers to it: behind room for its header, and
    sent as it is, or in a slot, to which `home` has it return.
    """

    value: Array = field(kw_only=True)
    slot: int = -1
    home: list[int] | None = None


class OwnSlots:
    """A rank's own memory: `count` slots of `size` bytes, backed when they are first written."""

    def __init__(self, count: int, size: int) -> None:
        self.size = -(-size // 64) * 64
        self.count = count
        total = _HEAD + count * self.size
        self._file = os.memfd_create("loosestep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, total)
            self._memory = mmap.mmap(self._file, total)
            self._memory[:_PROOF] = secrets.token_bytes(_PROOF)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self._file)
            raise

    def card(self) -> dict[str, Any]:
        """Where peers find it."""
        return {
            "process": os.getpid(),
            "file": self._file,
            "proof": self._memory[:_PROOF].hex(),
            "slots": self.count,
            "size": self.size,
        }

    def value(self, slot: int, dtype: np.dtype[Any], length: int) -> Array:
        """A slot's memory, to write."""
        start = _HEAD + slot * self.size
        return np.frombuffer(self._memory, dtype=dtype, count=length, offset=start)

    def close(self) -> None:
        """Let go of it, as soon as no value refers to it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with contextlib.suppress(BufferError):
            self._memory.close()


class TheirSlots:
    """A peer's memory, to read."""

    def __init__(self, card: dict[str, Any]) -> None:
        """Raises OSError where it cannot be reached, or is another's."""
        self.size = int(card["size"])
        self.count = int(card["slots"])
        total = _HEAD + self.count * self.size
        path = f"/proc/{int(card['process'])}/fd/{int(card['file'])}"
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if found.st_size != total or found.st_uid != os.getuid() or not sealed:
                raise OSError(f"{path} is not memory that a peer has made for this")
            self._memory = mmap.mmap(file, total, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        if self._memory[:_PROOF].hex() != card["proof"]:
            raise OSError(f"{path} is not the memory that the peer means")

    def read(self, slot: int, size: int) -> memoryview | None:
        """The bytes of a value; None where there is no such slot."""
        if not 0 <= slot < self.count or size > self.size:
            return None
        start = _HEAD + slot * self.size
        return memoryview(self._memory)[start : start + size]

    def close(self) -> None:
        """Let go of it, as soon as no value refers to it."""
        with contextlib.suppress(BufferError):
            self._memory.close()


def make_slots(count: int, size: int) -> OwnSlots | None:
    """Memory for values; None where the system has none of this kind."""
    with contextlib.suppress(OSError, AttributeError):
        return OwnSlots(count, size)
    return None


def reach(card: dict[str, Any] | None) -> TheirSlots | None:
    """The memory of a peer of this host; None where it has none, or it cannot be reached."""
    if card is not None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return TheirSlots(card)
    return None


class EdgeSlots:
    """The slots of one edge, used once the peer has said that it reads them."""

    def __init__(self, own: OwnSlots, slots: range, dtype: np.dtype[Any]) -> None:
        self.ready = False
        self._own = own
        self._dtype = dtype
        self._free = list(slots)

    def take(self, length: int) -> Buffer | None:
        """A free slot for so many numbers; None where the value has to travel another way."""
        if not self.ready or not self._free:
            return None
        slot = self._free.pop()
        value = self._own.value(slot, self._dtype, length)
        return Buffer(bytearray(HEADER_BYTES), value=value, slot=slot, home=self._free)
