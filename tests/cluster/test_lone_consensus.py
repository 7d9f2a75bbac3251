"""A consensus on one rank alone, as in `if rank == 0: with run.consensus(): evaluate()`."""

import time

import pytest
import torch
from little import flat, linear, one_step, sgd
from pool import ranks

import loosestep
from loosestep import Topology

STEPS = 60


def train(rank: int, spec: str, nodes: list[list[int]], evaluates: bool):
    """Rank 0 evaluates the mean in the middle; everybody's end, and who waited for the evaluation."""
    model = linear()
    optimizer = sgd(model)
    seen = []
    slowest = 0.0
    with loosestep.attach(model, optimizer, spec, topology=Topology(nodes), deadline=3) as run:
        for step in range(STEPS):
            begin = time.monotonic()
            one_step(model, optimizer, rank, step)
            if spec.startswith("localsgd"):
                time.sleep(0.01)  # so that the others have steps left when they hear of it
            slowest = max(slowest, time.monotonic() - begin)
            if rank == 0 and step == 3:  # from here on the others know that it does so
                with run.consensus():
                    pass
            if rank == 0 and evaluates and step in (9, 20):
                with run.consensus():
                    seen.append(flat(model))
                    time.sleep(0.5)
    return flat(model), seen, slowest, run.stats["steps"]


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ("allreduce", [[0], [1]]),
        ("allreduce", [[0, 1], [2, 3]]),
        ("daso", [[0, 1]]),
        ("daso:warmup=60", [[0, 1], [2, 3]]),
    ],
)
def test_training_in_lockstep_goes_on_as_if_nobody_had_looked(spec, nodes):
    world = sum(map(len, nodes))
    looked = ranks(world, train, spec=spec, nodes=nodes, evaluates=True)
    unseen = ranks(world, train, spec=spec, nodes=nodes, evaluates=False)
    for (end, _, _, steps), (other, _, _, _) in zip(looked, unseen, strict=True):
        assert steps == STEPS
        assert torch.equal(end, other)
    assert len(looked[0][1]) == 2


def test_free_replicas_serve_it_at_a_step_boundary_and_do_not_wait_for_the_evaluation():
    spec = "localsgd:period=1000,replica=rank"
    results = ranks(2, train, spec=spec, nodes=[[0], [1]], evaluates=True)
    assert torch.equal(results[0][0], results[1][0])
    assert results[1][2] < 0.4, "rank 1 did not wait for the evaluation"
    assert [steps for *_, steps in results] == [STEPS] * 2


def test_nodes_that_cycle_serve_it_too():
    nodes = [[0, 1], [2, 3]]
    results = ranks(4, train, spec="daso:period=4,delay=1", nodes=nodes, evaluates=True)
    assert all(torch.equal(end, results[0][0]) for end, *_ in results)
    assert len(results[0][1]) == 2


def look(rank: int, nodes: list[list[int]]):
    """Only rank 0 looks, three times; what it hears of everybody's steps, and all steps and ends."""
    model = linear()
    optimizer = sgd(model)
    heard = []
    spec = "adpsgd:replica=node"
    with loosestep.attach(model, optimizer, spec, topology=Topology(nodes), deadline=20) as run:
        for step in range(30):
            one_step(model, optimizer, rank, step)
            time.sleep(0.005)
            if rank == 0 and step in (5, 15, 25):
                before = flat(model)
                with run.consensus():
                    heard.append(step)
                    assert run.state["step"] == step + 1
                assert torch.equal(flat(model), before)
    return heard, run.stats["steps"], flat(model)


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]], ids=str)
def test_a_node_that_gossips_serves_it_and_no_step_is_lost(nodes):
    results = ranks(4, look, nodes=nodes)
    assert [heard for heard, *_ in results] == [[5, 15, 25], [], [], []]
    assert [steps for _, steps, _ in results] == [30] * 4
    assert all(torch.equal(end, results[0][2]) for *_, end in results)
