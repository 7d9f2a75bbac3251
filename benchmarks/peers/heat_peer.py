"""Heat's DASO, by the method's authors. CUDA only; four shims and a stub make it run on CPUs, under
mpirun.

torch's default group is the node, as in Heat's examples; MPI connects the nodes. The cycling phase
begins at once: a global exchange every 4 batches, received 1 batch later, and stays there (the
plateau logic is called at the end of epochs, and this is one long epoch).
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from peers.base import Trainer, Work

ENDLESS = 10**9


class WithoutDevices(DistributedDataParallel):
    """DDP for CPUs, whatever device numbers are given."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__(module)


class HeatTrainer(Trainer):
    """Its documented loop: zero_grad, backward, DASO's step."""

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.clip_gradients()
        self.optimizer.step()


def prepare(model: nn.Module, work: Work) -> Trainer:
    _pretend_gpus()
    import heat

    first = {name: value.clone() for name, value in model.state_dict().items()}
    daso: Any = heat.optim.DASO(
        local_optimizer=work.make_optimizer(model.parameters()),
        total_epochs=ENDLESS,
        warmup_epochs=0,
        cooldown_epochs=0,
        max_global_skips=4,
    )
    daso.device = "cpu"
    daso.last_batch = ENDLESS
    wrapped = heat.nn.DataParallelMultiGPU(model, daso)
    # Heat resets the parameters of every layer; all peers start from the same
    model.load_state_dict(first)
    daso.epoch_loss_logic(1.0)  # the end of a warm-up of no epochs
    return HeatTrainer(wrapped, daso, work)


def _pretend_gpus() -> None:
    """One "GPU" per rank of the node, DDP without device numbers, no torchvision."""
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: None
    nn.parallel.DistributedDataParallel = WithoutDevices  # type: ignore[misc]
    transforms, datasets = (
        types.ModuleType(f"torchvision.{name}") for name in ("transforms", "datasets")
    )
    # only named in signatures and base classes
    vars(transforms)["Compose"] = vars(datasets)["MNIST"] = object
    vision = types.ModuleType("torchvision")
    vars(vision).update(transforms=transforms, datasets=datasets)
    for module in (vision, transforms, datasets):
        sys.modules.setdefault(module.__name__, module)
