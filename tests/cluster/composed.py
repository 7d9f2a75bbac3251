"""Models that are wrapped or sharded inside their node, two nodes of two ranks, for tests."""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import loosestep
from loosestep import Topology

GRID = Topology([[0, 1], [2, 3]])
SQUARE = Topology([[0, 1, 2, 3], [4, 5, 6, 7]])
UNEVEN = Topology([[0], [1, 2, 3]])
MESHES: dict[str, DeviceMesh] = {}  # of this process: making groups takes time


def mesh(topology: Topology = GRID, device: str = "cpu") -> DeviceMesh:
    name = f"{topology} on {device}"
    if name not in MESHES:
        MESHES[name] = loosestep.node_mesh(device, topology=topology)
    return MESHES[name]


def grid() -> DeviceMesh:
    """Two axes inside the node: data parallel (of one rank with 2 nodes of 2, of two with 2 of
    4) and tensor parallel.
    """
    if "grid" not in MESHES:
        rows = dist.get_world_size() // 4
        MESHES["grid"] = init_device_mesh(
            "cpu", (2, rows, 2), mesh_dim_names=("nodes", "rows", "columns")
        )
    return MESHES["grid"]


class Net(nn.Module):
    """5 rows over 2 ranks are 3 and 2; one row leaves a rank with nothing."""

    def __init__(self, *, width: int = 5, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 4)
        self.out = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.out(torch.relu(self.second(torch.relu(self.norm(self.first(x * self.frozen))))))


def build(
    inside: str,
    *,
    seed: int = 0,
    width: int = 5,
    norm: bool = False,
    topology: Topology = GRID,
    device: str = "cpu",
) -> nn.Module:
    torch.manual_seed(seed)
    model = Net(width=width, norm=norm)
    if inside != "offload":  # whose parameters stay on the host
        model = model.to(device)
    if inside == "ddp":
        return DistributedDataParallel(model, process_group=mesh(topology, device).get_group())
    if inside in ("fsdp", "offload", "fsdp, computing in bfloat16"):
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        offload = (
            CPUOffloadPolicy(pin_memory=device != "cpu") if inside == "offload" else OffloadPolicy()
        )
        low = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if "bfloat16" in inside
            else MixedPrecisionPolicy()
        )
        for part in (model.first, model):
            fully_shard(part, mesh=mesh(topology, device), offload_policy=offload, mp_policy=low)
    if inside in ("tensor", "grid"):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        columns = mesh() if inside == "tensor" else grid()["columns"]
        parallelize_module(
            model, columns, {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
        if inside == "grid":
            fully_shard(model, mesh=grid()["rows"])
    return model


def whole(model: nn.Module) -> torch.Tensor:
    """All trainable parameters, gathered on the host."""
    from loosestep.core.replica.shards import is_dtensor

    params = [p.detach() for p in model.parameters() if p.requires_grad]
    return torch.cat([(p.full_tensor() if is_dtensor(p) else p).flatten() for p in params]).cpu()


def batch(rank: int, step: int, inside: str, device: str = "cpu") -> torch.Tensor:
    """Each rank its own data; under tensor parallelism a node has one stream, of both its ranks'
    data.
    """
    if inside in ("tensor", "grid"):
        head = rank // 2 * 2
        return torch.cat([batch(r, step, "", device) for r in (head, head + 1)])
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)


def train(model, optimizer, rank, step, inside, device="cpu"):
    optimizer.zero_grad()
    (model(batch(rank, step, inside, device)) - 1).square().mean().backward()
    optimizer.step()
