"""Rows of bytes that hold a scale (float32) for every block of values, then a whole number
(int8) for every value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

# a block whose largest value is below is all zeros: 127 of its steps would not be normal numbers
TINY = 1e-36
CACHED = 1 << 18  # values that are worked on at a time


class Part(NamedTuple):
    """Blocks of equal length: their values, scales and levels, each (rows, blocks, values of a
    block).
    """

    values: torch.Tensor
    scales: torch.Tensor
    levels: torch.Tensor


def blocked_size(count: int, block: int) -> int:
    """The bytes of a row of so many values."""
    return 4 * -(-count // block) + -(-count // 4) * 4


def parts(codes: torch.Tensor, values: torch.Tensor, block: int) -> Iterator[Part]:
    """The full blocks of all rows, on a CPU as many at a time as stay in its cache, and the
    last, shorter ones.
    """
    rows, count = values.shape
    blocks = -(-count // block)
    full = count // block
    scales = codes[:, : 4 * blocks].view(torch.float32).unsqueeze(2)
    levels = codes[:, 4 * blocks : 4 * blocks + count].view(torch.int8)
    at_a_time = max(CACHED // (rows * block), 1) if values.device.type == "cpu" else max(full, 1)
    for first in range(0, full, at_a_time):
        some = slice(first, min(first + at_a_time, full))
        at = slice(some.start * block, some.stop * block)
        shape = (-1, block)
        yield Part(
            values[:, at].unflatten(1, shape), scales[:, some], levels[:, at].unflatten(1, shape)
        )
    if full < blocks:
        at = slice(full * block, count)
        yield Part(values[:, None, at], scales[:, full:], levels[:, None, at])


def decode_blocks(codes: torch.Tensor, values: torch.Tensor, block: int) -> torch.Tensor:
    """level * scale"""
    for some, scales, levels in parts(codes, values, block):
        some.copy_(levels).mul_(scales)
    return values
