"""A little model and its steps, for tests with real processes."""

import torch
from torch import nn

from loosestep import Topology

PAIR = Topology([[0], [1]])
GRID = Topology([[0, 1], [2, 3]])


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def one_step(model, optimizer, rank, step):
    loss = (model(data(rank, step)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
