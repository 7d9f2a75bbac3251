"""Accelerate: keep `prepare` from wrapping the model, then attach.

model = accelerator.prepare_model(model, evaluation_mode=True)  # placed, not wrapped in DDP over
all ranks optimizer, loader = accelerator.prepare(optimizer, loader) with attach(model, optimizer,
"daso") as run:
    ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from loosestep.attachment import attach as attach_plain
from loosestep.run import Run
from loosestep.strategies import Strategy

try:
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; loosestep.integrations.accelerate needs it: pip install 'loosestep[accelerate]'"
    ) from error


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    strategy: Strategy | str,
    **options: Any,
) -> Run:
    """`loosestep.attach` for optimizers that `Accelerator.prepare` returned."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return attach_plain(model, [_inner(one) for one in optimizers], strategy, **options)


def _inner(optimizer: Optimizer) -> Optimizer:
    inner: Optimizer = (
        optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    )
    return inner
