"""What a machine takes for the work around communication. Nothing here depends on the strategy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

MICROSECOND = 1e-6
GIGABYTE = 1e9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The figures of one kind of machine; the defaults are a server's processor with gloo over TCP,
    as measured here.

    `copy`: bytes per second of one pass over memory that no cache holds, read and written.
    `operation`: seconds of processor per operation on a communication thread: Python, system calls.
    `message`: seconds of a message between two ranks beyond latency and bytes, above all waking a
    thread. `meeting`: seconds of a meeting of the ranks of a node in shared memory. `payload`: the
    share of a link's rate that carries values; the rest are headers and gaps. `crowd`: the share of
    that which an average of more than two members reaches: its rounds load the link unevenly.
    `step`: seconds of processor per step of any attached loop: hooks and events. `gossip`: seconds
    of processor per byte that gossip sends or receives: copies, checksums, sockets. `cores`:
    processor cores per rank. Below 1, ranks that work at the same time slow each other down
    accordingly; gossip paces itself by its share of them.
    """

    copy: float = 5 * GIGABYTE
    operation: float = 200 * MICROSECOND
    message: float = 200 * MICROSECOND
    meeting: float = 200 * MICROSECOND
    payload: float = 0.94
    crowd: float = 1.0
    step: float = 100 * MICROSECOND
    gossip: float = 1.2e-9
    cores: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive = field.name in ("copy", "payload", "crowd", "cores")
            if (
                not isinstance(value, int | float)
                or not isfinite(value)
                or value < 0
                or (positive and value == 0)
            ):
                least = "above 0" if positive else "at least 0"
                raise ValueError(f"{field.name} must be a number {least}, got {value!r}")
        for name in ("payload", "crowd"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"{name} is a share of the link's rate and at most 1, got {getattr(self, name)}"
                )

    def work(self, size: float = 0.0, *, passes: float = 1.0, operations: int = 0) -> float:
        """Seconds to go over `size` bytes of memory so many times, in so many operations, as the
        other ranks do too.
        """
        return (passes * size / self.copy + operations * self.operation) / min(1.0, self.cores)
