"""What stays on the devices, with gloo standing in for NCCL on real processes: the same numbers
as over the host.
"""

import pytest
import test_gradients
import test_uneven
import torch
from composed import build, train, whole
from pool import errors, ranks
from stand_in import near
from torch import nn

import loosestep
from loosestep import Topology

NODES = Topology([[0, 1], [2, 3]])
INSIDE = {"spec": "allreduce", "topology": [[0, 1]]}


def gradients(rank: int, *, gpus: str = "own", ways=None, **arguments):
    with near(rank, gpus=gpus, **ways or {}) as traffic:
        return *test_gradients.train(rank, ddp=False, **arguments), traffic


def uneven(rank: int, *, ways=None, **arguments):
    with near(rank, **ways or {}) as traffic:
        return *test_uneven.uneven(rank, **arguments), traffic


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": True, "optimizer": "adam"},
        {"accumulate": 3},
        {"branches": True},
        {"spec": "daso"},
    ],
    ids=str,
)
def test_gradients_that_stay_on_the_device_have_the_bits_of_those_over_the_host(options):
    ours = ranks(2, gradients, **INSIDE | options)
    theirs = ranks(2, test_gradients.train, ddp=False, **INSIDE | options)
    for (end, never, traffic), (reference, _) in zip(ours, theirs, strict=True):
        assert torch.equal(end, reference)
        assert never == [None, None]  # a parameter that no rank uses
        assert traffic["inside"] > 6 * end.numel() * 4


@pytest.mark.parametrize(
    ("spec", "topology", "steps"),
    [
        ("allreduce", [[0, 1, 2, 3]], [8, 5, 2, 7]),
        ("daso:period=2", [[0, 1], [2, 3]], [8, 2, 5, 0]),
        ("daso:period=2,warmup=4", [[0, 1], [2, 3]], [5, 8, 8, 8]),
        ("daso:period=2", [[0, 1, 2], [3]], [8, 5, 7, 6]),
        ("localsgd:replica=node,local_period=2,period=2", [[0, 1], [2, 3]], [8, 8, 8, 5]),
    ],
)
def test_ranks_that_are_away_add_zeros_on_the_device(spec, topology, steps):
    ours = ranks(4, uneven, spec=spec, steps=steps, topology=topology)
    theirs = ranks(4, test_uneven.uneven, spec=spec, steps=steps, topology=topology)
    assert all(torch.equal(end, theirs[0][0]) for end, *_ in ours)
    # parameters are averaged over the host
    assert (ours[0][2]["inside"] > 0) == ("local_period" not in spec)


def buckets(rank: int):
    with near(rank):
        return test_gradients.buckets(rank)


def test_buckets_of_every_dtype_stay():
    (count, mine), (_, theirs) = ranks(2, buckets)
    assert count == 3
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    assert {gradient[0].item() for gradient in mine} == {0.75}


def gossip(rank: int):
    model, optimizer = test_uneven.build()
    with (
        near(rank) as traffic,
        loosestep.attach(model, optimizer, "adpsgd:replica=node", topology=NODES, deadline=10),
    ):
        for step in range(10 + rank):
            test_uneven.one_step(model, optimizer, rank, step)
    return test_uneven.flat(model), traffic


def test_gossiping_nodes_average_inside_on_the_devices():
    results = ranks(4, gossip)
    assert all(torch.equal(end, results[0][0]) for end, _ in results)
    assert all(traffic["inside"] > 0 for _, traffic in results)


@pytest.mark.parametrize(
    ("gpus", "ways"), [("share", {}), ("own", {"LOOSESTEP_GRADIENTS": "host"})], ids=str
)
def test_ranks_that_share_a_gpu_or_are_told_to_average_over_the_host(gpus, ways):
    theirs = ranks(2, test_gradients.train, ddp=False, **INSIDE)
    for end, _, traffic in ranks(2, gradients, gpus=gpus, ways=ways, **INSIDE):
        assert not traffic
        assert torch.equal(end, theirs[0][0])


LANES = {"LOOSESTEP_LANES": "nccl"}


@pytest.mark.parametrize(
    ("spec", "topology"),
    [
        ("daso:period=2,delay=1", [[0, 1], [2, 3]]),
        ("daso-paper:period=2,warmup=2", [[0, 1], [2, 3]]),
        ("daso:period=2", [[0, 1, 2], [3]]),
        ("localsgd:period=2,delay=1,replica=rank", [[0, 1], [2, 3]]),
        ("diloco:period=2,delay=1,replica=node", [[0, 1], [2, 3]]),
        ("delay-by-one:replica=rank", [[0], [1], [2], [3]]),
        ("daso:period=3,cooldown=4,total=8", [[0, 1], [2, 3]]),
    ],
)
def test_lanes_between_devices_are_those_between_hosts(spec, topology):
    steps = [8, 8, 7, 8]
    ours = ranks(4, uneven, ways=LANES, spec=spec, steps=steps, topology=topology)
    theirs = ranks(4, test_uneven.uneven, spec=spec, steps=steps, topology=topology)
    exact = len(topology) == 2  # more are added up in the ring's order over the host only
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for (end, stats, _), (reference, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(end, ours[0][0])
        torch.testing.assert_close(end, reference, **close)
        torch.testing.assert_close(
            stats["consensus_distance"], expected["consensus_distance"], **close
        )
    assert ours[0][2]["between"] > 0


def sharded(rank: int, inside: str, lanes: str):
    with near(rank, LOOSESTEP_LANES=lanes) as traffic:
        model = build(inside)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with loosestep.attach(
            model, optimizer, "daso:period=2,delay=1", topology=NODES, deadline=10
        ):
            for step in range(6):
                train(model, optimizer, rank, step, inside)
    return whole(model), traffic


@pytest.mark.parametrize("inside", ["fsdp", "ddp"])
def test_shards_are_exchanged_between_devices_and_nothing_else_is(inside):
    over_devices, over_hosts = (
        ranks(4, sharded, inside=inside, lanes=lanes) for lanes in ("nccl", "gloo")
    )
    for (end, traffic), (reference, nothing) in zip(over_devices, over_hosts, strict=True):
        assert torch.equal(end, reference)
        assert traffic["between"] > 0
        assert not nothing
        # copies are shared inside the node, shards have nobody to share with
        assert (traffic["inside"] > 0) == (inside == "ddp")


def attach(rank: int, spec: str = "daso", gpus: str = "own", ways=LANES):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways = {
        name: values if isinstance(values, str) else values[rank] for name, values in ways.items()
    }
    with near(rank, gpus=gpus, **ways):
        loosestep.attach(model, optimizer, spec, topology=Topology([[0], [1]]), deadline=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": "none"}, "the parameters are on cpu"),
        (
            {"gpus": "share"},
            "a GPU of its own for each of the ranks 0, 1, which have the only gpu, the only gpu",
        ),
        ({"spec": "adpsgd"}, "are made by the host"),
        ({"spec": "delay-by-one:older_gradient=true,replica=rank"}, "are made by the host"),
        ({"ways": {"LOOSESTEP_LANES": "rdma"}}, "LOOSESTEP_LANES must be gloo or nccl, got 'rdma'"),
        (
            {"ways": {"LOOSESTEP_LANES": ["gloo", "nccl"]}},
            "set these variables on all ranks or on none",
        ),
    ],
)
def test_lanes_that_cannot_be_on_the_devices_are_refused_on_every_rank(arguments, message):
    for said in errors(2, attach, **arguments):
        assert message in said
