"""How a gossip run ends: identical parameters on every rank, whoever dies on the way.

    DONE      a rank begins no more exchanges, and keeps answering
    DRAINED   and none of its own is unfinished; when all present ranks say so, no shadow changes any more
    collect   the lowest present rank reads all shadows under a new view, and averages them in rank order
    HOLDS     whoever has the average says so; the others read it from any holder
    leave     when every present rank holds it

Views are promises, as in Paxos: who has answered the collection of a view takes no result that was
asked for under an older one. A coordinator that finds a holder among the ranks it collects from
takes that result instead of making another. So two different averages never exist among the living:
either a rank completed its copy before it answered the new coordinator, who then learns of it, or
it answered first, and the old copy is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loosestep.core.gossip.fetch import Answers, Fetch
from loosestep.core.gossip.memory import Memory
from loosestep.core.messages.frames import Flags, Topic
from loosestep.core.messages.members import Members
from loosestep.record.format import RecordKind as Record
from loosestep.record.format import pack, pack_readings

Array = NDArray[Any]

_RANKS = 1 << 20  # views of different coordinators differ: view = round * 2^20 + rank


class Ending:
    """One rank's part in the end of the run. `advance()` after every event; pure apart from the
    shadow it reads.
    """

    def __init__(
        self,
        rank: int,
        shadow: Memory,
        members: Members,
        *,
        retry: float,
        weights: Mapping[int, int],
    ) -> None:
        self._weights = weights
        self._rank = rank
        self._shadow = shadow
        self._members = members
        self._retry = retry
        self.promised = 0
        self.highest = 0  # the highest view anybody is known to have promised
        self.done = self.drained = self.holds = self.complete = False
        self.result: Array | None = None
        self.fetch: Fetch | None = None

    def flags(self) -> Flags:
        said = Flags.DONE if self.done else Flags.NONE
        said |= Flags.DRAINED if self.drained else Flags.NONE
        return said | (Flags.HOLDS if self.holds else Flags.NONE)

    def advance(self, *, pending: int) -> bool:
        """Go as far as what is known allows; True when this rank's flags changed and should be
        told.
        """
        before = self.flags()
        present = self._members.present()
        if self.done and not pending:
            self.drained = True
        if self.drained and not self.holds:
            self._obtain(present)
        if self.holds and self._members.all_flag(present, Flags.HOLDS):
            self.complete = True
        return self.flags() != before

    def _obtain(self, present: set[int]) -> None:
        holders = {rank for rank in present if self._members.peers[rank].flags & Flags.HOLDS}
        if holders:
            self._read_from(min(holders))
        elif self._rank < min(present, default=self._rank + 1) and self._members.all_flag(
            present, Flags.DRAINED
        ):
            self._collect(present)
        if self.fetch is not None and self.fetch.done:
            self.fetch = None
            self.holds = True
            self._shadow.note(pack(Record.HOLD))

    def _read_from(self, holder: int) -> None:
        if not self._fetching(Topic.RESULT) or not self.fetch_ranks() <= self._members.present():
            self._start(Topic.RESULT, {holder}, self._keep)

    def _fetching(self, topic: Topic) -> bool:
        return self.fetch is not None and (self.fetch.topic, self.fetch.tag) == (
            topic,
            self.promised,
        )

    def fetch_ranks(self) -> set[int]:
        return self.fetch.ranks if self.fetch is not None else set()

    def _collect(self, present: set[int]) -> None:
        if (
            self._fetching(Topic.FINAL)
            and self.fetch_ranks() == present
            and self.promised >= self.highest
        ):
            return
        self.highest = max(self.highest, self.promised)
        self.promised = self.highest = (self.highest // _RANKS + 1) * _RANKS + self._rank
        self._start(Topic.FINAL, present, self._average)

    def _start(self, topic: Topic, ranks: set[int], use: Callable[[int, Answers], None]) -> None:
        if self.result is None:
            self.result = np.empty(self._shadow.size, dtype=self._shadow.dtype)
        self.fetch = Fetch(
            topic, self.promised, ranks, chunks=self._shadow.chunks, use=use, retry=self._retry
        )

    def _keep(self, chunk: int, values: Answers) -> None:
        ((holder, value),) = values.items()
        self._shadow.note(pack(Record.KEEP, chunk, holder))
        assert self.result is not None
        self._shadow.slice(chunk, self.result)[:] = value

    def _average(self, chunk: int, values: Answers) -> None:
        assert self.result is not None
        mine = self._shadow.read(chunk, pack_readings(Record.FINAL, chunk, values.serials)).value
        average(self._shadow, chunk, {**values, self._rank: mine}, self.result, self._weights)

    def answer(self, topic: int, view: int, chunk: int, note: bytes = b"") -> Array | None:
        """The value to send for an ASK; None when there is none to give. `note`: written down if
        the shadow is read.
        """
        if topic == Topic.RESULT:
            return (
                self._shadow.slice(chunk, self.result)
                if self.holds and self.result is not None
                else None
            )
        if view < self.promised or not self.drained:
            return None
        if view > self.promised:
            # what was asked for under an older view is refused from here on
            self.promised = view
            self.fetch = None
        return self._shadow.read(chunk, note).value


def average(
    shadow: Memory, chunk: int, values: dict[int, Array], out: Array, weights: Mapping[int, int]
) -> None:
    """out[chunk] <- weighted mean of the values, summed in rank order in float64."""
    total = np.zeros(shadow.length(chunk), dtype=np.float64)
    for rank in sorted(values):
        total += values[rank] if weights[rank] == 1 else weights[rank] * values[rank]
    np.divide(total, sum(weights[rank] for rank in values), out=total)
    shadow.slice(chunk, out)[:] = total
