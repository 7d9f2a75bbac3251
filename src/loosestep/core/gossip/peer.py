"""One peer as the communication thread sees it: the edge to it, its timers, the exchange that is
under way on it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from loosestep.core.gossip.exchange import Edge


class PendingExchange:
    """An exchange in flight. `outcome` is "exchanged", or "dropped" when the peer went or this rank
    ended in the middle, or "skipped" when the peer was not there.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.outcome = ""

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._event.wait(timeout)

    def finish(self, outcome: str) -> None:
        if not self._event.is_set():
            self.outcome = outcome
            self._event.set()


@dataclass(slots=True)
class Timing:
    """Seconds: between beats; of silence that suspends; before asking again; without a step that
    counts as stalled.
    """

    beat: float = 0.25
    suspend: float = 1.0
    retry: float = 1.0
    stall: float = 30.0
    deadline: float = 60.0


class Rota:
    """Which chunks an exchange carries: on every edge a cursor of its own goes round, so that all
    have their turn. A choice by the round would resonate with the hops of a graph.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._cursors: dict[int, int] = {}

    def next(self, peer: int, share: float) -> list[int]:
        """The chunks of the next exchange with a peer of so large a share of the model."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        first = self._cursors.get(peer, 0)
        count = max(1, round(share * self._chunks))
        return [(first + k) % self._chunks for k in range(count)]

    def take(self, peer: int, share: float) -> list[int]:
        """The same, and it is their turn now."""
        chunks = self.next(peer, share)
        self._cursors[peer] = (chunks[-1] + 1) % self._chunks
        return chunks


@dataclass(slots=True)
class Transfer:
    """One exchange of some chunks with one peer: those not begun yet, and those under way."""

    pending: PendingExchange
    weight: float
    waiting: list[int]
    share: float = 1.0  # of the whole vector
    flying: set[int] = field(default_factory=set)
    outcome: str = "exchanged"  # when nothing waits and nothing flies


@dataclass(slots=True)
class Link:
    """The edge to one peer and its timers."""

    edge: Edge
    transfer: Transfer | None = None
    sent: float = 0.0
    moved: float = 0.0  # when it last made progress or was sent again
    patience: float = 1.0  # grows while nothing is answered
    pinged: float = 0.0  # when it was last asked for its una
    told: float = 0.0  # when it was last told that it is evicted
