"""Rows of bytes that hold a scale (float32) for every block of values, then a whole number (int8) for every value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

TINY = 1e-36  # a block whose largest value is below is all zeros: 127 of its steps would not be normal numbers


class Part(NamedTuple):
    """Blocks of equal length: their values, scales and levels, each (rows, blocks, values of a block)."""

    values: torch.Tensor
    scales: torch.Tensor
    levels: torch.Tensor


def blocked_size(count: int, block: int) -> int:
    """The bytes of a row of so many values."""
    return 4 * -(-count // block) + -(-count // 4) * 4


def parts(codes: torch.Tensor, values: torch.Tensor, block: int) -> Iterator[Part]:
    """The full blocks of all rows, and the last, shorter ones."""
    rows, count = values.shape
    blocks, full = -(-count // block), count // block
    scales = codes[:, : 4 * blocks].view(torch.float32).unsqueeze(2)
    levels = codes[:, 4 * blocks : 4 * blocks + count].view(torch.int8)
    if full:
        shape, at = (rows, full, block), full * block
        yield Part(
            values[:, :at].unflatten(1, shape[1:]),
            scales[:, :full],
            levels[:, :at].unflatten(1, shape[1:]),
        )
    if full < blocks:
        at = full * block
        yield Part(values[:, None, at:], scales[:, full:], levels[:, None, at:])


def new_codes(values: torch.Tensor, block: int) -> torch.Tensor:
    """Memory for the codes of some rows."""
    rows, count = values.shape
    return torch.zeros(rows, blocked_size(count, block), dtype=torch.uint8, device=values.device)


def decode_blocks(codes: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
    """level * scale"""
    for values, scales, levels in parts(codes, out, block):
        values.copy_(levels).mul_(scales)
    return out
