"""A simulation and real processes give the same parameters, bit for bit."""

import random

import numpy as np
import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology

NODES = [[0, 1, 2], [3]]  # uneven on purpose: weights, lanes and broadcasts all matter
SPECS = [
    "allreduce",
    "localsgd:period=3,replica=rank",
    "localsgd:period=2,local_period=2,replica=node,start=3",
    "diloco:period=3,delay=2,replica=rank",
    "diloco:period=2,replica=node",
    "daso:period=3,delay=1,warmup=2,cooldown=3,total=13",
    "daso-paper:period=2",
    "delay-by-one:older_gradient=true,replica=rank",
    "adpsgd:graph=random-ring,lockstep=true",
    "localsgd:period=3,codec=int8:block=16",
    "localsgd:period=2,local_period=2,replica=node,start=3,codec=bf16",
    "diloco:period=3,delay=2,codec=int8",
    "diloco:period=2,replica=node,codec=bf16",
    "daso:period=3,delay=1,warmup=2,cooldown=3,total=13,codec=(qsgd:levels=100,block=64)",
    "daso-paper:period=2,codec=bf16",
    "delay-by-one:codec=int8",
    "allreduce:codec=int8",
]


class Net(nn.Module):
    """BatchNorm, dropout, an unused layer, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.out(self.dropout(torch.relu(self.norm(self.first(x))))) * self.scale.float().mean()
        )


def trajectory(rank: int, spec: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters and buffers before the end, inside a consensus, and after the end; data from
    global generators.
    """
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with loosestep.attach(model, optimizer, spec, topology=Topology(NODES), deadline=60) as run:
        for _ in range(
            13 - 2 * (rank == 1 and run.strategy.learner == "rank" and not run.strategy.gossip)
        ):
            x = torch.randn(8, 6) + random.random() + np.random.rand()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.observe(loss)
        before = state(model)
        with run.consensus():
            mean = state(model)
    return before, mean, state(model)


def state(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [t.detach().double().reshape(-1) for t in (*model.parameters(), *model.buffers())]
    )


@pytest.mark.processes
@pytest.mark.races(reason="processes have to be started and to meet within the deadline")
@pytest.mark.parametrize("spec", SPECS)
def test_virtual_ranks_end_where_real_processes_do(spec: str) -> None:
    simulation = loosestep.simulate(
        lambda rank: trajectory(rank, spec), ranks=4, topology=Topology(NODES)
    )
    for virtual, process in zip(simulation.results, ranks(4, trajectory, spec=spec), strict=True):
        for moment, (mine, theirs) in enumerate(zip(virtual, process, strict=True)):
            # under gossip a consensus is of whatever the others are at
            if moment != 1 or "adpsgd" not in spec:
                assert torch.equal(mine, theirs)
        assert not torch.equal(virtual[0], virtual[2]) or spec == "allreduce"
