"""Models on one device that are wrapped or sharded inside their node: two nodes of two ranks, or
of one for NCCL.
"""

from typing import Any

import pytest
import torch
from composed import MESHES, batch, whole
from device import needs_cuda, no_synchronisation
from pool import ranks
from test_compositions import LOCKSTEP, RAMPED, same_way, trajectory
from test_precision import low, scaled, skips
from test_shards import train_gossip
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import loosestep
from loosestep import Topology

pytestmark = [needs_cuda, pytest.mark.timeout(120)]


PAIR = Topology([[0], [1]])


def shard(rank: int) -> DeviceMesh:
    """This rank's node of one, with NCCL, which puts no two ranks on one device; gloo cannot
    gather there.
    """
    name = f"{PAIR} on cuda"
    if name not in MESHES:
        groups = [dist.new_group([one], backend="nccl") for one in range(2)]
        MESHES[name] = DeviceMesh.from_group(groups[rank], "cuda", mesh_dim_names=("node",))
    return MESHES[name]


def sharded(rank: int, work: str, **arguments: Any) -> Any:
    shard(rank)
    return {"trajectory": trajectory, "low": low, "scaled": scaled}[work](
        rank, topology=PAIR, device="cuda", **arguments
    )


@pytest.mark.parametrize("spec", [RAMPED, LOCKSTEP])
@pytest.mark.parametrize("inside", ["ddp", "offload"])
def test_a_wrapped_model_takes_the_same_way_as_the_plain_one(inside, spec):
    adam = spec == RAMPED
    results = ranks(4, trajectory, inside=inside, spec=spec, adam=adam, device="cuda")
    same_way(
        results, ranks(4, trajectory, inside="plain", spec=spec, adam=adam, device="cuda"), spec
    )


@pytest.mark.parametrize("spec", [RAMPED, LOCKSTEP])
@pytest.mark.parametrize("inside", ["fsdp", "offload"])
def test_a_sharded_model_takes_the_same_way_as_the_plain_one(inside, spec):
    adam = spec == RAMPED
    results, plain = (
        ranks(2, sharded, work="trajectory", inside=way, spec=spec, adam=adam)
        for way in (inside, "plain")
    )
    same_way(results, plain, spec)


def test_nodes_that_gossip_learn_and_end_identical():
    results = ranks(4, train_gossip, inside="ddp", spec="adpsgd:replica=node", device="cuda")
    for losses, end, _, _ in results:
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert torch.equal(end, results[0][1])


@pytest.mark.parametrize(
    ("inside", "form"),
    [
        ("fsdp", "autocast"),
        ("fsdp, computing in bfloat16", "master weights"),
        ("plain", "bfloat16"),
    ],
)
def test_low_precision_learns_and_ends_identical(inside, form):
    results = ranks(2, sharded, work="low", inside=inside, form=form)
    for losses, end in results:
        assert torch.equal(end, results[0][1])
        assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize(
    ("spec", "skipping"),
    [
        ("daso:period=2", (2, 3)),
        ("allreduce", (0, 1, 2, 3)),
        ("adpsgd", (2,)),
        ("adpsgd:replica=node", (2, 3)),
    ],
)
def test_an_inf_on_one_node_skips_the_step_of_that_learner_only(spec, skipping):
    skips(ranks(4, scaled, inside="plain", spec=spec, device="cuda"), skipping)


@pytest.mark.parametrize("spec", ["daso:period=2", "adpsgd:replica=node"])
def test_an_inf_in_the_shards_of_one_node_skips_the_step_of_that_node_only(spec):
    skips(ranks(2, sharded, work="scaled", inside="fsdp", spec=spec, unlucky=1), (1,))


def learn_alone_in_a_node(rank: int, spec: str, offload: bool):
    """Each rank is a node, its model sharded over itself by NCCL: what only fully_shard does
    waits for nobody.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = shard(rank)
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    )
    model = model if offload else model.cuda()
    for part in (model[2], model):
        fully_shard(
            part, mesh=mesh, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy()
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = [batch(rank, step, "fsdp", "cuda") for step in range(80)]
    losses = []

    def learn(some: list[torch.Tensor]) -> None:
        for x in some:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    with loosestep.attach(model, optimizer, spec, topology=PAIR, deadline=20) as run:
        learn(batches[:20])
        if offload:  # fully_shard itself waits for what it moves
            learn(batches[20:])
        else:
            with no_synchronisation():
                learn(batches[20:])
        stats = run.stats
    return torch.stack(losses).tolist(), stats["folds"], whole(model)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("spec", ["daso:period=4,delay=2", "adpsgd:replica=node"])
def test_a_sharded_model_is_never_made_to_wait_for_its_exchanges(spec, offload):
    results = ranks(2, learn_alone_in_a_node, spec=spec, offload=offload)
    for losses, folds, end in results:
        assert folds > 0
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
        assert torch.equal(end, results[0][2])


def learn_on_a_small_device(rank: int, spec: str):
    """A share of the device that cannot hold the model: it lives on the host, one whole copy per
    node.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    # 269 MB of parameters
    size = 2048
    depth = 16
    mesh = shard(rank)
    share = 208 << 20
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(depth)))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        share / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total, dtype=torch.uint8, device="cuda")
        for part in (*model, model):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
        x = torch.randn(64, size, generator=torch.Generator().manual_seed(rank)).cuda()
        losses = []
        torch.cuda.reset_peak_memory_stats()
        with loosestep.attach(model, optimizer, spec, topology=PAIR, deadline=30) as run:
            while len(losses) < 16 or (not run.stats["exchanges"] and len(losses) < 800):
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            exchanges = run.stats["exchanges"]
        peak = torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return losses, exchanges, peak / total, whole(model)[:: 1 << 8].clone()


@pytest.mark.parametrize("spec", ["daso:period=4,delay=2", "adpsgd:replica=node"])
def test_a_model_larger_than_the_device_trains_with_offload(spec):
    results = ranks(2, learn_on_a_small_device, spec=spec)
    for losses, exchanges, peak, end in results:
        assert exchanges > 0
        assert peak < 0.5  # of the parameters: two layers and their gradients, nothing of ours
        assert losses[-1] < losses[0]
        assert torch.equal(end, results[0][3])
