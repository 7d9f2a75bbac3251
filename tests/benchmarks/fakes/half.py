"""Fails in its third step, on rank 1 only."""

from typing import Any

import torch.distributed as dist

from peers.base import Trainer


class HalfTrainer(Trainer):
    steps = 0

    def step(self, loss: Any) -> None:
        super().step(loss)
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == 1:
            raise RuntimeError("half of it is gone")


def prepare(model: Any, work: Any) -> Trainer:
    return HalfTrainer(model, work.make_optimizer(model.parameters()), work)
