"""Nodes that gossip in passing, as they do where the parameters are on an accelerator: here on a
CPU, which is told to.
"""

import itertools
import time
from contextlib import contextmanager
from threading import Event
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from composed import batch, build, whole
from pool import attempt, ranks
from test_gossip import GRID, Net, flat, partly, train
from torch import nn

import loosestep
from loosestep import Topology
from loosestep.core.engines.node_gossip import NodeGroup
from loosestep.core.replica.replica import Replica

SPEC = "adpsgd:replica=node,slowdown=1.0"


@contextmanager
def passing():
    """Inside, an engine that is opened crosses in passing, and as often as it can, as on an
    accelerator.
    """
    with (
        patch.object(NodeGroup, "_in_passing", True),
        patch("loosestep.core.engines.node_gossip.PASSING", 2.0),
    ):
        yield


def train_in_passing(rank: int, **arguments):
    with passing():
        return train(rank, SPEC, **arguments)


@pytest.mark.parametrize(
    "topology", [GRID, [[0, 1, 2], [3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]], ids=str
)
def test_a_run_ends_identical_everywhere_with_nothing_left(topology):
    results = ranks(4, train_in_passing, topology=topology)
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        assert torch.equal(result["var"], results[0]["var"])
        assert (result["var"] > 0).all()
        assert result["threads"] == 0
    assert results[0]["stats"]["global_steps"] == 120
    assert len(topology) == 1 or sum(result["local"]["folds"] for result in results) > 3
    own = [30 * len(node) for node in topology for _ in node]
    heard = [result["local"]["global_steps"] for result in results]
    assert all(count > mine for count, mine in zip(heard, own, strict=True)) or len(topology) == 1
    first = topology[0]
    assert all(torch.equal(results[rank]["inside"], results[first[0]]["inside"]) for rank in first)


@pytest.mark.parametrize("steps", [[30, 10, 20, 5], [0, 20, 20, 20], [12, 13, 14, 15]], ids=str)
def test_the_ranks_of_a_node_may_finish_at_different_times(steps):
    results = ranks(4, train_in_passing, steps=steps)
    assert all(torch.equal(result["end"], results[0]["end"]) for result in results)
    assert all(result["end"].isfinite().all() for result in results)


def partly_in_passing(rank: int):
    with passing():
        return partly(rank, SPEC)


def test_no_gradient_is_lost_or_counted_twice():
    for (everybody, somebody, nobody), unused, folds in ranks(4, partly_in_passing):
        torch.testing.assert_close(everybody, torch.full((3,), 3.0 - 0.2 * 2.5))
        torch.testing.assert_close(somebody, torch.full((5,), 5.0 - 0.2 * 2.5))
        assert torch.equal(nobody, torch.full((4,), 4.0))
        assert unused is None
        assert folds > 0


@contextmanager
def held_up(gate: Event):
    """Inside, snapshots take as long to arrive as the gate is closed."""
    stage = Replica.stage

    def slow(self, *arguments, **options):
        snapshot = stage(self, *arguments, **options)
        return type(snapshot)(**{**vars(snapshot), "ready": lambda: gate.wait(20)})

    with patch.object(Replica, "stage", slow):
        yield


@contextmanager
def seldom_back(rank: int):
    """Inside, rank 1 is back from a crossing later than its mates."""
    calls = itertools.count()
    is_back = NodeGroup._is_back
    with patch.object(
        NodeGroup,
        "_is_back",
        lambda self: is_back(self) and (rank != 1 or next(calls) % 3 == 0),
    ):
        yield


def drift(rank: int, inside: str, topology, late: bool):
    """Nodes that start apart and learn nothing: only exchanges move them. What each step and the
    end leave.
    """
    model = build(inside, seed=0).double() if inside == "plain" else build(inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    gate = Event()
    gate.set()
    with (
        passing(),
        seldom_back(rank),
        loosestep.attach(model, optimizer, SPEC, topology=Topology(topology), deadline=20),
        held_up(gate),
    ):
        start = whole(model) + Topology(topology).node_of(rank)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param += Topology(topology).node_of(rank)
        for step in range(60):
            model(batch(rank, step, inside).to(start.dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(whole(model))
            time.sleep(0.002)
            if late and step == 3:
                gate.clear()
        gate.set()
    return start, torch.stack(seen), whole(model)


@pytest.mark.parametrize(("inside", "rounding"), [("plain", 1e-12), ("ddp", 1e-5)])
@pytest.mark.parametrize("topology", [GRID, [[0, 1, 2], [3]]], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_the_mean_never_moves_and_the_ranks_of_a_node_are_never_apart(
    inside, rounding, topology, late
):
    if inside == "ddp" and topology != GRID:
        pytest.skip("the mesh of these tests has equal nodes")
    results = ranks(4, drift, inside=inside, topology=topology, late=late)
    mean = torch.stack([start for start, _, _ in results]).mean(0)  # a node weighs as its ranks
    for start, seen, end in results:
        torch.testing.assert_close(end, mean, rtol=0, atol=rounding)
        met = (seen[-1] - mean).abs().max() < 0.1 * (start - mean).abs().max()
        assert met or late  # on the way already
    for node in topology:
        assert all(torch.equal(results[rank][1], results[node[0]][1]) for rank in node)


def go_on_alone(rank: int):
    """Rank 1 leaves after five steps; when parameters have still been exchanged after that."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        passing(),
        loosestep.attach(model, optimizer, SPEC, topology=Topology(GRID), deadline=20) as run,
    ):
        for _ in range(5 if rank == 1 else 100):
            (model(torch.ones(1, 3)) - rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.003)
        folds = [event.fields["step"] for event in run.trace.events if event.kind == "fold"]
    return folds, flat(model)


def test_a_node_of_which_a_rank_is_away_goes_on_gossiping():
    results = ranks(4, go_on_alone)
    assert max(results[0][0]) > 50
    assert all(torch.equal(end, results[0][1]) for _, end in results)


def normalise(rank: int):
    """A batch each goes through the norm; then its statistics change by gossip alone, while they
    stay small on rank 0's node.
    """
    norm = nn.BatchNorm1d(3)
    gate = Event()
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    gate.set()
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(rank))
    least = 1.0

    def step(times: int) -> None:
        nonlocal least
        for _ in range(times):
            norm(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            least = min(least, float(norm.running_var.min()))
            time.sleep(0.002)

    with (
        passing(),
        loosestep.attach(norm, optimizer, SPEC, topology=Topology(GRID), deadline=20),
        held_up(gate),
    ):
        norm.running_var.fill_(1.0 + rank)
        norm.eval()
        step(200)
        dist.barrier()
        mean = norm.running_var.clone()
        dist.barrier()
        norm.running_var.fill_(3.0 if rank < 2 else 0.1)
        step(100)
        norm.running_var.fill_(3.0 if rank < 2 else 0.1)
        gate.clear()
        step(20)
        norm.running_var.fill_(0.001)  # less than what is on its way will take off
        gate.set()
        step(20)
    return mean, least


def test_statistics_are_those_of_all_ranks_and_variances_stay_positive():
    for mean, least in ranks(4, normalise):
        torch.testing.assert_close(mean, torch.full((3,), 2.5), rtol=0.01, atol=0)
        assert least > 0


def step_past(rank: int):
    """Steps while the first crossing does not get through, and what moves once it does."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gate = Event()
    moved = []
    with (
        passing(),
        loosestep.attach(model, optimizer, SPEC, topology=Topology(GRID), deadline=30) as run,
        held_up(gate),
    ):
        with torch.no_grad():
            model.weight += rank // 2
        begun = time.monotonic()
        for step in range(200):
            if step == 20:
                waited = time.monotonic() - begun
                gate.set()
            before = flat(model)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(not torch.equal(flat(model), before))
            time.sleep(0.002 if step > 20 else 0)
        told = [event.fields for event in run.trace.events if event.kind == "fold"]
        folds = [(fields["step"], fields["staleness_max"]) for fields in told]
    return waited, moved, folds


def test_nobody_waits_for_a_crossing_that_is_under_way():
    for waited, moved, folds in ranks(4, step_past):
        # 20 steps, while the gate would have held the first of them for 20 seconds
        assert waited < 10
        assert not any(moved[:20])
        assert any(moved[20:])
        assert max(age for _, age in folds) >= 19  # it is told how old what was folded is
        assert all(age <= step for step, age in folds)


def come_back(rank: int):
    """A checkpoint in the middle of a run, loaded in the middle of the next."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with (
        passing(),
        loosestep.attach(model, optimizer, SPEC, topology=Topology(GRID), deadline=20) as run,
    ):

        def learn(steps):
            for step in range(steps):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        learn(10)
        saved = (
            {name: value.clone() for name, value in model.state_dict().items()},
            run.state_dict(),
        )
        learn(10)
        model.load_state_dict(saved[0])
        run.load_state_dict(saved[1])
        dist.barrier()
        after = run.state["step"]
        learn(5)
    return after, flat(model)


def test_a_run_that_is_loaded_goes_on():
    results = ranks(4, come_back)
    assert [after for after, _ in results] == [10] * 4
    assert all(torch.equal(end, results[0][1]) for _, end in results)


def fall(rank: int):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with passing(), loosestep.attach(model, optimizer, SPEC, topology=Topology(GRID), deadline=20):
        for step in range(60):
            if rank == 1 and step == 10:
                raise RuntimeError("enough")
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            time.sleep(0.005)
    return flat(model)


def test_a_rank_that_fails_ends_its_node_and_no_other():
    results = attempt(4, fall)
    assert [ok for ok, _ in results] == [False, False, True, True]
    assert "enough" in results[1][1]
    assert "rank 1" in results[0][1]
    assert torch.equal(results[2][1], results[3][1])
