"""Paces, gaps and verdicts out of the moments at which steps ended."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import figures


def steady(count: int, seconds: float) -> list[float]:
    return [seconds * (number + 1) for number in range(count)]


@given(st.integers(1, 16), st.floats(0.001, 1.0), st.floats(0.0, 5.0))
def test_the_pace_counts_every_exchange_once_wherever_the_window_begins(
    period: int, step: float, pause: float
) -> None:
    moments = []
    now = 0.0
    for number in range(1, 12 * period + 1):
        now += step + (pause if number % period == 0 else 0.0)
        moments.append(now)
    expected = period / (period * step + pause)
    for begin in (0.0, moments[period // 2], moments[period]):
        assert figures.pace(moments, begin, now, period=period) == pytest.approx(expected)


def test_a_rank_that_completes_no_period_has_no_pace() -> None:
    assert figures.pace(steady(7, 0.1), 0.0, 1.0, period=8) == 0.0
    assert figures.pace([], 0.0, 1.0) == 0.0


def test_a_pace_is_that_of_the_window_alone() -> None:
    moments = [*steady(10, 1.0), *(10 + moment for moment in steady(100, 0.01))]
    assert figures.pace(moments, 10.0, 11.0) == pytest.approx(100, rel=0.02)


def test_a_gap_that_is_still_open_at_the_end_counts() -> None:
    assert figures.longest_gap([0.1, 0.2, 0.3], 0.0, 5.0) == pytest.approx(4.7)


def test_a_gap_before_the_window_does_not_count() -> None:
    assert figures.longest_gap([0.1, 3.0, 3.1, 3.2], 3.0, 3.3) == pytest.approx(0.1)


def test_ranks_at_the_slow_ones_pace_wait_for_it() -> None:
    alone = [50.0, 50.0, 50.0, 5.0]
    assert figures.verdict(figures.freedom([5.0, 5.0, 5.0, 5.0], alone, slow=3)) == figures.WAITS


def test_ranks_at_their_own_pace_do_not_wait() -> None:
    alone = [50.0, 50.0, 50.0, 5.0]
    assert figures.verdict(figures.freedom([49.0, 48.0, 50.0, 5.0], alone, slow=3)) == figures.FREE


def test_where_a_pace_is_not_known_nothing_is_said_of_waiting() -> None:
    assert math.isnan(figures.freedom([math.nan] * 4, [50.0, 50.0, 50.0, 5.0], slow=3))


@given(
    st.lists(st.floats(0.1, 100.0), min_size=2, max_size=8),
    st.lists(st.floats(0.1, 100.0), min_size=8, max_size=8),
)
def test_freedom_is_a_share(paces: list[float], alone: list[float]) -> None:
    assert 0.0 <= figures.freedom(paces, alone[: len(paces)], slow=0) <= 1.0
