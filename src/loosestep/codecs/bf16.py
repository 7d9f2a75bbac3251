"""bf16: the upper half of a float32, rounded to nearest even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from loosestep.codecs.base import Codec


@dataclass(frozen=True, kw_only=True)
class BF16(Codec):
    """Half the bytes; each value is right to .4 %."""

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "half the bytes: float32 without its lower half"
    whole_values: ClassVar[bool] = True

    def size(self, count: int) -> int:
        """Two bytes a value."""
        return -(-2 * count // 4) * 4

    def encode(self, values: torch.Tensor, codes: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Round."""
        codes.view(torch.bfloat16)[:, : values.shape[1]] = values
        return codes

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Widen."""
        return values.copy_(codes.view(torch.bfloat16)[:, : values.shape[1]])
