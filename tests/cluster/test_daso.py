"""DASO's mathematics on real processes: progress kept, contraction, exchange counts, golden
trajectories.
"""

import hashlib
import json
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology

GOLDEN = Path(__file__).parent / "golden.json"


class Weights(nn.Module):
    """Elementwise in float64: the same bits on any CPU."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64))


def constant(rank: int, spec: str, nodes: int, steps: int):
    """Identical workers, a constant gradient: how far the model moved, against how far the steps
    would take it.
    """
    model = Weights(4)
    start = model.w.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks do see the same data
        run = loosestep.attach(
            model, optimizer, spec, topology=Topology.grid(nodes, 2), deadline=20
        )
        for _ in range(steps):
            optimizer.zero_grad()
            model.w.sum().backward()
            optimizer.step()
        if run._engine.in_flight is not None:
            run._engine.fold()
        moved = (start - model.w.detach()).mean().item()
        exchanges = run.stats["exchanges"]
        run.finish()
    return moved / (0.01 * steps), exchanges


@pytest.mark.parametrize(
    ("spec", "nodes", "period", "kept"),
    [
        ("daso:period=4,delay=1", 2, 4, 1.000),
        ("daso-paper:period=4", 2, 4, 0.875),
        ("daso-paper:period=4", 4, 4, 0.833),
        ("daso-paper:period=8", 2, 8, 0.917),
    ],
)
def test_fraction_of_progress_kept(spec, nodes, period, kept):
    steps = 400 + period // 4  # the last exchange is folded too
    for fraction, exchanges in ranks(nodes * 2, constant, spec=spec, nodes=nodes, steps=steps):
        assert fraction == pytest.approx(kept, abs=0.002)
        assert exchanges == steps // period


def distinct(rank: int, spec: str, steps: int):
    """Nodes with distinct optima, no gradient noise: node i pulls towards i, its two ranks to
    either side of it.
    """
    topology = Topology.grid(2, 2)
    model = Weights(3)
    with torch.no_grad():
        model.w.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = topology.node_of(rank) + (0.25 if topology.local_index(rank) else -0.25)
    run = loosestep.attach(model, optimizer, spec, topology=topology, deadline=20)
    for _ in range(steps):
        optimizer.zero_grad()
        (model.w - target).square().sum().div(2).backward()
        optimizer.step()
    distance = run.stats["consensus_distance"]
    exchanges = run.stats["exchanges"]
    values = model.w.detach().clone()
    run.finish()
    return distance, exchanges, values, model.w.detach()


def test_workers_with_distinct_optima_contract_as_the_mathematics_says():
    """d <- (1-a) d + a/2 per step; a fold W steps after the snapshot subtracts what d was then."""
    period = 4
    delay = 1
    rate = 0.05
    steps = 41
    half_distance = 0.0
    seen = 0.0
    expected = 0.0
    for step in range(1, steps + 1):
        half_distance = (1 - rate) * half_distance + rate * 0.5
        if step > period and (step - delay) % period == 0:
            half_distance -= seen
            expected = seen
        if step % period == 0:
            seen = half_distance
    results = ranks(4, distinct, spec=f"daso:period={period},delay={delay}", steps=steps)
    for distance, exchanges, values, end in results:
        assert exchanges == steps // period
        assert distance == pytest.approx(expected * 3**0.5, rel=1e-9)
        torch.testing.assert_close(end, torch.full((3,), end[0].item(), dtype=torch.float64))
        assert abs(values[0].item() - end[0].item()) == pytest.approx(half_distance, rel=1e-9)


def test_without_exchanges_the_replicas_do_not_contract_so_the_test_above_can_fail():
    distance = ranks(4, distinct, spec="daso:period=1000", steps=41)[0]
    assert abs(distance[2][0].item() - distance[3][0].item()) > 0.4


def trajectory(rank: int, spec: str, steps: int = 20):
    """Every rank pulls towards its own targets; a digest of the parameters after every step."""
    model = Weights(37)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    digest = hashlib.sha256()
    with loosestep.attach(
        model, optimizer, spec, topology=Topology([[0, 1], [2, 3]]), deadline=20
    ) as run:
        for step in range(steps):
            target = torch.arange(37, dtype=torch.float64) * (rank + 1) / 8 + step
            optimizer.zero_grad()
            (model.w - target).square().sum().div(2).backward()
            optimizer.step()
            run.observe(float((step * 7) % 5))
            digest.update(model.w.detach().numpy().tobytes())
    digest.update(model.w.detach().numpy().tobytes())
    return digest.hexdigest(), [value.hex() for value in model.w.detach()[:3].tolist()]


SPECS = [
    "allreduce",
    "localsgd:period=3,replica=rank",
    "localsgd:period=4,delay=2,replica=rank",
    "localsgd:period=3,start=5,replica=rank",
    "localsgd:replica=node,period=2,local_period=2",
    "diloco:period=3,replica=rank",
    "diloco:period=4,delay=2,replica=node",
    "daso",
    "daso:period=5,delay=3",
    "daso:period=4,delay=2,window=3,patience=1,warmup=3,cooldown=4,total=20",
    "daso:lanes=rotating,period=2",
    "daso-paper",
    "daso-paper:warmup=3,cooldown=3,total=20,epoch=6",
    "delay-by-one:replica=rank",
    "delay-by-one:replica=node",
]


def measure(spec: str) -> dict[str, object]:
    results = ranks(4, trajectory, spec=spec)
    return {"digests": [digest for digest, _ in results], "first values": results[0][1]}


@pytest.mark.parametrize("spec", SPECS)
def test_golden_trajectory_bit_for_bit_and_twice_in_a_row(spec):
    expected = json.loads(GOLDEN.read_text())[spec]
    assert measure(spec) == expected
    assert measure(spec) == expected


def phases(rank: int, spec: str, steps: int, losses: list[float]):
    model = Weights(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loosestep.attach(
        model, optimizer, spec, topology=Topology([[0, 1], [2, 3]]), deadline=20
    ) as run:
        periods = []
        for step in range(steps):
            optimizer.zero_grad()
            (model.w * (rank + step)).sum().backward()
            optimizer.step()
            run.observe(losses[step % len(losses)])
            periods.append(run.stats["period"])
        starts = [e.fields["step"] for e in run.trace.events if e.kind == "start"]
    return periods, starts


def test_a_plateau_of_the_observed_loss_halves_the_period_on_every_rank_at_the_same_exchange():
    results = ranks(
        4, phases, spec="daso:period=4,delay=1,window=4,patience=2", steps=60, losses=[1.0]
    )
    assert all(result == results[0] for result in results)
    periods, starts = results[0]
    assert periods[0] == 4
    assert 2 in periods
    assert 1 in periods
    gaps = [b - a for a, b in pairwise(starts)]
    assert gaps[0] == 4
    assert set(gaps) == {4, 2, 1}


def test_without_observed_losses_the_period_stays():
    periods, starts = ranks(4, quiet, steps=40)[0]
    assert set(periods) == {4}
    assert starts == list(range(4, 41, 4))


def quiet(rank: int, steps: int):
    model = Weights(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loosestep.attach(
        model, optimizer, "daso:window=1", topology=Topology([[0, 1], [2, 3]]), deadline=20
    ) as run:
        periods = []
        for step in range(steps):
            optimizer.zero_grad()
            (model.w * (rank + step)).sum().backward()
            optimizer.step()
            periods.append(run.stats["period"])
        starts = [e.fields["step"] for e in run.trace.events if e.kind == "start"]
    return periods, starts


if __name__ == "__main__" and "--write" in sys.argv:
    GOLDEN.write_text(json.dumps({spec: measure(spec) for spec in SPECS}, indent=1) + "\n")
