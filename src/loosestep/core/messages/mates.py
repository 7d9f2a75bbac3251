"""The processes of other ranks on this machine: the system says at once when one has ended."""

from __future__ import annotations

import os
import select

# missing on other systems than Linux
_open_handle = getattr(os, "pidfd_open", None)


def own_place() -> list[str | int]:
    """Where this process is found: a name for all that number processes alike, and its number."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return [f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}", os.getpid()]
    except OSError:
        return ["", os.getpid()]


class Mates:
    """What one thread sleeps on: the ends of processes, and a call that wakes it."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by handle
        self._known: set[int] = set()
        self._gone: list[int] = []  # that had ended before they could be watched
        self._wake_in, self._wake_out = os.pipe()
        self._poll.register(self._wake_in, select.POLLIN)
        self._numbering = own_place()[0]

    def watch(self, rank: int, place: list[str | int]) -> None:
        """Watch the process of a rank, if it is one of this machine."""
        if rank in self._known or _open_handle is None:
            return
        self._known.add(rank)
        if place[0] == self._numbering != "":
            try:
                handle = _open_handle(int(place[1]))
            except ProcessLookupError:
                self._gone.append(rank)
            except OSError:  # it may not be watched
                return
            else:
                self._ranks[handle] = rank
                self._poll.register(handle, select.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """Sleep so long, or until `wake`; the ranks whose processes have ended."""
        ended = self._gone
        self._gone = []
        for handle, _ in self._poll.poll(0 if ended else seconds * 1000):
            if handle != self._wake_in:
                ended.append(self._ranks.pop(handle))
                self._poll.unregister(handle)
                os.close(handle)
        return ended

    def wake(self) -> None:
        """End the sleep, this one and every later one; from any thread."""
        os.write(self._wake_out, b"!")

    def close(self) -> None:
        for handle in (self._wake_in, self._wake_out, *self._ranks):
            os.close(handle)
        self._ranks.clear()
