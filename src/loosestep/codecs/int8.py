"""int8: whole steps of 1/127 of the largest value of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from loosestep.codecs.base import Codec, require_whole
from loosestep.codecs.blocks import TINY, blocked_size, decode_blocks, parts


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """A quarter of the bytes: `level = round(127 v / max |v|)`, the maximum of each `block` of values.

    A smaller block costs 4 / `block` bytes a value more and is finer where few values are much larger than the rest.
    """

    name: ClassVar[str] = "int8"
    summary: ClassVar[str] = (
        "a quarter of the bytes: steps of 1/127 of the largest value of a block"
    )

    block: int = 4096

    def __post_init__(self) -> None:
        require_whole("block", self.block, least=8, most=1 << 20)

    def size(self, count: int) -> int:
        """A byte a value, four a block."""
        return blocked_size(count, self.block)

    def encode(self, values: torch.Tensor, codes: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Round to the nearest step."""
        for block, scales, levels in parts(codes, values, self.block):
            largest = torch.maximum(block.amax(2, keepdim=True), block.amin(2, keepdim=True).neg_())
            scales.copy_(largest).div_(127)
            steps = torch.where(largest > TINY, 127 / largest, 0)
            levels.copy_((block * steps).round_())
        return codes

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """level * step"""
        return decode_blocks(codes, values, self.block)
