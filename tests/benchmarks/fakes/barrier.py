"""Claims nothing, but meets the others in every step."""

from typing import Any

import torch.distributed as dist

from peers.base import Trainer


class BarrierTrainer(Trainer):
    def step(self, loss: Any) -> None:
        super().step(loss)
        dist.barrier()


def prepare(model: Any, work: Any) -> Trainer:
    return BarrierTrainer(model, work.make_optimizer(model.parameters()), work)
