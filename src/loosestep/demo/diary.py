"""What one rank did during one training: losses, accuracies, and when it computed, waited and exchanged.

A rank keeps a `Diary` and writes it as JSON; `Outcome` is what the diaries of all ranks say together.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loosestep.strategies import strategy as read_strategy
from loosestep.trace.events import Event

Span = tuple[float, float]
"""From, to: seconds since the training began."""

DDP = "ddp"  # every other strategy is one of loosestep's, by its string form


def file_of(folder: Path, strategy: str, rank: int) -> Path:
    """Where a rank leaves its diary."""
    return folder / f"{strategy.partition(':')[0]}-{rank}.json"


def short_name(strategy: str) -> str:
    """`DASO` for `daso:period=4,delay=3`."""
    return "torch DDP" if strategy == DDP else type(read_strategy(strategy)).__name__


def spell(strategy: str) -> str:
    """`DASO(period=4, delay=3)` for `daso:period=4,delay=3`."""
    if strategy == DDP:
        return short_name(strategy)
    return f"{short_name(strategy)}({strategy.partition(':')[2].replace(',', ', ')})"


@dataclass
class Diary:
    """One rank, one strategy. Times are seconds since `begin`, a monotonic time; `waits` and `exchanges` may overlap compute."""

    strategy: str
    rank: int
    node: int
    begin: float = 0.0
    seconds: float = 0.0
    accuracy: float = 0.0
    bytes_sent: float = 0.0  # by the whole node, to other nodes
    steps: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds, accuracy
    waits: list[Span] = field(default_factory=list)
    exchanges: list[Span] = field(default_factory=list)

    def start_clock(self) -> None:
        """Now is second 0."""
        self.begin = time.monotonic()

    def now(self) -> float:
        """Seconds since the clock was started."""
        return time.monotonic() - self.begin

    def wait_until_now(self, since: float) -> None:
        """This rank has done nothing but wait since then."""
        self.waits.append((since, self.now()))

    def read_events(self, events: Iterable[Event]) -> None:
        """Take over the waits and exchanges from the events of a loosestep run."""
        started: float | None = None
        for event in events:
            at = event.time - self.begin
            if event.kind == "wait":
                self.waits.append((at - event.fields["seconds"], at))
            elif event.kind == "start":
                started = at
            elif event.kind == "landed" and started is not None:
                self.exchanges.append((started, at))

    @property
    def waited(self) -> float:
        """Seconds of waiting in all."""
        return sum(end - start for start, end in self.waits)

    def write(self, folder: Path) -> None:
        """As JSON, for the process that shows the demo."""
        file_of(folder, self.strategy, self.rank).write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Outcome:
    """One strategy: the diaries of its ranks."""

    strategy: str
    diaries: Sequence[Diary]

    @classmethod
    def read(cls, folder: Path, strategy: str, ranks: int) -> Outcome:
        """What the ranks wrote."""
        texts = [file_of(folder, strategy, rank).read_text() for rank in range(ranks)]
        return cls(strategy, [Diary(**json.loads(text)) for text in texts])

    @property
    def name(self) -> str:
        """For tables and legends."""
        return short_name(self.strategy)

    @property
    def seconds(self) -> float:
        """Until the last rank was done."""
        return max(diary.seconds for diary in self.diaries)

    @property
    def gradients(self) -> int:
        """Of all ranks together."""
        return sum(len(diary.losses) for diary in self.diaries)

    @property
    def speed(self) -> float:
        """Gradients per second of all ranks together."""
        return self.gradients / self.seconds

    @property
    def accuracy(self) -> float:
        """Of the final model, which is the same on all ranks."""
        return self.diaries[0].accuracy

    @property
    def megabytes_per_node(self) -> float:
        """Sent by one node to the other, on average."""
        return statistics.mean(diary.bytes_sent for diary in self.diaries) / 1e6

    @property
    def waited(self) -> float:
        """Seconds that a rank spent waiting, on average."""
        return statistics.mean(diary.waited for diary in self.diaries)

    def loss_curve(self, window: int = 8) -> list[tuple[int, float, float]]:
        """(gradients, seconds, loss): the mean over the ranks and the last `window` steps."""
        ranks = len(self.diaries)
        losses = [statistics.mean(row) for row in zip(*(diary.losses for diary in self.diaries), strict=True)]
        times = [statistics.mean(row) for row in zip(*(diary.steps for diary in self.diaries), strict=True)]
        return [
            ((i + 1) * ranks, times[i], statistics.mean(losses[max(0, i + 1 - window) : i + 1]))
            for i in range(len(losses))
        ]

    def accuracy_curve(self) -> list[tuple[int, float, float]]:
        """(gradients, seconds, accuracy): the mean over the replicas, and the final model last."""
        ranks = len(self.diaries)
        curve = [
            (rows[0][0] * ranks, statistics.mean(row[1] for row in rows), statistics.mean(row[2] for row in rows))
            for rows in zip(*(diary.accuracies for diary in self.diaries), strict=True)
        ]
        return [*curve, (self.gradients, self.seconds, self.accuracy)]
