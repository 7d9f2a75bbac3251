"""A short search for a learning rate: steps of a factor of two from a good guess, as long as it
gets better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from loosestep.registry import at_commas

FACTOR = 2.0
MOST_TRIALS = 6

Score = Callable[[float], float | None]
"""The quality of a short training with this rate; None if it diverged."""


def search(
    score: Score, guess: float, *, higher_is_better: bool
) -> tuple[float, Mapping[float, float | None]]:
    """The best rate on the grid guess * 2^k, and what was tried.

    The guess and its two neighbours are tried, then further in the direction of the best, up to six
    trials in all. Every rate diverged: the smallest one tried, halved.
    """
    tried: dict[float, float | None] = {}

    def worth(rate: float) -> float:
        value = tried[rate]
        if value is None or math.isnan(value):
            return -math.inf
        return value if higher_is_better else -value

    for rate in (guess, guess / FACTOR, guess * FACTOR):
        tried[rate] = score(rate)
    while len(tried) < MOST_TRIALS:
        best = max(tried, key=worth)
        if worth(best) == -math.inf or best == min(tried):
            further = min(tried) / FACTOR
        elif best == max(tried):
            further = best * FACTOR
        else:
            return best, tried
        tried[further] = score(further)
    best = max(tried, key=worth)
    return (best if worth(best) > -math.inf else min(tried) / FACTOR), tried


def split_strategies(text: str) -> list[str]:
    """`allreduce,daso:period=4,delay=2,adpsgd` is three strategies: what reads `field=value`
    belongs to the one before it.
    """
    found: list[str] = []
    for piece in map(str.strip, at_commas(text)):
        name, equals, _ = piece.partition("=")
        if equals and ":" not in name and found:
            found[-1] += f",{piece}"
        elif piece:
            found.append(piece)
    return found
