"""One peer as the communication thread sees it: the edge to it, its timers, the exchange that is
under way on it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from loosestep.core.gossip.exchange import Edge


class Pending:
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


@dataclass(slots=True)
class Transfer:
    """One exchange of the whole vector with one peer: chunks not begun yet, and those under way."""

    pending: Pending
    weight: float
    waiting: list[int]
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
