"""Unmodified training functions on virtual ranks."""

import random
import signal
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import loosestep
from loosestep import Cluster, LostPeer, Topology, simulate


class Point(nn.Module):
    """Parameters without a task: whatever moves them is an exchange."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def train(
    rank: int, spec: str, *, steps: int = 10, lr: float = 0.1, deadline: float = 20.0
) -> torch.Tensor:
    """Every rank pulls towards its own point."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    target = torch.randn(64, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    with loosestep.attach(model, optimizer, spec, deadline=deadline) as run:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model.w - target).square().sum() / 2
            loss.backward()
            optimizer.step()
            run.observe(loss)
    return model.w.detach().clone()


# What is separate per rank ------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_every_rank_has_generators_of_its_own() -> None:
    """Ranks that take turns draw the numbers that each would draw alone."""

    def turns(rank: int) -> list[tuple[float, float, float]]:
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drawn = []
        with loosestep.attach(model, optimizer, "localsgd:period=1,replica=rank"):
            for _ in range(4):
                drawn.append(draw())
                (model.w * (rank + 1)).sum().backward()
                optimizer.step()
        return [*drawn, draw()]

    together = simulate(turns, ranks=3).results
    alone = [simulate(lambda: turns(rank), ranks=1).results[0] for rank in range(3)]  # noqa: B023
    assert together == alone


def test_a_simulation_leaves_the_callers_generators_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = [draw(), draw()]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    first = draw()
    simulate(lambda rank: draw(), ranks=2)
    assert [first, draw()] == expected


def test_a_rank_starts_with_the_generators_of_a_new_process() -> None:
    results = simulate(lambda rank: torch.rand(1).item(), ranks=2).results
    generator = torch.Generator()
    assert results == [torch.rand(1, generator=generator).item()] * 2


def test_every_rank_has_grad_mode_and_autocast_of_its_own() -> None:
    def switches(rank: int) -> list[tuple[bool, bool]]:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with loosestep.attach(model, optimizer, "localsgd:period=1,replica=rank") as run:
            model.w.grad = torch.full_like(model.w, rank + 1.0)
            with torch.set_grad_enabled(rank == 0), torch.autocast("cpu", enabled=rank == 1):
                for _ in range(3):
                    optimizer.step()  # waits for the others
                    seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            run.observe(0.0)
        return seen

    results = simulate(switches, ranks=3).results
    assert results == [[(True, False)] * 3, [(False, True)] * 3, [(False, False)] * 3]


# Order and time -----------------------------------------------------------------------------------


def story(seed: int) -> tuple[list[Any], list[float]]:
    done = simulate(
        lambda rank: train(rank, "adpsgd:graph=random-ring", steps=6),
        ranks=6,
        cluster=Cluster(seed=seed, jitter=0.1, compute="10ms"),
    )
    return [(e.time, e.rank, e.kind, sorted(e.fields.items())) for e in done.events], done.results[
        0
    ].tolist()


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    events, result = story(1)
    assert (events, result) == story(1)
    others, other = story(2)
    assert [e[1:3] for e in events] != [e[1:3] for e in others]
    assert result != other


def test_without_jitter_the_seed_still_decides_who_comes_first() -> None:
    def order(seed: int) -> list[int]:
        done = simulate(
            lambda rank: train(rank, "adpsgd", steps=3), ranks=8, cluster=Cluster(seed=seed)
        )
        return [event.rank for event in done.events if event.kind == "step"]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_a_step_takes_its_computation_and_an_average_its_links() -> None:
    # 1 MB/s
    cluster = Cluster(compute="100ms", bandwidth="8mbit", latency="0ms", node_latency="0ms")

    def big(rank: int) -> None:
        model = Point(62_500)  # half a megabyte
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with loosestep.attach(model, optimizer, "localsgd:period=1,replica=rank"):
            for _ in range(3):
                model.w.grad = torch.full_like(model.w, rank + 1.0)
                optimizer.step()

    plain = simulate(
        lambda rank: train(rank, "localsgd:period=100,replica=rank", steps=3),
        ranks=2,
        cluster=cluster,
    )
    assert plain.seconds == pytest.approx(0.3, abs=0.01)
    done = simulate(big, ranks=2, cluster=cluster)
    # Broadcast of the start, three exchanges, the end: half a second each. Headers ride on sums, so
    # ranks that meet at the end send zeros with theirs: as much again.
    assert done.seconds == pytest.approx(0.3 + 6 * 0.5, rel=0.01)
    assert done.gradients_per_second == pytest.approx(6 / done.seconds)
    # of which the exchanges and the meeting are waited for
    assert done.waiting_share == pytest.approx(2.0 / done.seconds, rel=0.01)


def test_gradients_are_averaged_while_backward_goes_on() -> None:
    """Two buckets, of three layers and of one: the first one begins to travel before the last
    quarter of backward.
    """
    cluster = Cluster(compute="3s", bandwidth="8mbit", latency="0ms")

    def layers(rank: int) -> float:
        # 360 kB each
        model = nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with loosestep.attach(model, optimizer, "allreduce") as run:
            start = run.trace.clock()
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            return run.trace.clock() - start

    took = simulate(layers, ranks=2, cluster=cluster).results[0]
    assert took == pytest.approx(3.94, abs=0.01)  # 4.44 if nothing were hidden


def test_one_slow_learner_delays_everybody_under_all_reduce_and_nobody_under_gossip() -> None:
    """Steps per second of the others, with one learner ten times slower."""

    def speed(spec: str, slow: dict[int, float]) -> float:
        done = simulate(
            lambda rank: train(
                rank, spec, steps=2 if rank == 3 and slow and "adpsgd" in spec else 20
            ),
            ranks=8,
            cluster=Cluster(compute="100ms", slow=slow),
        )
        ends = [
            max(e.time for e in done.events if e.kind == "step" and e.rank == rank)
            for rank in range(8)
            if rank != 3
        ]
        return 20 / max(ends)

    assert speed("adpsgd:graph=random-ring", {3: 10}) == pytest.approx(
        speed("adpsgd:graph=random-ring", {}), rel=0.01
    )
    assert speed("allreduce", {3: 10}) == pytest.approx(speed("allreduce", {}) / 10, rel=0.02)


# Contraction --------------------------------------------------------------------------------------


def contraction(n: int, topology: str, rounds: int) -> float:
    """What a lockstep round leaves of the squared distance to the mean, on average over rounds."""
    before: dict[int, list[torch.Tensor]] = defaultdict(list)
    after: dict[int, list[torch.Tensor]] = defaultdict(list)

    def mix(rank: int) -> None:
        model = Point(2048 if topology == "random-ring" else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        generator = torch.Generator().manual_seed(rank)
        with loosestep.attach(model, optimizer, f"adpsgd:graph={topology},lockstep=true"):
            for number in range(rounds):
                if topology == "random-ring":  # all directions alike
                    model.w.grad = torch.randn(2048, generator=generator, dtype=torch.float64)
                else:  # the slowest mode of a ring
                    model.w.grad = torch.full_like(model.w, np.cos(2 * np.pi * rank / n))
                before[number].append(model.w.detach() - model.w.grad)
                optimizer.step()
                after[number].append(model.w.detach().clone())

    simulate(mix, ranks=n)
    return float(
        np.mean([square(after[number]) / square(before[number]) for number in range(rounds)])
    )


def square(vectors: list[torch.Tensor]) -> float:
    stacked = torch.stack(vectors)
    return float((stacked - stacked.mean(0)).square().sum())


@pytest.mark.parametrize("n", [8, 16, 32, 64, 128])
def test_lockstep_rounds_contract_as_the_matrices_say(n: int) -> None:
    assert contraction(n, "ring", 2) == pytest.approx(
        ((1 + 2 * np.cos(2 * np.pi / n)) / 3) ** 2, rel=1e-6
    )
    assert contraction(n, "random-ring", 3) == pytest.approx(1 / 3 - (2 / 3) / (n - 1), rel=0.05)


# Failures -----------------------------------------------------------------------------------------


def test_gossip_goes_on_without_a_rank_that_was_killed() -> None:
    done = simulate(
        lambda rank: train(rank, "adpsgd:graph=random-ring", steps=20),
        ranks=6,
        cluster=Cluster(compute="100ms", failures={2: "550ms"}),
    )
    assert done.lost == {2: pytest.approx(0.55)}
    assert done.results[2] is None
    assert done.steps == [20, 20, 5, 20, 20, 20]
    survivors = [done.results[rank] for rank in range(6) if rank != 2]
    assert all(torch.equal(survivors[0], other) for other in survivors)
    mourners = {
        event.rank
        for event in done.events
        if event.kind == "peer_dead" and event.fields["peer"] == 2
    }
    assert mourners == {0, 1, 3, 4, 5}


@pytest.mark.parametrize(
    "spec", ["allreduce", "localsgd:period=2,replica=rank", "daso:period=2", "adpsgd:replica=node"]
)
def test_a_collective_run_ends_and_names_the_rank_that_was_killed(spec: str) -> None:
    with pytest.raises(LostPeer, match=r"rank [01] is lost") as caught:
        simulate(
            lambda rank: train(rank, spec, steps=20),
            ranks=4,
            ranks_per_node=2,
            cluster=Cluster(compute="100ms", failures={1: "550ms"}),
        )
    assert caught.value.rank == 1


def test_an_error_on_one_rank_ends_the_run_and_is_raised() -> None:
    def faulty(rank: int) -> None:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with loosestep.attach(model, optimizer, "localsgd:period=1,replica=rank"):
            for step in range(5):
                if rank == 2 and step == 3:
                    raise KeyError("no such sample")
                model.w.grad = torch.full_like(model.w, rank + 1.0)
                optimizer.step()

    with pytest.raises(KeyError, match="no such sample"):
        simulate(faulty, ranks=4)


def test_nothing_is_folded_later_than_the_staleness_allows() -> None:
    cluster = Cluster(compute="100ms", latency="350ms")  # an exchange takes seven steps
    done = simulate(
        lambda rank: train(rank, "adpsgd:max_staleness=2", steps=8), ranks=3, cluster=cluster
    )
    assert max(event.fields["staleness_max"] for event in done.events if event.kind == "fold") == 2


def test_a_rank_that_starts_late_is_waited_for_within_the_deadline() -> None:
    done = simulate(
        lambda rank: train(rank, "adpsgd", steps=3),
        ranks=3,
        cluster=Cluster(compute="1s", joins={1: "5s"}),
    )
    assert min(event.time for event in done.events if event.kind == "step") == pytest.approx(
        6.0, abs=0.1
    )
    with pytest.raises(
        TimeoutError, match=r"rank\(s\) 1 did not call loosestep.attach within 20 s"
    ):
        simulate(lambda rank: train(rank, "adpsgd"), ranks=3, cluster=Cluster(joins={1: "30s"}))


def test_ranks_that_wait_for_each_other_in_vain_are_named() -> None:
    def unequal(rank: int) -> None:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = loosestep.attach(model, optimizer, "localsgd:period=1,replica=rank")
        if rank == 0:
            run._world.agree({})  # type: ignore[attr-defined]

    with pytest.raises((RuntimeError, TimeoutError)):
        simulate(unequal, ranks=2)


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1"),
        ({"ranks": 6, "ranks_per_node": 4}, "6 ranks do not fill nodes of 4"),
        ({"ranks": 4, "topology": Topology.grid(1, 2)}, "the topology names 2 ranks, got ranks=4"),
        ({"ranks": 4, "cluster": Cluster(slow={4: 2})}, "slow names rank 4"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        simulate(lambda rank: None, **arguments)


def test_a_training_function_that_uses_torch_distributed_is_told_what_to_do() -> None:
    for touch in (
        dist.get_rank,
        dist.barrier,
        lambda: dist.init_process_group("gloo"),
        all_reduce_by_name,
    ):
        with pytest.raises(RuntimeError, match="use the rank that train"):
            simulate(lambda rank, touch=touch: touch(), ranks=2)
    assert not dist.is_initialized()


from torch.distributed import all_reduce as imported_before  # noqa: E402


def all_reduce_by_name() -> None:
    imported_before(torch.ones(1))


def test_a_simulation_inside_a_simulation_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot run inside another"):
        simulate(lambda rank: simulate(lambda rank: None, ranks=1), ranks=1)


def test_a_training_function_may_take_no_argument() -> None:
    assert simulate(lambda: 7, ranks=3).results == [7, 7, 7]
    with pytest.raises(TypeError, match="training function"):
        simulate("train", ranks=2)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_an_interrupt_ends_all_ranks() -> None:
    before = threading.active_count()
    # Not SIGINT itself: a shell starts what runs in its background with that ignored.
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(
                lambda rank: train(rank, "daso:period=2", steps=10**9), ranks=4, ranks_per_node=2
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert threading.active_count() == before


def test_a_step_that_nothing_was_attached_to_takes_no_time() -> None:
    assert simulate(lambda rank: None, ranks=2).metrics["seconds"] == 0.0


def test_gossip_in_a_code_sends_half_the_bytes_and_keeps_the_mean() -> None:
    sent = {}
    for codec in ("none", "bf16"):

        def work(rank: int, codec: str = codec) -> tuple[torch.Tensor, torch.Tensor, int]:
            model = Point(4096)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            chance = torch.Generator().manual_seed(rank)
            moved = torch.zeros(4096, dtype=torch.float64)
            spec = f"adpsgd:graph=ring,rate=1,codec={codec}"
            with loosestep.attach(model, optimizer, spec, topology=Topology.grid(4, 1)) as run:
                for _ in range(20):
                    gradient = torch.randn(4096, generator=chance, dtype=torch.float64)
                    optimizer.zero_grad()
                    (model.w * gradient).sum().backward()
                    moved -= 0.1 * gradient
                    optimizer.step()
                bytes_sent = run.stats["bytes_sent"] / max(run.stats["exchanges"], 1)
            return model.w.detach().clone(), moved, bytes_sent

        ends = simulate(
            work, cluster=Cluster(compute="50ms"), ranks=4, topology=Topology.grid(4, 1)
        ).results
        learned = sum(moved for _, moved, _ in ends) / 4
        for final, _, _ in ends:
            torch.testing.assert_close(final, learned, rtol=0, atol=1e-12)
        sent[codec] = sum(count for _, _, count in ends)
    # parameters of float64 travel in two bytes instead of eight
    assert 0.2 < sent["bf16"] / sent["none"] < 0.35
