"""The order in which gloo's all-reduce adds numbers up, so that a simulation can add them up alike.

A vector is cut into as many segments as there are ranks. Segment c begins with the values of the
rank before c, and those of the rank before that one and so on are added as it goes around the ring.
A segment is made of pieces of at most a megabyte, two at least, which is why its length is not
simply the n-th part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

PIECE = 1 << 20  # bytes that gloo sends at a time
# values that are repeated to make a vector for the check: no multiple of what a segment may measure
PATTERN = 4099
WIDE = (torch.float32, torch.float64)  # halves would be rounded at every rank they pass


def segment_length(length: int, width: int, ranks: int) -> int:
    """Numbers in each segment but the last ones, of so many numbers of `width` bytes."""
    pieces = max(2, -(-length * width // (ranks * PIECE)))
    return pieces * -(-length // (ranks * pieces))


def ring_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of flat tensors, bit for bit as gloo's all-reduce gives it."""
    total = torch.empty_like(parts[0])
    ranks = len(parts)
    length = segment_length(total.numel(), total.element_size(), ranks)
    for segment, begin in enumerate(range(0, total.numel(), length)):
        first, *others = (
            parts[(segment - 1 - step) % ranks][begin : begin + length] for step in range(ranks)
        )
        into = total[begin : begin + length].copy_(first)
        for other in others:
            into.add_(other)
    return total


class OrderCheck:
    """Values of every rank that are known to all, to be summed by the backend and compared with
    what the ring would give.
    """

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        source = torch.Generator().manual_seed(ranks)
        exponents = (
            torch.randn(ranks, PATTERN, generator=source, dtype=torch.float64).mul_(3).exp_()
        )
        self._patterns = (
            torch.randn(ranks, PATTERN, generator=source, dtype=torch.float64)
            .mul_(exponents)
            .to(dtype)
        )

    def values(self, rank: int, length: int) -> torch.Tensor:
        """What a rank contributes."""
        return self._patterns[rank].repeat(-(-length // PATTERN))[:length]

    def holds(self, total: torch.Tensor) -> bool:
        """Whether a sum was made in the ring's order."""
        return all(torch.equal(mine, expected) for mine, expected in self._segments(total))

    def _segments(self, total: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ranks = len(self._patterns)
        length = segment_length(total.numel(), total.element_size(), ranks)
        for segment, begin in enumerate(range(0, total.numel(), length)):
            expected = self._patterns[(segment - 1) % ranks].clone()
            for step in range(1, ranks):
                expected.add_(self._patterns[(segment - 1 - step) % ranks])
            mine = total[begin : begin + length]
            repeated = expected.roll(-(begin % PATTERN)).repeat(-(-mine.numel() // PATTERN))
            yield mine, repeated[: mine.numel()]
