"""Random generators per virtual rank: torch's, numpy's and Python's own are one per process, so
they change hands.

A rank starts as a new process would: torch with its default seed; numpy and Python, which a process
would seed from the operating system, from (seed, rank).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from numpy.random import MT19937, mtrand

TORCH_SEED = 67280421310721  # c10::detail::default_rng_seed_val


@dataclass
class _Kept:
    of_torch: torch.Tensor
    of_cuda: list[torch.Tensor]
    of_numpy: Any
    of_python: tuple[Any, ...]


class Generators:
    """Who owns the process's generators, and what the others left off with. `give_back()` at the
    end.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._owner: int | None = None  # None: whoever called the simulator
        self._kept: dict[int | None, _Kept] = {}

    def take(self, owner: int | None) -> None:
        """Put the owner's generators in place."""
        if owner == self._owner:
            return
        self._kept[self._owner] = _Kept(
            torch.get_rng_state(), _cuda_states(), mtrand.get_bit_generator(), random.getstate()
        )
        self._owner = owner
        kept = self._kept.pop(owner, None)
        if kept is None:
            torch.manual_seed(TORCH_SEED)
            mtrand.set_bit_generator(MT19937([self._seed, owner or 0]))
            random.seed(f"{self._seed}/{owner}")
            return
        torch.set_rng_state(kept.of_torch)
        for device, state in enumerate(kept.of_cuda):
            torch.cuda.set_rng_state(state, device)
        mtrand.set_bit_generator(kept.of_numpy)
        random.setstate(kept.of_python)

    def give_back(self) -> None:
        """As it was before the simulation."""
        self.take(None)


def _cuda_states() -> list[torch.Tensor]:
    return (
        torch.cuda.get_rng_state_all()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else []
    )
