"""From `optimizer.step()` to `x += delta`: how many functions of ours a reader walks through."""

import sys
from typing import Any

import pytest
import torch
from frames import frames_at
from torch import nn

import loosestep
from loosestep import Cluster, simulate

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="names of frames need 3.11")


FIRST = "Run._after_step"


def watched(rank: int, spec: str = "adpsgd") -> list[list[str]]:
    """The ways to `x += delta` in two steps, after two that are not watched."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(40))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def two() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (model[0] - rank).square().sum().backward()
            optimizer.step()

    with loosestep.attach(model, optimizer, spec, deadline=20):
        two()
        return frames_at("_foreach_add_", two)


def test_eight_functions_lead_to_a_fold_of_gossip() -> None:
    results: Any = simulate(watched, ranks=2, cluster=Cluster(compute="100ms")).results
    for ways in results:
        folds = [way[way.index(FIRST) :] for way in ways if FIRST in way]
        assert folds
        assert max(map(len, folds)) <= 8, max(folds, key=len)


@pytest.mark.parametrize("spec", ["daso:period=1,delay=1", "localsgd:period=1", "diloco:period=1"])
def test_six_functions_lead_to_a_fold_of_what_all_exchange(spec: str) -> None:
    topology = loosestep.Topology([[0], [1]])
    results: Any = simulate(
        lambda rank: watched(rank, spec), ranks=2, topology=topology, cluster=Cluster(compute="1ms")
    ).results
    for ways in results:
        folds = [way[way.index(FIRST) :] for way in ways if way[-1] == "Replica.fold"]
        folds = [way for way in folds if "CollectiveEngine.finish" not in way]
        assert folds
        assert max(map(len, folds)) <= 6, max(folds, key=len)
