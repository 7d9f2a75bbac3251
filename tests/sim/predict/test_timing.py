"""Clocks against arithmetic: cases small enough to work out by hand, on a machine whose own work
costs nothing.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep import ADPSGD, DASO, DelayByOne, LocalSGD, Topology
from loosestep.core.contracts import Scope
from loosestep.core.gossip.budget import AIM
from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.lockstep import TimedExchange
from loosestep.sim.predict.machine import Machine
from loosestep.sim.predict.timing import predict
from loosestep.strategies import strategy
from loosestep.strategies.base import State

IDEAL = Machine(copy=1e18, operation=0, message=0, meeting=0, payload=1, step=0, gossip=0)
PAIR = Topology.grid(2, 1)
MEGABYTE = 1_000_000  # takes 0.1 s on a link of 80 Mbit/s


def cluster(bandwidth: str = "80mbit", **changes: Any) -> Cluster:
    return Cluster(
        **{"bandwidth": bandwidth, "latency": "0us", "node_latency": "0us", "compute": "100ms"}
        | changes
    )


def seconds_per_step(
    text: str, *, parameters: int | list[int], topology: Topology = PAIR, **changes: Any
) -> float:
    where = cluster(**changes)
    return predict(
        text, topology, where, parameters=parameters, steps=400, machine=IDEAL
    ).seconds_per_step


# What a step takes --------------------------------------------------------------------------------


def test_an_exchange_that_fits_behind_a_step_costs_nothing() -> None:
    assert seconds_per_step("delay-by-one:replica=rank", parameters=MEGABYTE // 2) == pytest.approx(
        0.1
    )
    assert seconds_per_step("daso:period=4,delay=1", parameters=MEGABYTE) == pytest.approx(0.1)


@pytest.mark.parametrize(("codec", "share"), [("bf16", 0.5), ("int8", 0.25)])
@pytest.mark.parametrize("text", ["delay-by-one:replica=rank,", "allreduce:"])
def test_codes_are_a_part_of_the_bytes(text: str, codec: str, share: float) -> None:
    whole, coded = (
        predict(
            f"{text}codec={name}", PAIR, cluster(), parameters=9 * MEGABYTE, steps=9, machine=IDEAL
        )
        for name in ("none", codec)
    )
    assert coded.bytes_per_gradient == pytest.approx(share * whole.bytes_per_gradient, rel=0.01)
    assert coded.seconds_per_step < 0.75 * whole.seconds_per_step


def test_a_step_takes_as_long_as_its_bytes_when_they_do_not_fit() -> None:
    assert seconds_per_step("delay-by-one:replica=rank", parameters=3 * MEGABYTE) == pytest.approx(
        0.3, rel=0.01
    )


def test_what_does_not_fit_is_waited_for_once_a_period() -> None:
    four = 4 * 0.1 + (0.5 - 0.1)  # five megabytes, one step of them hidden
    assert seconds_per_step("daso:period=4,delay=1", parameters=5 * MEGABYTE) == pytest.approx(
        four / 4, rel=0.01
    )
    four = 4 * 0.1 + (0.5 - 0.4)
    assert seconds_per_step("daso:period=4,delay=4", parameters=5 * MEGABYTE) == pytest.approx(
        four / 4, rel=0.01
    )


def test_gradients_that_are_there_early_are_hidden_behind_backward() -> None:
    # forward 0.1 s, backward 0.2 s: a bucket of three tensors is sent from 0.25 to 0.55 s, the last
    # tensor from 0.55 to 0.65 s
    assert seconds_per_step(
        "allreduce", parameters=[MEGABYTE] * 4, compute="300ms"
    ) == pytest.approx(0.65)
    assert seconds_per_step(
        "allreduce", parameters=[4 * MEGABYTE], compute="300ms"
    ) == pytest.approx(0.7)


@pytest.mark.parametrize("replica", ["rank", "node"])
def test_the_uplink_of_a_node_carries_one_vector_whoever_is_a_replica(replica: str) -> None:
    # every lane carries its half, of the node or of the sum of its ranks, once each way
    lanes = 0.1
    text = f"localsgd:period=1,replica={replica}"
    grid = Topology.grid(2, 2)
    assert seconds_per_step(
        text, parameters=MEGABYTE, topology=grid, node_bandwidth="9999gbit"
    ) == pytest.approx(0.1 + lanes, rel=1e-3)


@pytest.mark.parametrize(("nodes", "factor"), [(2, 1.0), (4, 2.0)])
def test_more_than_two_members_reach_less_of_the_link(nodes: int, factor: float) -> None:
    cluster = Cluster(bandwidth="8mbit", latency="0s", compute="1us")
    half = dataclasses.replace(IDEAL, crowd=0.5)
    ideal, crowded = (
        predict(
            "localsgd:period=1,replica=rank",
            Topology.grid(nodes, 1),
            cluster,
            parameters=[4000],
            steps=10,
            machine=machine,
        )
        for machine in (IDEAL, half)
    )
    assert crowded.seconds == pytest.approx(factor * ideal.seconds, rel=0.01)


def test_a_backbone_is_shared_by_all_nodes() -> None:
    free = seconds_per_step(
        "localsgd:period=1,replica=rank", parameters=MEGABYTE, topology=Topology.grid(4, 1)
    )
    shared = seconds_per_step(
        "localsgd:period=1,replica=rank",
        parameters=MEGABYTE,
        topology=Topology.grid(4, 1),
        backbone="80mbit",
    )
    assert free - 0.1 == pytest.approx(2 * 0.75 * 0.1)
    assert shared - 0.1 == pytest.approx(4 * (free - 0.1))


def test_latency_counts_for_every_hop_of_the_rings() -> None:
    quick, late = (
        seconds_per_step(
            "localsgd:period=1,replica=rank",
            parameters=4,
            topology=Topology.grid(5, 1),
            latency=latency,
        )
        for latency in ("0us", "10ms")
    )
    # a sum around the ring and back, on which headers ride
    assert late - quick == pytest.approx((4 + 4) * 0.01)


@dataclass(frozen=True, kw_only=True)
class Both(LocalSGD):
    """Averages gradients of the world while an exchange is in flight, as none of ours does."""

    def scope(self, state: State) -> Scope:
        return "world"


def test_gradients_and_an_exchange_share_the_link() -> None:
    prediction = predict(
        Both(period=1, delay=1), PAIR, cluster(), parameters=[2 * MEGABYTE], steps=40, machine=IDEAL
    )  # fmt: skip
    # 4 MB a step and nothing else counts
    assert prediction.seconds_per_step == pytest.approx(0.4, rel=0.05)


def test_two_flows_on_a_link_delay_each_other_by_the_shorter_one() -> None:
    flight = TimedExchange(step=0, lands=1.0, wire=0.8, losses=(0.0, 0))
    assert flight.contend(0.5, 0.2) == 0.2  # from 0.5 to 0.9 s both get half
    assert flight.lands == pytest.approx(1.2)
    assert flight.contend(1.1, 5.0) == pytest.approx(0.1)
    assert flight.contend(9.0, 5.0) == 0.0


def test_the_work_of_a_processor_counts_and_more_so_when_ranks_share_one() -> None:
    def step(cores: float) -> float:
        slow = Machine(copy=1e8, operation=0, message=0, meeting=0, payload=1, step=0, cores=cores)
        return predict(
            "localsgd:period=1,replica=rank",
            PAIR,
            cluster(),
            parameters=MEGABYTE,
            steps=8,
            machine=slow,
        ).seconds_per_step

    work = step(1.0) - 0.2
    assert work > 0.02  # a snapshot and a fold are two passes at least
    assert step(0.5) - 0.2 == pytest.approx(2 * work)


# Stragglers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "allreduce",
        "localsgd:period=4,replica=rank",
        "daso",
        "delay-by-one:replica=rank",
        "adpsgd:lockstep=True",
    ],
)
def test_one_rank_at_half_speed_halves_the_speed_of_all(text: str) -> None:
    equal, halved = (seconds_per_step(text, parameters=1000, slow=slow) for slow in ({}, {1: 2.0}))
    assert halved == pytest.approx(2 * equal, rel=0.01)


def test_gossip_loses_nothing_but_the_slow_learner_itself() -> None:
    prediction = predict(
        "adpsgd", Topology.grid(8, 1), cluster(slow={3: 10}), parameters=1000, machine=IDEAL
    )
    assert prediction.gradients_per_second == pytest.approx(7 * 10 + 1, rel=0.01)
    assert prediction.efficiency == pytest.approx(1.0, rel=0.01)
    assert prediction.waiting.max() == 0


def test_the_waiting_is_that_of_the_fast_ranks() -> None:
    prediction = predict(
        "allreduce", PAIR, cluster(slow={1: 2.0}), parameters=1000, steps=40, machine=IDEAL
    )
    assert prediction.waiting == pytest.approx([0.5, 0.0], abs=0.01)


def test_a_node_waits_for_its_slow_rank_and_the_other_learners_do_not() -> None:
    where = cluster(slow={3: 10}, node_bandwidth="9999gbit")
    prediction = predict(
        "adpsgd:replica=node", Topology.grid(4, 2), where, parameters=1000, machine=IDEAL
    )
    assert prediction.gradients_per_second == pytest.approx(2 * (3 * 10 + 1), rel=0.01)
    assert prediction.waiting[2] == pytest.approx(0.9, abs=0.01)
    assert prediction.waiting[[0, 1, 3, 4]] == pytest.approx(0, abs=0.01)


# Gossip in the background -------------------------------------------------------------------------


def gossip(
    strategy_: ADPSGD, *, parameters: int = 10 * MEGABYTE, nodes: int = 8, **changes: Any
) -> Any:
    machine = changes.pop("machine", IDEAL)
    return predict(
        strategy_,
        Topology.grid(nodes, 1),
        cluster(**changes),
        parameters=parameters,
        steps=200,
        machine=machine,
    )


def test_a_step_of_gossip_never_waits_however_slow_the_link() -> None:
    assert gossip(ADPSGD(), bandwidth="1mbit").seconds_per_step == pytest.approx(0.1)


def test_the_link_limits_how_many_exchanges_there_are() -> None:
    plenty = gossip(ADPSGD(graph="random-ring"), bandwidth="100gbit")
    assert plenty.exchanges == pytest.approx(8 * 200, rel=0.01)
    # a model takes a second each way, and an exchange has two ends
    scarce = gossip(ADPSGD(graph="random-ring"))
    # what links can carry, and what is still in the air at the end
    assert scarce.exchanges <= 8 * 20 / 2 + 8 * 7
    assert scarce.exchanges >= 8 * 20 / 2


def test_the_rate_and_the_processor_limit_how_many_exchanges_there_are() -> None:
    assert gossip(ADPSGD(rate=0.25), parameters=1000).exchanges == pytest.approx(
        8 * 200 / 4, rel=0.02
    )
    busy = Machine(copy=1e18, operation=0, message=0, meeting=0, payload=1, step=0, gossip=1e-8)
    # every exchange costs either side 2 MB * 1e-8 s/B, and a part of 10 % of the time may be spent
    # on it
    paced = gossip(ADPSGD(slowdown=0.1), parameters=MEGABYTE, bandwidth="100gbit", machine=busy)
    assert paced.exchanges == pytest.approx(8 * 20 * AIM * 0.1 / (2 * 0.02), rel=0.1)


def test_bounded_staleness_waits_for_the_link() -> None:
    free, bounded = (
        gossip(ADPSGD(max_staleness=age), parameters=5 * MEGABYTE) for age in (None, 1)
    )
    assert free.seconds_per_step == pytest.approx(0.1)
    assert bounded.seconds_per_step >= 0.5
    assert bounded.waiting.mean() > 0.5


# What is counted ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "exchanges"),
    [
        ("daso:period=4", 10),
        ("localsgd:period=8,replica=rank", 5),
        ("delay-by-one:replica=rank", 40),
        ("allreduce", 0),
        ("daso:warmup=20", 5),
    ],
)
def test_the_strategy_itself_decides_when_to_exchange(text: str, exchanges: int) -> None:
    assert predict(text, PAIR, cluster(), parameters=1000, steps=40).exchanges == exchanges


def test_a_plateau_of_the_losses_shortens_the_period() -> None:
    daso = DASO(period=4, window=5, patience=1)
    falling = [0.5**step for step in range(200)]
    calm = predict(daso, PAIR, cluster(), parameters=1000, steps=200, losses=falling)
    stuck = predict(daso, PAIR, cluster(), parameters=1000, steps=200, losses=lambda step: 1.0)
    assert calm.exchanges == 50
    assert stuck.exchanges > 1.5 * calm.exchanges


def test_bytes_are_those_that_leave_nodes() -> None:
    grid = Topology.grid(2, 2)
    synchronous = predict("allreduce", grid, cluster(), parameters=MEGABYTE, steps=10)
    assert synchronous.bytes_per_gradient == pytest.approx(2 * MEGABYTE / 4)
    assert predict(
        "daso:period=5", grid, cluster(), parameters=MEGABYTE, steps=10
    ).bytes_per_gradient == pytest.approx(2 * MEGABYTE / 4 / 5)
    assert (
        predict(
            "allreduce", Topology.grid(1, 4), cluster(), parameters=MEGABYTE, steps=10
        ).bytes_per_gradient
        == 0
    )


@pytest.mark.parametrize(
    "text",
    [
        "allreduce",
        "localsgd:replica=rank",
        "localsgd:replica=node,local_period=2,period=2",
        "localsgd:start=3,delay=2,replica=rank",
        "daso:warmup=3,cooldown=3,total=20,epoch=5",
        "daso-paper:warmup=3,cooldown=3,total=20",
        "delay-by-one:replica=node",
        "delay-by-one:older_gradient=True,replica=rank",
        "adpsgd:graph=pairs",
        "adpsgd:graph=exponential,replica=node",
        "adpsgd:lockstep=True,graph=random-ring",
    ],
)
@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid(1, 1),
        Topology.grid(3, 2),
        Topology([[0, 1, 2], [3]]),
        Topology([[0, 3], [1, 2]]),
    ],
)
def test_every_strategy_runs_on_every_topology_and_no_faster_than_its_ranks(
    text: str, topology: Topology
) -> None:
    prediction = predict(text, topology, cluster(jitter=0.1), parameters=MEGABYTE, steps=20)
    assert 0 < prediction.efficiency < 1.05  # gossip ends in the middle of a step
    assert ((prediction.waiting >= 0) & (prediction.waiting < 1)).all()
    assert len(prediction.waiting) == topology.world


# Seeds and order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["daso", "adpsgd:graph=pairs"])
def test_the_same_seed_gives_the_same_clocks(text: str) -> None:
    def run(seed: int) -> tuple[float, list[float]]:
        where = cluster(jitter=0.2, seed=seed)
        prediction = predict(text, Topology.grid(3, 2), where, parameters=MEGABYTE, steps=50)
        return prediction.seconds, prediction.waiting.tolist()

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]


STRATEGIES = [
    "allreduce",
    "localsgd:period=3,replica=rank",
    "daso",
    "delay-by-one:replica=node",
    "adpsgd:max_staleness=2",
    "adpsgd",
]


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from(STRATEGIES),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 3),
    rates=st.tuples(st.integers(1, 10_000), st.integers(1, 10_000)),
    size=st.integers(1, 50_000_000),
    slow=st.floats(1.0, 5.0),
)
def test_a_faster_link_is_never_slower(
    text: str, nodes: int, ranks: int, rates: tuple[int, int], size: int, slow: float
) -> None:
    slower, faster = (
        predict(
            text,
            Topology.grid(nodes, ranks),
            cluster(f"{rate}mbit", slow={0: slow}),
            parameters=size,
            steps=24,
        )
        for rate in sorted(rates)
    )
    # Gossip uses a faster link for more exchanges, whose work may take a tenth of the time.
    room = 1.1 if text.startswith("adpsgd") else 1 + 1e-9
    assert faster.seconds_per_step <= slower.seconds_per_step * room


def test_thousands_of_ranks_take_seconds() -> None:
    begun = time.process_time()
    for text in ("daso", "adpsgd:graph=random-ring"):
        prediction = predict(
            text, Topology.grid(1024, 4), cluster("100gbit"), parameters=100 * MEGABYTE, steps=200
        )
        assert prediction.ranks == 4096
    assert time.process_time() - begun < 24  # a fifth of a minute each


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": True}, "steps must be a whole number"),
        ({"parameters": 0}, "parameters must be the bytes of the model"),
        ({"parameters": []}, "parameters must be the bytes of the model"),
        ({"parameters": [10, -1]}, "parameters must be the bytes of the model"),
        ({"losses": [1.0]}, "losses has 1 entries for 8 steps"),
        ({"strategy": "dado"}, "did you mean 'daso'"),
        (
            {"strategy": "adpsgd:lockstep=True,replica=node"},
            "lockstep=True is for tests with replica='rank'",
        ),
        ({"strategy": ADPSGD(graph={0: [1], 1: [0], 2: [1]})}, "names ranks [2]"),
        ({"cluster": cluster(slow={5: 2})}, "slow names rank 5"),
        ({"cluster": cluster(failures={1: "1s"})}, "no failures and no joins"),
        ({"cluster": cluster(compute="0ms")}, "every rank must compute for some time"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"parameters": 1000, "steps": 8, "losses": None} | changes
    chosen = arguments.pop("strategy", "daso")
    where = arguments.pop("cluster", cluster())
    with pytest.raises(ValueError) as caught:
        predict(chosen, PAIR, where, **arguments)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Machine(copy=0), "copy must be a number above 0, got 0"),
        (lambda: Machine(message=-1), "message must be a number at least 0, got -1"),
        (lambda: Machine(step=float("nan")), "step must be a number"),
        (lambda: Machine(payload=1.1), "payload is a share"),
        (lambda: Machine(crowd=1.1), "crowd is a share"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(make: Callable[[], Machine], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_names_and_objects_mean_the_same() -> None:
    named = predict("delay-by-one:replica=rank", PAIR, cluster(), parameters=MEGABYTE, steps=20)
    built = predict(DelayByOne(), PAIR, cluster(), parameters=MEGABYTE, steps=20)
    assert named.seconds == built.seconds
    assert named.strategy == str(strategy("delay-by-one:replica=rank"))
    assert np.array_equal(named.waiting, built.waiting)
