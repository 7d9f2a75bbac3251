"""accelerate's LocalSGD: DDP without synchronisation, and an average of the parameters every few
steps.
"""

from __future__ import annotations

from torch import Tensor, nn

from peers.base import Trainer, Work


class AccelerateTrainer(Trainer):
    """Its documented loop: accelerator.backward, optimizer.step, zero_grad, local_sgd.step."""

    def __init__(self, model: nn.Module, work: Work, *, period: int) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        self.accelerator = Accelerator(cpu=True)
        wrapped, optimizer = self.accelerator.prepare(
            model, work.make_optimizer(model.parameters())
        )
        super().__init__(wrapped, optimizer, work)
        self.local_sgd = LocalSGD(
            accelerator=self.accelerator, model=wrapped, local_sgd_steps=period, enabled=True
        )
        self.local_sgd.__enter__()

    def step(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.local_sgd.step()


def prepare(model: nn.Module, work: Work, *, period: int) -> Trainer:
    return AccelerateTrainer(model, work, period=period)
