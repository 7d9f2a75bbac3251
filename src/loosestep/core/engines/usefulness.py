"""Whether gossip helps: how far apart learners are, counted in steps, and how often they meet.

What is hidden costs nothing, and may do nothing either. A learner that meets others once in twenty
steps, in models that are as old, trains nearly alone.
"""

from __future__ import annotations

import torch

from loosestep.core.replica.replica import Replica
from loosestep.core.replica.shards import local

RARE = 0.05  # models a step, below which exchanges hardly help
ENOUGH = 400  # steps before this is judged by what was exchanged
EVERY = 16  # steps between two measurements of a step
SAMPLE = 1024  # numbers that they take, of all parameters


class Usefulness:
    """Measures steps on a sample of the parameters, without waiting for the device they are on."""

    def __init__(self, replica: Replica, strategy: str) -> None:
        self._strategy = strategy
        self._replica = replica
        each = max(1, SAMPLE // len(replica.params))
        self._places = [max(1, param.numel() // each) for param in replica.params]
        self._held: torch.Tensor | None = None
        self._square: torch.Tensor | None = None
        self._count = 0

    def after(self, step: int) -> None:
        """The boundary of this step is complete: now and then remember where it has led."""
        if step % EVERY == 0:
            self._held = self._sample()

    def before(self, step: int) -> None:
        """The optimizer has made this step, and nothing was folded yet."""
        if self._held is None:
            return
        square = (self._sample() - self._held).square_().mean()
        self._held = None
        self._square = square if self._square is None else self._square + square
        self._count += 1

    @torch.no_grad()
    def _sample(self) -> torch.Tensor:
        parts = [
            local(param).detach().reshape(-1)[::stride].float()
            for param, stride in zip(self._replica.params, self._places, strict=True)
        ]
        return torch.cat(parts)

    def distance_in_steps(self, distance: float) -> float | None:
        """The distance to the mean, in root mean square steps of this learner; None while steps are
        not known.
        """
        if self._square is None or self._count == 0:
            return None
        length = (float(self._square) / self._count) ** 0.5
        return distance / length if length > 0 else None

    def advice(
        self,
        step: int,
        *,
        exchanges: float,
        wanted: float,
        limit: float | None,
        distance: float,
        age: float,
    ) -> str | None:
        """What to do about exchanges that have become too rare; None while they have not.

        `limit`: where the pace has settled at too few; else what was completed in so many steps
        tells.
        """
        per_step = exchanges / max(1, step) if limit is None else limit
        if step < ENOUGH or per_step >= min(RARE, wanted / 2):
            return None
        apart = self.distance_in_steps(distance)
        old = f"; what is folded is {age:.0f} steps old" if age else ""
        told = "" if apart is None else f", and learners are {apart:.0f} steps from their mean"
        return (
            f"{self._strategy} exchanges {per_step:.3f} models a step here{old}{told}: each "
            "learner trains nearly alone. Send less "
            "(codec='bf16'), let it cost more (slowdown=), make nodes the learners "
            "(replica='node'), or use a strategy that sends in larger turns (daso, diloco)"
        )
