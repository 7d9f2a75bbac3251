"""ADPSGD and DelayByOne attached, on real processes."""

import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import errors, ranks
from torch import nn

import loosestep
from loosestep import ADPSGD, DelayByOne, Topology

GRID = [[0, 1], [2, 3]]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.first(x))))


def train(rank: int, spec: str, steps: list[int] | int = 30, topology=GRID, pause: float = 0.002):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    threads = threading.active_count()
    with loosestep.attach(model, optimizer, spec, topology=Topology(topology), deadline=20) as run:
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            time.sleep(pause)
        before = flat(model)
        with run.consensus():
            inside = flat(model)
        if isinstance(steps, int):  # otherwise the node's other ranks may have stepped meanwhile
            assert torch.equal(flat(model), before)
        local = run.stats
    return {
        "end": flat(model),
        "inside": inside,
        "stats": run.stats,
        "local": local,
        "threads": threading.active_count() - threads,
        "var": model.norm.running_var.clone(),
    }


SPECS = [
    "adpsgd",
    "adpsgd:graph=random-ring",
    "adpsgd:graph=pairs",
    "adpsgd:graph=exponential",
    "adpsgd:replica=node",
    "adpsgd:lockstep=true",
    "adpsgd:max_staleness=2",
    "adpsgd:average_momentum=true",
    "adpsgd:rate=0.5",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_gossip_run_ends_identical_everywhere_with_nothing_left(spec):
    results = ranks(4, train, spec=spec)
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        assert torch.equal(result["var"], results[0]["var"])
        assert result["threads"] == 0
        assert result["stats"]["steps"] == 30
        assert result["stats"]["lost"] == []
    assert results[0]["stats"]["global_steps"] >= 100  # as last heard from each
    assert sum(result["local"]["folds"] for result in results) > 3


@pytest.mark.parametrize(
    "topology", [[[0, 1, 2], [3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]], ids=str
)
def test_the_ranks_of_any_node_are_one_learner(topology):
    results = ranks(4, train, spec="adpsgd:replica=node", topology=topology)
    assert all(torch.equal(result["end"], results[0]["end"]) for result in results)
    first = topology[0]
    assert all(torch.equal(results[rank]["inside"], results[first[0]]["inside"]) for rank in first)


@pytest.mark.parametrize("spec", ["adpsgd", "adpsgd:graph=random-ring", "adpsgd:replica=node"])
@pytest.mark.parametrize("steps", [[30, 10, 20, 5], [0, 20, 20, 20], [12, 13, 14, 15]], ids=str)
def test_learners_may_finish_at_different_times(spec, steps):
    results = ranks(4, train, spec=spec, steps=steps)
    assert all(torch.equal(result["end"], results[0]["end"]) for result in results)
    assert all(result["end"].isfinite().all() for result in results)


def test_no_stop_protocol_is_needed_from_the_user_and_nobody_hangs_on_exit():
    assert [result["threads"] for result in ranks(4, train, spec="adpsgd", steps=[1, 2, 3, 4])] == [
        0
    ] * 4


class Parts(nn.Module):
    """Of three vectors each rank uses those it is told to; the loss is linear, so gradients are
    the same at any point.
    """

    def __init__(self) -> None:
        super().__init__()
        self.everybody, self.somebody, self.nobody = (
            nn.Parameter(torch.full((n,), float(n))) for n in (3, 5, 4)
        )

    def forward(self, rank: int) -> torch.Tensor:
        loss = (1 + rank) * self.everybody.sum()
        return loss + 10.0 * self.somebody.sum() if rank == 2 else loss


def partly(rank: int, spec: str):
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loosestep.attach(model, optimizer, spec, topology=Topology(GRID), deadline=20) as run:
        for _ in range(20):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
            time.sleep(0.002)
        folds = run.stats["folds"]
    return [p.detach() for p in model.parameters()], model.nobody.grad, folds


@pytest.mark.parametrize("spec", ["adpsgd", "adpsgd:replica=node"])
def test_gradients_are_not_misaligned_when_a_parameter_is_unused(spec):
    """20 steps of 0.01 along the mean gradient of the ranks, in which who does not use a
    parameter counts as zero.
    """
    results = ranks(4, partly, spec=spec)
    for (everybody, somebody, nobody), unused, folds in results:
        torch.testing.assert_close(everybody, torch.full((3,), 3.0 - 0.2 * 2.5))
        torch.testing.assert_close(somebody, torch.full((5,), 5.0 - 0.2 * 2.5))
        assert torch.equal(nobody, torch.full((4,), 4.0))
        assert unused is None
        assert folds > 0


def normalised(rank: int, steps: int):
    """One batch of a size that differs between ranks goes through BatchNorm; after that
    statistics change by gossip alone.
    """
    norm = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    with loosestep.attach(
        norm, optimizer, "adpsgd:graph=random-ring", topology=Topology(GRID), deadline=20
    ):
        norm((rank + 1) * torch.randn(64, 3))
        own = norm.running_var.clone()
        dist.barrier()
        for _ in range(steps):
            optimizer.step()
            time.sleep(0.002)
        # before the end of the run, which makes everything equal
        return own, norm.running_var.clone()


def test_batch_norm_is_exchanged_while_training_goes_on():
    results = ranks(4, normalised, steps=150)
    mean = torch.stack([own for own, _ in results]).mean(0)
    for own, var in results:
        assert (own / mean - 1).abs().max() > 0.1
        torch.testing.assert_close(var, mean, rtol=0.01, atol=0)


def statistics(rank: int, spec: str, topology, dtype=torch.float32):
    """Inputs far below zero into a batch norm that learns nothing, attached and alone."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3, dtype=dtype)
    alone = nn.BatchNorm1d(3, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with loosestep.attach(model, optimizer, spec, topology=Topology(topology), deadline=20):
        for step in range(10):
            x = torch.randn(
                16, 3, generator=torch.Generator().manual_seed(100 * rank + step)
            ) - 3 * (rank + 1)
            x = x.to(dtype)
            alone(x)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return [model.running_mean.clone(), model.running_var.clone()], [
        alone.running_mean,
        alone.running_var,
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_the_means_of_a_batch_norm_may_be_negative(world):
    """Averaging is linear and so are the updates: the end is the mean of what each rank would
    have found alone.
    """
    results = ranks(
        world, statistics, spec="adpsgd:lockstep=true", topology=[[r] for r in range(world)]
    )
    for kind in (0, 1):
        expected = torch.stack([alone[kind] for _, alone in results]).mean(0)
        for ended, _ in results:
            torch.testing.assert_close(ended[kind], expected, rtol=1e-5, atol=1e-5)
    assert (results[0][0][0] < -1).all()


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize("topology", [[[0, 1]], [[0, 1], [2, 3]]], ids=str)
def test_the_statistics_of_a_node_are_the_mean_of_its_ranks(topology, dtype, close):
    world = sum(map(len, topology))
    results = ranks(
        world, statistics, spec="adpsgd:replica=node,lockstep=true", topology=topology, dtype=dtype
    )
    for kind in (0, 1):
        expected = torch.stack([alone[kind] for _, alone in results]).mean(0)
        for ended, _ in results:
            torch.testing.assert_close(ended[kind], expected, rtol=close, atol=close)


def test_a_world_of_one_works():
    result = ranks(1, train, spec="adpsgd", topology=[[0]])[0]
    assert result["stats"]["steps"] == 30
    assert result["stats"]["exchanges"] == 0


def shape(rank: int, topology):
    return train(rank, ADPSGD(graph=topology), topology=[[0], [1], [2], [3]])


def test_an_explicit_graph_and_a_matrix_work():
    path = {0: [1], 1: [2], 2: [3]}
    quarter = [[0.25] * 4] * 4
    for topology in (path, quarter):
        results = ranks(4, shape, topology=topology)
        assert all(torch.equal(result["end"], results[0]["end"]) for result in results)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({0: [1], 2: [3]}, "not connected: rank(s) [2, 3]"),
        ([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.4, 0.5], [0, 0, 0.5, 0.5]], "row 2 is"),
        ([[1.0]], "must be 4 x 4"),
    ],
)
def test_a_graph_that_does_not_work_is_refused_on_every_rank(topology, message):
    for seen in errors(4, shape, topology=topology):
        assert message in seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"graph": "rink"},
            "unknown graph 'rink'; valid are ring, random-ring, pairs, exponential",
        ),
        ({"rate": 0}, "rate must be above 0"),
        ({"max_staleness": 0}, "max_staleness must be a whole number of at least 1"),
        ({"replica": "gpu"}, "replica must be one of"),
        ({"seed": -1}, "seed must be"),
        ({"slowdown": 2}, "slowdown must be"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        ADPSGD(**arguments)


def late_momentum(rank: int):
    model = nn.Linear(2, 2)
    loosestep.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        "adpsgd:average_momentum=true",
        topology=Topology([[0]]),
    )


def test_averaging_a_momentum_that_is_not_there_is_refused():
    assert "average_momentum needs SGD with momentum" in errors(1, late_momentum)[0]


def momenta(rank: int, spec: str):
    model = nn.ParameterList([nn.Parameter(torch.zeros(50))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    with loosestep.attach(model, optimizer, spec, topology=Topology([[0], [1]]), deadline=20):
        for step in range(40):
            optimizer.zero_grad()
            (model[0] * (float(rank) if step == 0 else 0.0)).sum().backward()
            optimizer.state[model[0]]["momentum_buffer"] = optimizer.state[model[0]].get(
                "momentum_buffer", torch.zeros(50)
            )
            optimizer.step()
            optimizer.param_groups[0]["momentum"] = 1.0
            time.sleep(0.002)
        return optimizer.state[model[0]]["momentum_buffer"].mean().item()


def test_momentum_is_averaged_on_request_and_stays_local_otherwise():
    local = ranks(2, momenta, spec="adpsgd")
    shared = ranks(2, momenta, spec="adpsgd:average_momentum=true")
    assert local == pytest.approx([0.0, 1.0])
    assert shared == pytest.approx([0.5, 0.5], abs=0.05)


def resumed(rank: int, spec: str):
    """Parameters that are loaded after attach, and the mean that is read before anybody has made
    a step.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(50))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with loosestep.attach(model, optimizer, spec, topology=Topology(GRID), deadline=20) as run:
        state = run.state_dict()
        model[0].data.fill_(1.0 + rank // 2)
        run.load_state_dict(state)
        loaded = flat(model)
        dist.barrier()
        with run.consensus():
            inside = flat(model)
    return loaded, inside, flat(model)


@pytest.mark.parametrize("spec", ["adpsgd", "adpsgd:replica=node"])
def test_peers_meet_what_was_loaded_before_the_first_step(spec):
    for rank, (loaded, inside, end) in enumerate(ranks(4, resumed, spec=spec)):
        assert torch.equal(loaded, torch.full((50,), 1.0 + rank // 2))
        assert torch.equal(inside, torch.full((50,), 1.5))
        assert torch.equal(end, inside)


def deserted(rank: int, spec: str):
    """Rank 1 leaves by an exception; what is said on the others, and their end."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: "KEY" in record.msg or said.append(record.getMessage())
    logging.getLogger("loosestep").addHandler(handler)
    model = nn.ParameterList([nn.Parameter(torch.full((3,), float(rank)))])
    try:
        with loosestep.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), spec, deadline=20
        ) as run:
            model[0].data.fill_(float(rank))
            if rank == 1:
                raise KeyError("a mistake")
            while not run.stats["lost"]:
                time.sleep(0.01)
    except KeyError:
        return None
    finally:
        logging.getLogger("loosestep").removeHandler(handler)
    return said, run.stats["lost"], flat(model)


def test_a_rank_that_leaves_before_the_end_is_named_once_and_not_part_of_the_result():
    first, _, other = ranks(3, deserted, spec="adpsgd")
    for said, lost, end in (first, other):
        assert said == [
            "rank 1 has left before the end; the others go on, and its model is not part of their "
            "result"
        ]
        assert lost == [1]
        assert torch.equal(end, torch.ones(3))  # of 0 and 2


# Delay by one -------------------------------------------------------------------------------------


def delayed(rank: int, older: bool, steps: int = 12):
    model = nn.ParameterList([nn.Parameter(torch.linspace(0, 1, 7, dtype=torch.float64))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with loosestep.attach(
        model,
        optimizer,
        DelayByOne(older_gradient=older, replica="rank"),
        topology=Topology(GRID),
        deadline=20,
    ):
        for _ in range(steps):
            seen.append(model[0].detach().clone())
            optimizer.zero_grad()
            (model[0] - rank).square().sum().div(2).backward()
            optimizer.step()
    return seen, model[0].detach()


@pytest.mark.parametrize("older", [False, True])
def test_delay_by_one_is_its_formula(older):
    """x_{k+1} = mean(x_k) - a g(x_k), or - a g(x_{k-1}): the model that computes gradients sees
    x_k, or x_{k-1}.
    """
    results = ranks(4, delayed, older=older)
    start = torch.linspace(0, 1, 7, dtype=torch.float64)
    previous = [start] * 4
    now = [start] * 4
    for step in range(12):
        at = previous if older else now
        for rank, (seen, _) in enumerate(results):
            torch.testing.assert_close(seen[step], at[rank], rtol=0, atol=1e-12)
        mean = sum(now) / 4
        previous = now
        now = [mean - 0.1 * (at[rank] - rank) for rank in range(4)]
    for _, end in results:
        torch.testing.assert_close(end, sum(now) / 4, rtol=0, atol=1e-12)


def spoil(rank: int, spec: str, victim: int):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    run = loosestep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, deadline=20)
    if rank == victim:
        model.weight.data.fill_(float("nan"))
        with pytest.raises(
            loosestep.CommError, match=f"the parameters of rank {victim} contain NaN or Inf"
        ):
            run.finish()
        return None
    run.finish()
    return flat(model)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_learner_that_ends_with_nan_spoils_nobody(victim):
    ends = [end for end in ranks(3, spoil, spec="adpsgd", victim=victim) if end is not None]
    assert len(ends) == 2
    assert torch.equal(ends[0], ends[1])
    assert ends[0].isfinite().all()
