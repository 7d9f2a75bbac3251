"""What a codec is: a way to write a vector in fewer bytes, and to read it back, not quite as it
was.

A codec has no state and decides nothing. Whoever exchanges uses its own values as it sent them
(`decode(encode(v))`), so that what it adds is what the others subtract and no mean moves, however
coarse the codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from loosestep.codecs.registry import CODECS
from loosestep.registry import spell


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Base of all codecs; a subclass is known by its `name` everywhere. Values come in rows of equal
    length; each row is coded for itself, on the device that it is on.

    `linear`: the codes of a sum are the sum of the codes, so that sums can be made on the way.
    `fixed_size`: the length of a row says how many bytes it becomes. `whole_values`: fine enough
    for parameters themselves, not only for what they have changed.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    linear: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    whole_values: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        CODECS.enter(cls)

    @property
    def bytes_per_value(self) -> float:
        """What a value takes, in a long row."""
        return self.size(1 << 20) / (1 << 20)

    @abstractmethod
    def size(self, count: int) -> int:
        """The bytes that a row of so many values becomes: a multiple of 4."""

    def memory(self, rows: int, count: int, device: torch.device) -> torch.Tensor:
        """Memory for the codes of so many rows of so many values."""
        return torch.zeros(rows, self.size(count), dtype=torch.uint8, device=device)

    @abstractmethod
    def encode(self, values: torch.Tensor, codes: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Rows of values (float32 or wider) as rows of bytes, written into `codes`. `seed`: of what
        is left to chance; the same seed, the same bytes. What is not finite comes back as NaN, with
        its block, and never as a number.
        """

    @abstractmethod
    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Rows of bytes as rows of values, written into `values`."""

    def __str__(self) -> str:
        """The form that `codec` reads."""
        return spell(self)


def codec(text: str | Codec) -> Codec:
    """The codec that `NAME` or `NAME:field=value,field=value` spells; brackets may be around it."""
    if isinstance(text, Codec):
        return text
    if not isinstance(text, str):
        known = ", ".join(CODECS.entries())
        raise ValueError(f"a codec is a name, one of {known}, or a Codec; got {text!r}")
    chosen: Codec = CODECS.read(text.strip().removeprefix("(").removesuffix(")"))
    return chosen


def require_whole(name: str, value: int, *, least: int, most: int) -> None:
    """A whole number within bounds."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and least <= value <= most):
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
