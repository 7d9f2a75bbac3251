"""decent-dp: synchronous gossip whose exchange overlaps the next step. It owns the optimizers,
one a bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peers.base import Trainer, Work


class DecentTrainer(Trainer):
    """As documented: backward updates and exchanges, nothing else is called."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, loss: Tensor) -> None:
        loss.backward()


def prepare(model: nn.Module, work: Work, *, topology: str) -> Trainer:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()

    def make(named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
        return work.make_optimizer([parameter for _, parameter in named])

    return DecentTrainer(
        DecentralizedDataParallel(model, make, topology=topology, grad_clip_norm=work.clip)
    )
