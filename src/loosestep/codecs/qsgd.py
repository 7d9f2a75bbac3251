"""QSGD: levels of a block's norm, rounded up or down by chance so that the mean is right (Alistarh et al., 1610.02132)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from loosestep.codecs.base import Codec, require_whole
from loosestep.codecs.blocks import TINY, blocked_size, decode_blocks, parts


@dataclass(frozen=True, kw_only=True)
class QSGD(Codec):
    """A quarter of the bytes, without bias: `level = s v / |v|_2` of each `block`, s = `levels`, rounded by chance.

    The expected error, `min(block / s^2, sqrt(block) / s)` of the block's squared norm, has to be below 1, so that what is
    left over shrinks when it is sent later.
    """

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "a quarter of the bytes, without bias: rounded by chance"

    levels: int = 127
    block: int = 512

    def __post_init__(self) -> None:
        require_whole("levels", self.levels, least=1, most=127)
        require_whole("block", self.block, least=1, most=1 << 20)
        if self.levels**2 <= self.block:
            raise ValueError(
                f"levels must be above the square root of block, or what is left over grows; got levels={self.levels} and "
                f"block={self.block}: use more levels or smaller blocks"
            )

    def size(self, count: int) -> int:
        """A byte a value, four a block."""
        return blocked_size(count, self.block)

    def encode(self, values: torch.Tensor, codes: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Up with the probability of what is above the level below."""
        chance = torch.Generator(values.device).manual_seed(seed)
        for block, scales, levels in parts(codes, values, self.block):
            largest = torch.maximum(block.amax(2, keepdim=True), block.amin(2, keepdim=True).neg_())
            # of shares of the largest, whose squares do not overflow
            shares = block * torch.where(largest > TINY, 1 / largest, 0)
            norm = shares.square_().sum(2, keepdim=True).sqrt_().mul_(largest)
            scales.copy_(norm / self.levels)
            steps = torch.where(norm > TINY, self.levels / norm, 0)
            count = block.numel()
            draws = torch.empty(-(-count // 4), dtype=torch.int64, device=block.device)
            draws.random_(-(2**63), None, generator=chance)  # four of 16 bits at a time
            noise = torch.empty(block.shape, dtype=block.dtype, device=block.device)
            noise.copy_(draws.view(torch.int16)[:count].view(block.shape)).add_(32768.5).mul_(
                2.0**-16
            )
            levels.copy_(noise.addcmul_(block, steps).floor_().clamp_(-self.levels, self.levels))
        return codes

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """level * norm / s"""
        return decode_blocks(codes, values, self.block)
