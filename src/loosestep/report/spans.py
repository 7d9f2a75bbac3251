"""Who did what when: the events of a run as spans of computing, waiting, exchanging and judging,
rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[float, float]
"""From, to; wall-clock seconds."""


@dataclass
class Activity:
    """One rank. `exchanges` run in the background of the rest; `pauses`: evaluations,
    checkpoints, and between a kill and a resumption.
    """

    rank: int
    steps: list[float] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    exchanges: list[Span] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    others_pauses: list[Span] = field(default_factory=list)

    @property
    def span(self) -> Span:
        """From the first to the last event of training."""
        times = [
            time for spans in (self.waits, self.pauses) for span in spans for time in span
        ] + self.steps
        return (min(times), max(times)) if times else (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Of training: evaluations, also those of others that this rank waited for, do not
        count.
        """
        first, last = self.span
        return last - first - length(merged([*self.pauses, *self.others_pauses]))

    @property
    def waiting(self) -> float:
        """Seconds of waiting in training."""
        waits = merged(self.waits)
        return length(waits) - length(overlaps(waits, merged([*self.pauses, *self.others_pauses])))

    @property
    def hidden(self) -> float:
        """Seconds of exchanges that this rank did not wait for."""
        exchanges = merged(self.exchanges)
        return length(exchanges) - length(overlaps(exchanges, merged(self.waits)))

    def computes(self) -> Iterator[Span]:
        """The rest."""
        return between(merged([*self.waits, *self.pauses]), self.span)


def read_activities(events: Iterable[dict[str, Any]]) -> list[Activity]:
    """The ranks of a run from its events, in order of time."""
    ranks: dict[int, Activity] = {}
    started: dict[int, list[float]] = {}
    for event in events:
        rank = event["rank"]
        kind = event["kind"]
        at = float(event["time"])
        fields = event["fields"]
        activity = ranks.setdefault(rank, Activity(rank))
        open_starts = started.setdefault(rank, [])
        if kind == "step":
            activity.steps.append(at)
        elif kind == "wait" and fields["seconds"] > 0 and fields.get("reason") != "finish":
            # training is over then
            activity.waits.append((at - fields["seconds"], at))
        elif kind == "begin" and activity.steps:  # resumed: nothing was done in between
            activity.pauses.append((max(activity.span[1], activity.steps[-1]), at))
        elif kind in ("evaluate", "checkpoint"):
            activity.pauses.append((at - fields["seconds"], at))
        elif kind == "start":
            open_starts.append(at)
        elif kind == "landed" and open_starts:
            activity.exchanges.append((open_starts.pop(0), at))
        elif kind == "fold":
            activity.staleness.append(float(fields["staleness"]))
            # gossip: nothing lands before it is folded
            activity.exchanges += [(start, at) for start in open_starts]
            open_starts.clear()
    for activity in ranks.values():
        others = (other for other in ranks.values() if other is not activity)
        activity.others_pauses = [
            pause
            for other in others
            for pause in overlaps(merged(other.pauses), merged(activity.waits))
        ]
    return [ranks[rank] for rank in sorted(ranks)]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans that are sorted and do not overlap."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlaps(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time in both; each is sorted and does not overlap itself."""
    result = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def between(spans: Sequence[Span], whole: Span) -> Iterator[Span]:
    """The gaps in `whole`."""
    at, end = whole
    for start, stop in spans:
        if start > at:
            yield at, min(start, end)
        at = max(at, stop)
    if at < end:
        yield at, end


def length(spans: Iterable[Span]) -> float:
    """Seconds in all."""
    return sum(end - start for start, end in spans)
