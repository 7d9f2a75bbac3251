"""Buffers that have no mean: infinities, and the unit vectors of spectral norms."""

import pytest
import torch
from little import PAIR
from pool import ranks
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import loosestep

SPECS = ["adpsgd", "localsgd:period=2,replica=rank", "allreduce"]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, x):
        return self.inner(x) + (x @ x.T + self.mask).softmax(1) @ x


def normed(old: bool) -> nn.Module:
    return (spectral_norm if old else parametrizations.spectral_norm)(nn.Linear(6, 6))


def train(rank: int, kind: str, spec: str):
    torch.manual_seed(rank)
    model = Masked() if kind == "masked" else normed(kind == "old")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = loosestep.attach(model, optimizer, spec, topology=PAIR, deadline=10)
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.randn(6, 6)) - 1).square().mean().backward()
        optimizer.step()
        run._world.check()
    run.finish()
    vectors = [b.norm().item() for n, b in model.named_buffers() if n[-2:] in ("_u", "_v")]
    model(torch.randn(6, 6))  # a forward follows the weight
    weight = model.inner.weight if kind == "masked" else model.weight
    largest = torch.linalg.matrix_norm(weight.detach(), 2).item()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return parameters, run.stats.get("lost", []), vectors, largest


@pytest.mark.parametrize("spec", SPECS)
def test_a_mask_of_infinities_disturbs_nobody(spec):
    (first, lost, _, _), (second, other_lost, _, _) = ranks(2, train, kind="masked", spec=spec)
    assert lost == other_lost == []
    assert torch.equal(first, second)
    assert first.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["old", "new"])
def test_a_spectral_norm_stays_one(kind, spec):
    for _, _, vectors, largest in ranks(2, train, kind=kind, spec=spec):
        assert vectors == pytest.approx([1.0, 1.0], abs=1e-5)
        assert 0.95 < largest < 1.1
