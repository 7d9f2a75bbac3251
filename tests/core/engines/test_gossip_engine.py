"""The gossip engine, on virtual ranks."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import loosestep
from loosestep import ADPSGD, Cluster, Topology, simulate

REPLICAS = ["rank", "node"]  # who is one learner; of nodes with one rank it is the same rank
either = pytest.mark.parametrize("replica", REPLICAS)


def train(rank: int, strategy: Any, steps: int, *, reload: bool = False) -> dict[str, Any]:
    """Pull towards the own rank; what the run says at every step and at its end."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(40))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    seen = []
    with loosestep.attach(model, optimizer, strategy, deadline=20) as run:
        if reload:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(steps):
            optimizer.zero_grad()
            (model[0] - rank).square().sum().backward()
            optimizer.step()
            seen.append(run.global_steps)
        momentum = optimizer.state[model[0]]["momentum_buffer"].clone()
        before = run.stats
    return {"seen": seen, "total": run.global_steps, "stats": before, "momentum": momentum}


def test_a_step_of_a_node_counts_the_gradients_of_its_ranks() -> None:
    topology = Topology([[0, 1, 2], [3]])
    steps = [10, 10, 10, 40]
    done = simulate(
        lambda rank: train(rank, "adpsgd:replica=node", steps[rank]), ranks=4, topology=topology
    )
    assert [result["total"] for result in done.results] == [3 * 10 + 40] * 4
    seen = [result["seen"] for result in done.results]
    # all ranks of a node go by the same count, those beyond the last lane too
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][-1] > 30


def pull_apart(rank: int, spec: str) -> float:
    """Learn two steps of -2 on rank 3, nothing elsewhere; the end."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(8))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with loosestep.attach(model, optimizer, spec, deadline=20):
        for _ in range(2):
            optimizer.zero_grad()
            (model[0].sum() * (2.0 if rank == 3 else 0.0)).backward()
            optimizer.step()
    return float(model[0].detach()[0])


@pytest.mark.parametrize("spec", ["adpsgd:replica=node", "adpsgd:replica=node,lockstep=true"])
def test_a_node_weighs_as_much_as_its_ranks(spec: str) -> None:
    """The mean of four ranks, one of which has learned -4, not the mean of two nodes."""
    topology = Topology([[0, 1, 2], [3]])
    done = simulate(lambda rank: pull_apart(rank, spec), ranks=4, topology=topology)
    assert done.results == [pytest.approx(-1.0)] * 4


def look_alone(rank: int) -> tuple[list[int], int, list[float]]:
    """Rank 0 alone looks at the mean, three times; the steps others had made, its own, the end."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(40))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = []
    with loosestep.attach(model, optimizer, "adpsgd:replica=node", deadline=20) as run:
        for step in range(12):
            optimizer.zero_grad()
            (model[0] - rank).square().sum().backward()
            optimizer.step()
            if rank == 0 and step in (2, 5, 8):
                before = model[0].detach().clone()
                with run.consensus():
                    heard.append(run.global_steps)
                assert torch.equal(model[0], before)
    return heard, run.stats["steps"], model[0].tolist()


def test_one_rank_of_a_node_looks_at_the_mean_without_waiting_for_the_end_of_its_mates() -> None:
    topology = Topology([[0, 1], [2, 3]])
    cluster = Cluster(compute="100ms")
    results = simulate(look_alone, ranks=4, topology=topology, cluster=cluster).results
    heard, steps, end = results[0]
    assert [round(count / 4) for count in heard] == [3, 6, 9]  # everybody's steps, not the end's
    for _, others, same in results:
        assert others == steps == 12  # nobody missed a step
        assert same == end


@either
def test_the_momentum_of_a_state_that_was_loaded_after_attach_is_averaged(replica: str) -> None:
    shared, local = (
        simulate(lambda rank, spec=spec: train(rank, spec, 10, reload=True), ranks=2).results
        for spec in (
            f"adpsgd:lockstep=true,average_momentum=true,replica={replica}",
            f"adpsgd:lockstep=true,replica={replica}",
        )
    )
    torch.testing.assert_close(shared[0]["momentum"], shared[1]["momentum"])
    assert not torch.allclose(local[0]["momentum"], local[1]["momentum"])


@either
def test_exchanges_per_second_are_told(replica: str) -> None:
    done = simulate(
        lambda rank: train(rank, f"adpsgd:replica={replica}", 20),
        ranks=2,
        cluster=Cluster(compute="100ms"),
    )
    for result in done.results:
        assert result["stats"]["exchanges_per_second"] == pytest.approx(10, rel=0.2)
        assert result["stats"]["fold_cpu_seconds"] == 0.0  # takes no virtual time


@either
def test_a_graph_that_falls_apart_is_told_once(
    caplog: pytest.LogCaptureFixture, replica: str
) -> None:
    path = ADPSGD(graph={0: [1], 1: [2], 2: [3]}, replica=replica)
    failures = {1: "550ms"}
    with caplog.at_level(logging.WARNING, "loosestep"):
        done = simulate(
            lambda rank: train(rank, path, 20),
            ranks=4,
            cluster=Cluster(compute="100ms", failures=failures),
        )
    apart = [moment for moment in done.events if moment.kind == "graph_apart"]
    assert [moment.rank for moment in apart] == [0, 2, 3]
    assert all(moment.fields["parts"] == [[0], [2, 3]] for moment in apart)
    assert (
        sum("fallen apart: the ranks [0] and [2, 3]" in message for message in caplog.messages) == 3
    )


@either
def test_a_ring_closes_over_the_gap_that_a_dead_rank_leaves_which_is_no_news(replica: str) -> None:
    cluster = Cluster(compute="100ms", failures={1: "550ms"})
    spec = f"adpsgd:replica={replica}"
    done = simulate(lambda rank: train(rank, spec, 20), ranks=4, cluster=cluster)
    partners = [
        moment.fields["peer"]
        for moment in done.events
        if moment.kind == "start" and moment.rank == 0
    ]
    assert partners == [1] * 6 + [2] * 14  # its death is noticed after 0.13 s
    # one may drop with rank 1, the last may be on its way
    assert done.results[0]["stats"]["exchanges"] >= 17
    assert not [moment for moment in done.events if moment.kind == "graph_apart"]


def test_a_peer_that_makes_long_steps_is_warned_of_once_and_recorded_every_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stall(rank: int) -> None:
        model = nn.Linear(1, 1)
        with loosestep.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), "adpsgd", deadline=20
        ) as run:
            for peer in (1, 2, 1, 2) if rank == 0 else ():
                run._engine._news.hear("peer_no_progress", peer=peer, progress=0)

    done = simulate(stall, ranks=3)
    assert [
        moment.fields["peer"] for moment in done.events if moment.kind == "peer_no_progress"
    ] == [1, 2, 1, 2]
    assert [message for message in caplog.messages if "no progress" in message] == [
        "peer no progress: peer=1, progress=0",
        "peer no progress: peer=2, progress=0",
    ]


@either
@pytest.mark.parametrize(("rate", "begun"), [(0.25, 5), (1, 20), (2, 40)])
def test_a_learner_begins_as_many_exchanges_a_step_as_its_rate_says(
    rate: float, begun: int, replica: str
) -> None:
    done = simulate(
        lambda rank: train(rank, ADPSGD(rate=rate, replica=replica), 20),
        ranks=3,
        cluster=Cluster(compute="100ms"),
    )
    for rank in range(3):
        assert (
            sum(moment.kind == "start" and moment.rank == rank for moment in done.events) == begun
        )


def narrow(rank: int, replica: str) -> list[tuple[float, float]]:
    """A variance before and after each step; rank 0's falls from 100 to 1/100 while its first
    exchange is on its way.
    """
    norm = nn.BatchNorm1d(1, momentum=1.0)
    seen = []
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    unit = torch.tensor([[-1.0], [1.0]]) / 2**0.5  # of variance 1
    with loosestep.attach(norm, optimizer, f"adpsgd:replica={replica}"):
        for step in range(8):
            norm(unit * (1 if rank else 10 if step == 0 else 0.1))
            before = norm.running_var.item()
            optimizer.step()
            seen.append((before, norm.running_var.item()))
    return seen


@either
def test_a_late_delta_leaves_a_tenth_of_a_variance_that_it_would_pull_below_zero(
    replica: str,
) -> None:
    wide, _ = simulate(
        lambda rank: narrow(rank, replica),
        ranks=2,
        cluster=Cluster(compute="100ms", latency="250ms"),
    ).results
    assert wide[0][0] == pytest.approx(100)
    assert min(after / before for before, after in wide) == pytest.approx(0.1)


def test_a_random_ring_of_two_is_remarked_upon_once(caplog: pytest.LogCaptureFixture) -> None:
    simulate(lambda rank: train(rank, "adpsgd:graph=random-ring", 2), ranks=2)
    assert [record.levelno for record in caplog.records if "equals pairs" in record.message] == [
        logging.WARNING
    ]


@pytest.mark.parametrize("secret", [{"key": "0123456789abcdef"}, {"encrypt": True}])
def test_a_key_for_a_collective_strategy_is_refused(secret: dict[str, Any]) -> None:
    def attach(rank: int) -> None:
        model = nn.Linear(2, 2)
        loosestep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce", **secret)

    with pytest.raises(ValueError, match="key= and encrypt= are for gossip"):
        simulate(attach, ranks=2)
