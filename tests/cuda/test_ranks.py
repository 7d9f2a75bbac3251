"""Ranks that share one device, over gloo and shared memory."""

import pytest
import torch
from device import needs_cuda, no_synchronisation
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology

pytestmark = [needs_cuda, pytest.mark.timeout(120)]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def train(rank: int, spec: str, nodes, device: str = "cuda", steps: int = 24, uneven: bool = False):
    torch.manual_seed(rank)  # attach makes all of them rank 0's
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4), nn.Linear(4, 4)
    ).to(device)
    unused = nn.Linear(3, 3).to(device)
    model.add_module("unused", nn.Sequential())
    model.unused.add_module("never", unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with loosestep.attach(model, optimizer, spec, topology=Topology(nodes), deadline=20) as run:
        for step in range(steps - 5 * rank if uneven else steps):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step)).to(
                device
            )
            body = nn.Sequential(*list(model)[:5])
            loss = (body(x) - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.observe(loss)
        stats = run.stats
    return {
        "end": flat(model),
        "stats": stats,
        "unused": [p.grad is None for p in unused.parameters()],
    }


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ("allreduce", [[0, 1]]),
        ("daso:period=2,delay=1", [[0, 1]]),
        ("daso:period=2,delay=1", [[0], [1]]),
        ("localsgd:period=2,delay=2,replica=rank", [[0], [1]]),
    ],
)
def test_two_ranks_on_one_device_learn_what_they_learn_on_a_cpu(spec, nodes):
    there = ranks(2, train, spec=spec, nodes=nodes)
    here = ranks(2, train, spec=spec, nodes=nodes, device="cpu")
    assert torch.equal(there[0]["end"], there[1]["end"])
    torch.testing.assert_close(there[0]["end"], here[0]["end"], rtol=1e-3, atol=1e-4)
    assert all(there[0]["unused"])


@pytest.mark.parametrize(
    "spec", ["adpsgd:graph=random-ring", "adpsgd:lockstep=true", "adpsgd:replica=node"]
)
def test_gossip_on_a_device_ends_with_equal_parameters(spec):
    results = ranks(2, train, spec=spec, nodes=[[0], [1]], steps=60)
    assert torch.equal(results[0]["end"], results[1]["end"])
    assert results[0]["stats"]["folds"] + results[1]["stats"]["folds"] > 0
    assert results[0]["end"].isfinite().all()


def gossip_without_a_wait(rank: int):
    """Each rank is a node with a batch norm, whose boundaries go through the host."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank)).cuda()
    losses = []

    def learn(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    with loosestep.attach(
        model, optimizer, "adpsgd:replica=node", topology=Topology([[0], [1]]), deadline=20
    ) as run:
        learn(10)
        with no_synchronisation():
            learn(400)
        folds = run.stats["folds"]
    return torch.stack(losses).tolist(), folds, flat(model), model[1].running_var.cpu()


def test_nodes_that_gossip_are_never_made_to_wait_for_the_device():
    results = ranks(2, gossip_without_a_wait)
    for losses, folds, end, variance in results:
        assert folds > 0
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(end, results[0][2])
        assert (variance > 0).all()


@pytest.mark.parametrize("spec", ["daso:period=2,delay=1", "allreduce"])
def test_a_rank_with_a_shorter_loader_joins_from_the_device(spec):
    nodes = [[0], [1]] if spec.startswith("daso") else [[0, 1]]
    results = ranks(2, train, spec=spec, nodes=nodes, uneven=True)
    assert torch.equal(results[0]["end"], results[1]["end"])
