"""Figures out of the moments at which steps ended. Pure functions: no clocks, no processes.

A step's moment is in seconds since the start of the block, the same for all ranks (one machine, one
monotonic clock).
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

WAITS = "waits for the slowest"
PARTLY = "partly waits"
FREE = "does not wait"


def pace(moments: Sequence[float], begin: float, end: float, *, period: int = 1) -> float:
    """Steps per second of one rank between two moments, over whole periods.

    A peer that exchanges every `period` steps is slow once a period: counting from one multiple of
    the period to another counts every exchange that belongs to the steps, and no other. 0 if no
    period is complete.
    """
    whole = moments[period - 1 :: period]
    first = bisect.bisect_left(whole, begin)
    last = bisect.bisect_right(whole, end) - 1
    if last <= first:
        return 0.0
    return (last - first) * period / (whole[last] - whole[first])


def longest_gap(moments: Sequence[float], begin: float, end: float) -> float:
    """The longest stretch between `begin` and `end` in which a rank ended no step, open ends
    included.
    """
    inside = [begin, *(moment for moment in moments if begin < moment < end), end]
    return max(after - before for before, after in pairwise(inside))


def freedom(paces: Sequence[float], alone: Sequence[float], slow: int) -> float:
    """How free the others are of the slow rank: 0 if they run at its pace, 1 if at the pace they
    have alone.

    (v - s) / (a - s) with v the median pace of the others, s the slow rank's own, a what the others
    do without any communication. nan if one of them is not known.
    """
    if any(map(math.isnan, (*paces, *alone))):
        return math.nan
    others = [rank for rank in range(len(paces)) if rank != slow]
    v, a = (statistics.median(speeds[rank] for rank in others) for speeds in (paces, alone))
    s = min(alone[slow], a)
    return 1.0 if a <= s else max(0.0, min(1.0, (v - s) / (a - s)))


def verdict(share: float) -> str:
    """`freedom` in words; this is how a hidden barrier shows."""
    return WAITS if share < 0.25 else FREE if share > 0.75 else PARTLY
