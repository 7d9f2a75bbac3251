"""The ranks of one learner begin with the same optimizer, whoever has loaded a checkpoint."""

import logging

import pytest
import torch
from little import GRID, PAIR, data, flat, linear, sgd
from pool import ranks

import loosestep


def train(rank: int, spec: str, grid: bool, loaded: tuple[int, ...]):
    """Some ranks have a momentum and a learning rate before they attach."""
    model = linear()
    optimizer = sgd(model)
    if rank in loaded:
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 1.0 + rank)
        optimizer.param_groups[0]["lr"] = 0.05
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("loosestep").addHandler(handler)
    run = loosestep.attach(model, optimizer, spec, topology=GRID if grid else PAIR, deadline=10)
    momentum = [s["momentum_buffer"].mean().item() for s in optimizer.state.values()]
    held = optimizer.param_groups[0]["lr"], momentum[0] if momentum else 0.0
    for step in range(3):
        optimizer.zero_grad()
        (model(data(rank, step)) - 1).square().mean().backward()
        optimizer.step()
    before = flat(model)
    run.finish()
    logging.getLogger("loosestep").removeHandler(handler)
    return held, before, told, run.stats["consensus_distance"]


def test_ranks_of_one_learner_take_over_what_rank_0_has_loaded_and_say_so():
    results = ranks(2, train, spec="allreduce", grid=False, loaded=(0,))
    assert [held for held, *_ in results] == [(0.05, 1.0)] * 2
    assert torch.equal(results[0][1], results[1][1]), "the same model before finish() too"
    assert "the optimizers of rank(s) 1 held other settings or another state" in results[0][2][0]


@pytest.mark.parametrize(
    ("spec", "loaded", "held"),
    [
        ("daso", (0,), [(0.05, 1.0)] * 4),  # nodes that have loaded nothing follow rank 0
        ("daso", (0, 2), [(0.05, 1.0), (0.05, 1.0), (0.05, 3.0), (0.05, 3.0)]),
        ("localsgd:replica=rank", (0, 1, 2, 3), [(0.05, 1.0 + rank) for rank in range(4)]),
        ("adpsgd", (0,), [(0.05, 1.0)] * 4),
    ],
)
def test_learners_that_have_loaded_their_own_keep_it(spec, loaded, held):
    assert [result[0] for result in ranks(4, train, spec=spec, grid=True, loaded=loaded)] == held


def drift(rank: int):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(model, optimizer, "allreduce", topology=PAIR, deadline=10) as run:
        optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        (model(data(0, 0)) - 1).square().mean().backward()
        optimizer.step()
        before = flat(model)
        with run.consensus():
            mean = flat(model)
    return before, mean, run.stats["consensus_distance"]


def test_the_distance_of_ranks_that_were_to_be_the_same_is_measured():
    (first, mean, told), (second, other_mean, _) = ranks(2, drift)
    assert torch.equal(mean, other_mean)
    torch.testing.assert_close(mean, (first + second) / 2)
    assert told == pytest.approx(((first - second) / 2).norm().item(), rel=1e-5)
