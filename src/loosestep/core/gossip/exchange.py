"""The exchange protocol of one edge, without sockets, clocks or threads.

Both ends of an exchange must use the same pair of values, or the mean of the replicas moves. There
is one sequence per unordered pair of ranks and chunk, no roles and no lock across ranks:

    begin       q = ++seen;  a = y;  pend[q] = a;  send REQUEST(q, a)
    on (q, v)   puna = max(puna, una of the message)
      q in pend      a = pend.pop(q);  y += w (v - a);  cache[q] = a     a reply, or a crossing request: a pair either way
      REPLY          ignore
      q in cache     send REPLY(q, cache[q])                             a duplicate
      q < puna       ignore                                              the peer has finished it
      else           b = y;  y += w (v - b);  cache[q] = b;  send REPLY(q, b)
    forget cache below puna;  after a pair with nothing pending send ACK(una)
    timeout     send pend again: same q, same bytes

`una` is the lowest q this end has not finished, and rides on every message; `puna` is the peer's.
The cache is cut by `puna` alone: cutting it by a window loses the mean. Crossing requests may carry
different weights: both ends take the smaller one. Any message may be lost, late or doubled; the sum
of both shadows moves only by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from loosestep.core.messages.frames import FrameKind
from loosestep.core.messages.slots import EdgeSlots
from loosestep.record.format import RecordKind as Record
from loosestep.record.format import pack

Array = NDArray[Any]


@dataclass(slots=True)
class Moved:
    """What an exchange did to one end: the sum of its delta, and the mean square of the
    difference it came from.
    """

    total: float
    square: float


class NotFiniteError(ValueError):
    """A peer's value holds NaN or Inf; nothing was applied."""


class Vector(Protocol):
    """What an edge needs of the shadow."""

    def published_at(self, chunk: int) -> int: ...
    def offer(self, chunk: int, note: bytes = b"", slots: EdgeSlots | None = None) -> Any: ...
    def meet(
        self,
        chunk: int,
        weight: float,
        *,
        mine: Array,
        theirs: Array,
        snapshot: int,
        note: bytes = b"",
    ) -> Moved: ...
    def give(self, buffer: Any) -> None: ...


@dataclass(slots=True)
class Message:
    """One message of the protocol; `value` is None in ACK and PING."""

    kind: FrameKind
    chunk: int
    q: int
    una: int
    weight: float = 0.0
    value: Any = None


@dataclass(slots=True)
class Pair:
    """This end's value in an exchange; once the pair is formed, also what it moved."""

    buffer: Any
    weight: float
    snapshot: int
    moved: float = 0.0  # sum of the delta applied here


@dataclass(slots=True)
class Doubt:
    """What is unknown about a dead peer. Unconfirmed: applied here, perhaps not there; `moved` is
    the sum of these deltas. Unanswered: begun here, perhaps applied there. How far is not known
    here, for the values they met died with the peer: `estimate` of the norm, judging from earlier
    differences.
    """

    unanswered: list[tuple[int, int]] = field(default_factory=list)
    unconfirmed: list[tuple[int, int]] = field(default_factory=list)
    moved: float = 0.0
    estimate: float = 0.0


def pull_of(mine: int, theirs: int) -> float:
    """How far an end moves that stands for so many gradients: the heavier one less, so that
    n_i w_i = n_j w_j and the mean weighted by n is untouched, and never more than the weight."""
    return min(1.0, theirs / mine)


@dataclass(slots=True)
class _Chunk:
    seen: int = 0
    puna: int = 1
    pend: dict[int, Pair] = field(default_factory=dict)
    cache: dict[int, Pair] = field(default_factory=dict)

    @property
    def una(self) -> int:
        return min(self.pend) if self.pend else self.seen + 1


class Edge:
    """This end of the edge to one peer. At most `window` pairs are pending and twice as many
    cached.
    """

    def __init__(
        self,
        shadow: Vector,
        window: int,
        *,
        peer: int = 0,
        pull: float = 1.0,
        slots: EdgeSlots | None = None,
    ) -> None:
        """`pull`: how far this end moves, as a part of an exchange's weight; see `pull_of`."""
        self._pull = pull
        self.window = window
        self._peer = peer
        self.pending = 0
        self.cached = 0
        self.square = 0.0  # running mean square difference to the peer
        self.applied = 0
        self.slots = slots
        self._shadow = shadow
        self._chunks: dict[int, _Chunk] = {}

    def _at(self, chunk: int) -> _Chunk:
        return self._chunks.setdefault(chunk, _Chunk())

    def begin(self, chunk: int, weight: float) -> Message | None:
        """The request that starts an exchange of a chunk; a PING when the peer must first say what
        it has finished; None while this chunk is pending or the window is full.
        """
        state = self._at(chunk)
        if state.pend or self.pending >= self.window:
            return None
        if self.cached >= 2 * self.window or len(state.cache) > 1:
            return self._ping(chunk if state.cache else None)
        state.seen += 1
        buffer = self._take(chunk, state.seen)
        state.pend[state.seen] = Pair(buffer, weight, self._shadow.published_at(chunk))
        self.pending += 1
        return self._request(chunk, state.seen)

    def _take(self, chunk: int, q: int) -> Any:
        return self._shadow.offer(chunk, pack(Record.TAKE, self._peer, chunk, q), self.slots)

    def _ping(self, chunk: int | None = None) -> Message:
        if chunk is None:
            chunk = next(index for index, state in self._chunks.items() if state.cache)
        return Message(FrameKind.PING, chunk, 0, self._at(chunk).una)

    def _request(self, chunk: int, q: int) -> Message:
        state = self._at(chunk)
        pair = state.pend[q]
        return Message(FrameKind.REQUEST, chunk, q, state.una, pair.weight, pair.buffer)

    def unanswered(self) -> list[Message]:
        """The pending requests, to be sent again as they were."""
        return [
            self._request(chunk, q) for chunk, state in self._chunks.items() for q in state.pend
        ]

    def finished(self, chunk: int) -> bool:
        return not self._at(chunk).pend

    def receive(self, message: Message) -> list[Message]:
        """Apply a message (value: an array) and say what to send back."""
        state = self._at(message.chunk)
        state.puna = max(state.puna, message.una)
        answers: list[Message] = []
        if message.kind is FrameKind.PING:
            answers.append(Message(FrameKind.ACK, message.chunk, 0, state.una))
        elif message.kind is not FrameKind.ACK:
            answers = self._pair(state, message)
        for old in [q for q in state.cache if q < state.puna]:
            self._shadow.give(state.cache.pop(old).buffer)
            self.cached -= 1
        return answers

    def _pair(self, state: _Chunk, message: Message) -> list[Message]:
        chunk = message.chunk
        q = message.q
        if q in state.pend:
            self._apply(state, message, state.pend[q])
            del state.pend[q]
            self.pending -= 1
            return [Message(FrameKind.ACK, chunk, 0, state.una)] if not state.pend else []
        if message.kind is FrameKind.REPLY:
            return []
        if q in state.cache:
            return [self._reply(state, chunk, q)]
        if q < state.puna:
            return []
        if self.cached >= 2 * self.window:
            return [self._ping()]  # the peer repeats its request
        self._apply(
            state,
            message,
            Pair(self._take(chunk, q), message.weight, self._shadow.published_at(chunk)),
        )
        state.seen = max(state.seen, q)
        return [self._reply(state, chunk, q)]

    def _reply(self, state: _Chunk, chunk: int, q: int) -> Message:
        pair = state.cache[q]
        return Message(FrameKind.REPLY, chunk, q, state.una, pair.weight, pair.buffer)

    def _apply(self, state: _Chunk, message: Message, pair: Pair) -> None:
        # The cache keeps the weight that was used: a repeated request is answered with exactly this
        # pair.
        pair.weight = min(pair.weight, message.weight)
        moved = self._shadow.meet(
            message.chunk,
            pair.weight * self._pull,
            mine=pair.buffer.value,
            theirs=message.value,
            snapshot=pair.snapshot,
            note=pack(Record.FOLD, self._peer, message.chunk, message.q, pair.weight * self._pull),
        )
        pair.moved = moved.total
        self.square += 0.1 * (moved.square - self.square) if self.applied else moved.square
        self.applied += 1
        state.cache[message.q] = pair
        self.cached += 1

    def close(self) -> None:
        """Let go of all values."""
        self._chunks.clear()

    def drop(self) -> Doubt:
        """The peer is gone: forget everything, and say what stays in doubt."""
        doubt = Doubt()
        for chunk, state in self._chunks.items():
            for q, pair in state.pend.items():
                doubt.unanswered.append((chunk, q))
                doubt.estimate += pair.weight * (self.square * pair.buffer.value.size) ** 0.5
            for q, pair in state.cache.items():
                doubt.unconfirmed.append((chunk, q))
                doubt.moved += pair.moved
        self._chunks.clear()
        self.pending = self.cached = 0
        return doubt
