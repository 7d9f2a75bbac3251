"""Models that are wrapped or sharded inside their node: DDP, FSDP2, tensor parallel. Two nodes
of two ranks.
"""

import pytest
import torch
from composed import GRID, SQUARE, UNEVEN, Net, batch, build, mesh, train, whole
from pool import errors, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loosestep
from loosestep import Topology


def trajectory(
    rank: int,
    inside: str,
    spec: str,
    steps: int = 12,
    adam: bool = False,
    width: int = 5,
    topology: Topology = GRID,
    device: str = "cpu",
):
    seed = topology.node_of(rank)  # all start as node 0
    model = build(inside, seed=seed, width=width, topology=topology, device=device)
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.05, **({} if adam else {"momentum": 0.9}))
    seen = []
    with loosestep.attach(model, optimizer, spec, topology=topology, deadline=20) as run:
        start = whole(model)
        for step in range(steps):
            train(model, optimizer, rank, step, inside, device)
            seen.append(whole(model))
            if step == steps // 2:
                with run.consensus():
                    inside_consensus = whole(model)
                    with torch.no_grad():
                        # fully_shard keeps what it gathered for this
                        model(batch(rank, step, inside, device))
        stats = run.stats
    return {
        "start": start,
        "seen": seen,
        "consensus": inside_consensus,
        "end": whole(model),
        "stats": stats,
    }


RAMPED = "daso:period=2,delay=1,warmup=3,cooldown=4,total=12"
LOCKSTEP = "adpsgd:replica=node,lockstep=true"
CASES = [
    ("fsdp", "daso:period=3,delay=1", False),
    ("fsdp", RAMPED, True),
    ("fsdp", "daso-paper:period=4", False),
    ("fsdp", "allreduce", False),
    ("fsdp", LOCKSTEP, False),
    ("offload", RAMPED, True),
    ("ddp", "daso:period=3,delay=1", False),
    ("ddp", RAMPED, True),
    ("ddp", LOCKSTEP, False),
    ("tensor", RAMPED, True),  # torch itself cannot cut 5 columns in two here
    ("tensor", LOCKSTEP, False),
    ("grid", RAMPED, True),
    ("grid", LOCKSTEP, False),
]
PLAIN: dict[tuple[str, bool, int], list[dict]] = {}


def plain(spec: str, adam: bool, width: int) -> list[dict]:
    key = spec, adam, width
    if key not in PLAIN:
        PLAIN[key] = ranks(4, trajectory, inside="plain", spec=spec, adam=adam, width=width)
    return PLAIN[key]


@pytest.mark.parametrize(("inside", "spec", "adam"), CASES)
def test_a_wrapped_model_takes_the_same_way_as_the_plain_one(inside, spec, adam):
    width = 6 if inside in ("tensor", "grid") else 5
    results = ranks(4, trajectory, inside=inside, spec=spec, adam=adam, width=width)
    same_way(results, plain(spec, adam, width), spec)


def test_ddp_inside_nodes_of_different_sizes_takes_the_same_way_as_the_plain_model():
    both = [
        ranks(4, trajectory, inside=inside, spec=RAMPED, topology=UNEVEN)
        for inside in ("ddp", "plain")
    ]
    same_way(*both, RAMPED)


def test_data_and_tensor_parallel_axes_inside_the_node_take_the_same_way_as_the_plain_model():
    """Two nodes of a 2 x 2 mesh: every parameter of the first two layers is cut both ways."""
    both = [
        ranks(8, trajectory, inside=inside, spec=RAMPED, width=8, topology=SQUARE)
        for inside in ("grid", "plain")
    ]
    same_way(*both, RAMPED)


def same_way(results: list[dict], expected: list[dict], spec: str) -> None:
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one["start"], expected[0]["start"], rtol=0, atol=0)
        for step, (a, b) in enumerate(zip(one["seen"], other["seen"], strict=True)):
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-5, msg=lambda text, s=step: f"step {s}: {text}"
            )
        if spec != LOCKSTEP:  # gossip streams what its peers have by then
            torch.testing.assert_close(one["consensus"], other["consensus"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one["end"], expected[0]["end"], rtol=1e-4, atol=1e-5)
        assert one["stats"]["exchanges"] == other["stats"]["exchanges"]
        assert one["stats"]["steps"] == 12


def raises(rank: int) -> None:
    """Rank 2 raises after a step and lives on; its mate then waits for it inside DDP."""
    model = DistributedDataParallel(
        Net(), process_group=loosestep.node_mesh(topology=GRID, timeout=2).get_group()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loosestep.attach(model, optimizer, "daso:period=1", topology=GRID, deadline=60):
        for step in range(1000):
            if rank == 2 and step == 1:
                raise KeyError("of rank 2")
            train(model, optimizer, rank, step, "ddp")


def test_the_mate_of_a_rank_that_raised_waits_as_long_as_the_mesh_of_their_node_says():
    first, second, guilty, mate = errors(4, raises)
    assert guilty == "KeyError: 'of rank 2'"
    for other_node in (first, second):
        assert "rank 2 left the run: KeyError" in other_node
    assert "timed out" in mate.lower()


# What cannot be connected is refused, on every rank, with what to do ------------------------------


def refused(rank: int, case: str):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model = Net()
    strategy = "daso"
    topology = GRID
    if case == "ddp over the world":
        model = DistributedDataParallel(model)
    elif case == "ddp of a part":
        model.first = DistributedDataParallel(model.first, process_group=mesh().get_group())
    elif case == "fsdp over the world":
        fully_shard(model)
    elif case == "fsdp of a part":
        fully_shard(model.first, mesh=mesh())
    elif case == "tensor parallel beside fsdp":  # one node of 2 x 2
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        topology = Topology([[0, 1, 2, 3]])
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        parallelize_module(
            model, square["columns"], {"first": ColwiseParallel(), "second": ColwiseParallel()}
        )
        for part in (model.first, model.out):
            fully_shard(part, mesh=square["rows"])
    elif case == "part of the node":
        topology = Topology([[0, 1, 2, 3]])
        fully_shard(model, mesh=mesh())
    elif case == "uneven nodes":
        topology = Topology([[0], [1, 2, 3]])
        fully_shard(model, mesh=loosestep.node_mesh(topology=topology))
    elif case == "ranks":
        fully_shard(model, mesh=mesh())
        strategy = "adpsgd"
    elif case == "local period":
        model = build("ddp")
        strategy = "localsgd:replica=node,local_period=2"
    elif case == "another sharding":
        place = (lambda param: Shard(param.dim() - 1)) if rank > 1 else (lambda param: Shard(0))
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh(), shard_placement_fn=place)
    elif case == "one node sharded" and rank > 1:
        fully_shard(model, mesh=mesh())
    elif case == "gossip of copies":
        model = build("grid", width=8)
        strategy = "adpsgd:replica=node"
        topology = SQUARE
    elif case == "flat parameters":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(
            nn.Linear(3, 2), process_group=mesh().get_group(), device_id=torch.device("cpu")
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loosestep.attach(model, optimizer, strategy, topology=topology, deadline=10)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "ddp over the world",
            "over ranks 0-3, which averages gradients among all of them on every step",
        ),
        ("ddp of a part", "parameter second.weight trains outside of DistributedDataParallel"),
        ("fsdp over the world", "is a DTensor over ranks 0-3, which are not all on this node"),
        ("fsdp of a part", "parameter second.weight trains outside of fully_shard"),
        ("tensor parallel beside fsdp", "parameter second.weight trains outside of fully_shard"),
        (
            "part of the node",
            "no parameter is a DTensor over all ranks of the node (0-3), frozen is over ranks",
        ),
        ("uneven nodes", "sharded inside nodes of 1, 3 ranks"),
        (
            "ranks",
            "so a node is one learner, but adpsgd takes every rank for one; use replica='node', "
            "or DASO",
        ),
        ("local period", "local_period must be 1, got localsgd:local_period=2,replica=node"),
        ("another sharding", "Shard(dim=1) over (2,) ranks, at (0,): (4, 2)' on rank 2 and"),
        ("one node sharded", "the model of rank 2 is sharded, that of rank 0 plain"),
        (
            "flat parameters",
            "shard it with torch.distributed.fsdp.fully_shard(model, mesh=loosestep.node_mesh())",
        ),
    ],
)
def test_what_cannot_be_connected_is_refused_on_every_rank(case, message):
    for seen in errors(4, refused, case=case):
        assert message in seen


def test_gossip_of_shards_that_have_copies_in_their_node_is_refused():
    for seen in errors(8, refused, case="gossip of copies"):
        assert (
            "is sharded over a part of the node and copied over the rest; gossip would let the "
            "copies drift" in seen
        )
