"""loosestep, any strategy, by its string."""

from __future__ import annotations

from torch import Tensor, nn

import loosestep
from peers.base import Trainer, Work


class OurTrainer(Trainer):
    """The loop of the README."""

    def __init__(self, model: nn.Module, work: Work, *, strategy: str, deadline: float) -> None:
        super().__init__(model, work.make_optimizer(model.parameters()), work)
        self.run = loosestep.attach(model, self.optimizer, strategy, deadline=deadline)

    def step(self, loss: Tensor) -> None:
        super().step(loss)
        self.run.observe(loss)

    def exchanges(self) -> float | None:
        """Gossip decides by itself how often; the others follow their schedule."""
        stats = self.run.stats
        return float(stats["exchanges"]) if "exchanges_per_step" in stats else None


def prepare(model: nn.Module, work: Work, *, strategy: str, deadline: float = 10.0) -> Trainer:
    return OurTrainer(model, work, strategy=strategy, deadline=deadline)
