"""The event log of a run: what happened when, and the figures that follow from it.

Every step, exchange start, landing, fold and wait is an event with a monotonic time. `Trace` keeps
the latest events for timelines, running totals for `stats`, and hands every event to an optional
sink (a file, a progress bar).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KEPT = 200_000


class Event(NamedTuple):
    """One event: `time` is monotonic seconds, `kind` one of step, start, landed, fold, wait, join,
    phase, sent, distance, or what has become of a peer (peer_dead, ...).
    """

    time: float
    kind: str
    fields: dict[str, Any]


@dataclass
class Totals:
    """What `stats` reports, updated event by event."""

    steps: int = 0
    exchanges: int = 0
    folds: int = 0
    joins: int = 0
    bytes_sent: int = 0
    bytes_between_nodes: int = 0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    staleness_sum: float = 0.0
    staleness_max: int = 0
    consensus_distance: float = 0.0

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Account for one event."""
        if kind == "step":
            self.steps += 1
        elif kind == "wait":
            self.wait_seconds += fields["seconds"]
        elif kind == "sent":
            self.bytes_sent += fields["bytes"]
            self.bytes_between_nodes += fields["between_nodes"]
        elif kind == "start":
            self.exchanges += 1
        elif kind == "landed":
            self.exchange_seconds += fields["seconds"]
        elif kind == "fold":
            self.folds += 1
            self.staleness_sum += fields["staleness"]
            self.staleness_max = max(
                self.staleness_max, fields.get("staleness_max", fields["staleness"])
            )
        elif kind == "join":
            self.joins += 1
        elif kind == "distance":
            self.consensus_distance = fields["value"]

    @property
    def staleness_mean(self) -> float:
        """Steps between the start of an exchange and its fold, on average."""
        return self.staleness_sum / self.folds if self.folds else 0.0


@dataclass
class Trace:
    """Append-only, bounded in memory: the latest events, the totals of all."""

    clock: Callable[[], float] = time.monotonic
    sink: Callable[[Event], None] | None = None
    totals: Totals = field(default_factory=Totals)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def emit(self, kind: str, **fields: Any) -> None:
        """Log one event now, from whichever thread."""
        event = Event(self.clock(), kind, fields)
        with self._lock:
            self.events.append(event)
            self.totals.add(kind, fields)
        if self.sink is not None:
            self.sink(event)
