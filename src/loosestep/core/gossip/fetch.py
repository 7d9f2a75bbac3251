"""Reading a vector from peers, chunk by chunk, as often as it takes.

One mechanism serves the consensus (the shadows as they are), the end of a run (the drained shadows,
then the agreed average) and lockstep rounds (the vectors a round started from): ASK a chunk of a
topic, get its VALUE, ask again when nothing came. At most `window` chunks are asked for at a time,
so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray

from loosestep.core.messages.frames import Topic

Array = NDArray[Any]


class Answers(dict[int, Array]):
    """Values by rank; `serials` say which reading of a peer's shadow each of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.serials: dict[int, int] = {}


class Fetch:
    """Collects every chunk of (topic, tag) from `ranks`; `use(chunk, {rank: value})` runs once
    per complete chunk.
    """

    def __init__(
        self,
        topic: Topic,
        tag: int,
        ranks: Iterable[int],
        *,
        chunks: int,
        use: Callable[[int, Answers], None],
        window: int = 2,
        retry: float = 1.0,
    ) -> None:
        self.topic = topic
        self.tag = tag
        self.ranks = set(ranks)
        self._use = use
        self._window = window
        self._retry = retry
        self._waiting = list(range(chunks - 1, -1, -1))
        self._open: dict[int, Answers] = {}
        self._asked: dict[tuple[int, int], float] = {}
        self._advance()

    @property
    def done(self) -> bool:
        return not self._open and not self._waiting

    def _advance(self) -> None:
        """Use the chunks that are complete, in any order, and open new ones."""
        while True:
            complete = [
                chunk for chunk, values in self._open.items() if self.ranks <= values.keys()
            ]
            for chunk in complete:
                self._use(chunk, self._open.pop(chunk))
            while self._waiting and len(self._open) < self._window:
                self._open[self._waiting.pop()] = Answers()
            if not self._open or not any(
                self.ranks <= values.keys() for values in self._open.values()
            ):
                return

    def asks(self, now: float) -> list[tuple[int, int]]:
        """The (rank, chunk) to ask for now."""
        due = []
        for chunk, values in self._open.items():
            for rank in self.ranks - values.keys():
                asked = self._asked.get((rank, chunk))
                if asked is None or now - asked >= self._retry:
                    self._asked[rank, chunk] = now
                    due.append((rank, chunk))
        return due

    def next_ask(self) -> float | None:
        """When asks() has something again, if no value comes before."""
        missing = [
            (rank, chunk)
            for chunk, values in self._open.items()
            for rank in self.ranks - values.keys()
        ]
        return min((self._asked.get(key, 0.0) + self._retry for key in missing), default=None)

    def receive(
        self, rank: int, topic: int, tag: int, chunk: int, value: Array, *, serial: int = 0
    ) -> None:
        if (topic, tag) != (self.topic, self.tag) or rank not in self.ranks:
            return
        values = self._open.get(chunk)
        if values is not None and rank not in values:
            values[rank] = value.copy()
            values.serials[rank] = serial
            self._asked.pop((rank, chunk), None)
            self._advance()

    def drop(self, rank: int) -> None:
        """Go on without this rank."""
        self.ranks.discard(rank)
        for values in self._open.values():
            values.pop(rank, None)
            values.serials.pop(rank, None)
        self._advance()
