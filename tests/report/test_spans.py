"""Spans: the arithmetic of time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loosestep.report.spans import (
    Activity,
    Span,
    between,
    length,
    merged,
    overlaps,
    read_activities,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 10)).map(
        lambda p: (float(p[0]), float(p[0] + p[1]))
    )
)


def covered(spans: list[Span]) -> set[int]:
    return {second for start, end in spans for second in range(int(start), int(end))}


@given(first=SPANS, second=SPANS)
def test_merging_overlapping_and_gaps_agree_with_counting_seconds(
    first: list[Span], second: list[Span]
) -> None:
    a = merged(first)
    b = merged(second)
    assert covered(a) == covered(first)
    assert length(a) == len(covered(first))
    assert length(overlaps(a, b)) == len(covered(first) & covered(second))
    assert length(between(a, (0.0, 60.0))) == 60 - len(covered(first))


def event(time: float, rank: int, kind: str, **fields: object) -> dict[str, object]:
    return {"time": time, "rank": rank, "kind": kind, "fields": fields}


def test_waiting_for_an_evaluation_is_not_waiting() -> None:
    events = [
        event(0, 0, "step"), event(0, 1, "step"),
        event(4, 0, "evaluate", seconds=3),
        event(5, 1, "wait", seconds=4.5, reason="fold"),
        event(10, 0, "step"), event(10, 1, "step"),
        event(20, 1, "wait", seconds=9, reason="finish"),
    ]  # fmt: skip
    first, second = read_activities(events)
    assert first.seconds == second.seconds == 7
    assert second.waiting == 1.5
    assert first.waiting == 0


def test_exchanges_end_when_they_land_or_under_gossip_when_they_are_folded() -> None:
    events = [
        event(1, 0, "start"), event(3, 0, "landed", seconds=2), event(4, 0, "fold", staleness=1),
        event(5, 1, "start"), event(6, 1, "start"), event(7, 1, "fold", staleness=0.5),
    ]  # fmt: skip
    first, second = read_activities(events)
    assert first.exchanges == [(1, 3)]
    assert second.exchanges == [(5, 7), (6, 7)]
    assert first.staleness == [1]


def test_what_was_waited_for_is_not_hidden() -> None:
    assert Activity(0, exchanges=[(0.0, 10.0)], waits=[(8.0, 12.0)]).hidden == 8


def test_the_time_between_a_kill_and_a_resumption_is_no_training() -> None:
    events = [
        event(0, 0, "begin"),
        event(1, 0, "step"),
        event(100, 0, "begin"),
        event(101, 0, "step"),
        event(102, 0, "step"),
    ]
    (activity,) = read_activities(events)
    assert activity.seconds == 2
