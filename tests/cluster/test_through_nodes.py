"""Where every rank is a replica, averages go through the nodes: the same mean, a link carries a
node's sum once.
"""

import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology

GRID = [[0, 1], [2, 3]]
UNEVEN = [[0, 1], [2, 3, 4]]
ONE = [[0, 1, 2]]


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(
        dtype
    )


def average(rank: int, spec: str, topology: list[list[int]], dtype: torch.dtype, size: int = 1001):
    """One exchange of distinct models, folded at once."""
    model = nn.Linear(size, 1, bias=False, dtype=dtype)
    run = loosestep.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        spec,
        topology=Topology(topology),
        deadline=20,
    )
    run._engine.boundary()  # the first exchange also tells what attaching has sent
    before = run.trace.totals.bytes_between_nodes
    with torch.no_grad():
        model.weight.copy_(values(rank, size, dtype))
    run._engine.boundary()
    after = model.weight.detach().flatten().clone()
    sent = run.trace.totals.bytes_between_nodes - before
    run.finish()
    return after, sent


@pytest.mark.parametrize("topology", [GRID, UNEVEN, ONE], ids=["even", "uneven", "one node"])
def test_all_ranks_hold_the_mean_of_all(topology: list[list[int]]) -> None:
    world = sum(map(len, topology))
    results = ranks(
        world,
        average,
        spec="localsgd:period=1,replica=rank",
        topology=topology,
        dtype=torch.float64,
    )
    mean = sum(values(rank, 1001, torch.float64) for rank in range(world)) / world
    for after, _ in results:
        torch.testing.assert_close(after, mean, rtol=1e-14, atol=1e-14)
        # x + (mean - x) is rounded on each replica
        torch.testing.assert_close(after, results[0][0], rtol=1e-15, atol=1e-15)


def test_half_precision_is_summed_in_single_precision_and_rounded_once() -> None:
    mine = [values(rank, 1001, torch.bfloat16) for rank in range(4)]
    wide = [value.float() for value in mine]
    mean = ((wide[0] + wide[1]) + (wide[2] + wide[3])) / 4
    results = ranks(
        4, average, spec="localsgd:period=1,replica=rank", topology=GRID, dtype=torch.bfloat16
    )
    for start, (after, _) in zip(mine, results, strict=True):
        assert torch.equal(after, start + (mean - start.float()).to(torch.bfloat16))


def census(rank: int, topology: list[list[int]]) -> list[list[float]]:
    """What every rank hears of what each has told."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(
        model, optimizer, "daso", topology=Topology(topology), deadline=20
    ) as run:
        return run._engine._comm.census(10.0 * rank, -rank)


@pytest.mark.parametrize("topology", [GRID, [[0, 2], [1, 3]], [[3, 0], [2, 1]], [[0], [3, 1, 2]]])
def test_what_ranks_tell_each_other_arrives_in_rank_order_whatever_the_order_of_nodes(
    topology,
) -> None:
    assert ranks(4, census, topology=topology) == [[[0, 0], [10, -1], [20, -2], [30, -3]]] * 4


def test_a_link_carries_as_much_as_if_nodes_were_the_replicas() -> None:
    sent = {
        replica: sum(
            amount
            for _, amount in ranks(
                4,
                average,
                spec=f"localsgd:period=1,replica={replica}",
                topology=GRID,
                dtype=torch.float32,
                size=40_000,
            )
        )
        for replica in ("rank", "node")
    }
    assert sent["rank"] == pytest.approx(sent["node"], rel=0.02)
    # every node its vector, once each way
    assert sent["node"] == pytest.approx(2 * 160_000, rel=0.02)
