"""What a run and its engine share: the model, what trains it, where the strategy is, what was
observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from loosestep.core.engines.wrapped import Inside
from loosestep.core.replica.replica import Replica
from loosestep.core.replica.shards import each_tensor, local
from loosestep.events import Trace
from loosestep.record.recorder import NoTape, Tape
from loosestep.strategies.base import State, Strategy


class Losses:
    """Observed losses, summed where they are: never a synchronisation with the device."""

    def __init__(self) -> None:
        self.sum: torch.Tensor | float = 0.0
        self.count = 0

    def add(self, loss: torch.Tensor | float) -> None:
        """Count one loss (the mean, if it has several elements)."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().mean() if loss.numel() > 1 else loss.detach().reshape(())
            loss = loss.to(torch.float64)
        self.sum = self.sum + loss
        self.count += 1

    def take(self) -> tuple[torch.Tensor | float, int]:
        """The sum and the count since the last call."""
        taken = (self.sum, self.count)
        self.sum = 0.0
        self.count = 0
        return taken


@dataclass
class Learner:
    """One rank's part of a run."""

    model: nn.Module
    optimizers: list[Optimizer]
    strategy: Strategy
    replica: Replica
    trace: Trace
    tape: Tape = field(default_factory=NoTape)
    state: State = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    inside: Inside = "plain"

    def __post_init__(self) -> None:
        self.state = self.strategy.begin()

    def to_host(self) -> None:
        """What `state_dict` tells of, when the run has ended: the device is for others."""
        self.state = each_tensor(self.state, torch.Tensor.cpu)

    def state_tensors(self) -> list[torch.Tensor]:
        """Every floating tensor of the optimizers' state, as far as this rank holds it, in a
        fixed order.
        """
        return [
            local(value)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            for value in optimizer.state.get(param, {}).values()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
