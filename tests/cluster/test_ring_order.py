"""Between three and more nodes sums are taken in the ring's order: the oracle's bits, or rank order, said once."""

import logging

import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology
from loosestep.core.collectives.gloo import Channel
from loosestep.core.collectives.ring import ring_sum
from loosestep.core.collectives.rows import room_for

APART = [[0], [1], [2], [3]]
PAIRS = [[0, 1], [2, 3], [4, 5]]
NUMBERS = 10  # in a header, which rides on the vector


def values(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def exchange(rank: int, topology: list[list[int]], size: int, spec: str, broken: bool = False):
    """One exchange of distinct models; the parameters after it, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("loosestep")
    log.addHandler(handler)
    follows = Channel.follows_ring
    if broken:
        Channel.follows_ring = lambda self, sizes: follows(self, sizes) and rank != 1  # type: ignore[method-assign]
    try:
        model = nn.Linear(size, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = loosestep.attach(model, optimizer, spec, topology=Topology(topology), deadline=20)
        with torch.no_grad():
            model.weight.copy_(values(rank, size))
        run.step()
        after = model.weight.detach().flatten().clone()
        run.finish()
    finally:
        Channel.follows_ring = follows  # type: ignore[method-assign]
        log.removeHandler(handler)
    return after, [text for text in said if "add up" in text]


def simulated(topology: list[list[int]], size: int, spec: str) -> list[torch.Tensor]:
    done = loosestep.simulate(
        lambda rank: exchange(rank, topology, size, spec)[0],
        ranks=sum(map(len, topology)),
        topology=Topology(topology),
    )
    return list(done.results)


@pytest.mark.parametrize("size", [1001, 300_000])
def test_an_exchange_has_the_bits_of_the_ring(size: int) -> None:
    mine = [values(rank, size) for rank in range(4)]
    room = torch.zeros(-size % 4 + room_for(4, NUMBERS))
    total = ring_sum([torch.cat([vector, room]) for vector in mine])[:size]
    spec = "localsgd:period=1,replica=rank"
    results = ranks(4, exchange, topology=APART, size=size, spec=spec)
    for vector, (after, said) in zip(mine, results, strict=True):
        assert torch.equal(after, vector + (total / 4 - vector))
        assert said == []
    for after, virtual in zip(results, simulated(APART, size, spec), strict=True):
        assert torch.equal(after[0], virtual)


@pytest.mark.parametrize("spec", ["localsgd:period=1,replica=rank", "daso:period=1,delay=0"])
def test_virtual_lanes_and_nodes_have_the_bits_of_real_ones(spec: str) -> None:
    real = ranks(6, exchange, topology=PAIRS, size=1001, spec=spec)
    for (after, _), virtual in zip(real, simulated(PAIRS, 1001, spec), strict=True):
        assert torch.equal(after, virtual)


def test_another_order_falls_back_to_rank_order_and_is_said_once() -> None:
    size = 1000
    spec = "localsgd:period=1,replica=rank"
    mine = [values(rank, size) for rank in range(4)]
    total = ((mine[0] + mine[1]) + mine[2]) + mine[3]
    results = ranks(4, exchange, topology=APART, size=size, spec=spec, broken=True)
    for vector, (after, said) in zip(mine, results, strict=True):
        assert torch.equal(after, vector + (total / 4 - vector))
        assert len(said) == 1
