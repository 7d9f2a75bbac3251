"""The ranks of a node, for what works inside it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from loosestep.core.world import open_world
from loosestep.topology import Topology


def node_mesh(
    device_type: str = "cpu",
    *,
    topology: Topology | None = None,
    deadline: float = 60.0,
    timeout: float = 600.0,
) -> DeviceMesh:
    """The ranks of this node as a device mesh of one axis, "node"; every rank calls it within
    `deadline` seconds.

    `timeout`: seconds that DDP or `fully_shard` in the node waits for a rank that lives but does
    not come. `fully_shard(model, mesh=loosestep.node_mesh("cuda"))`, or for DDP the group of the
    same ranks: `DistributedDataParallel(model,
    process_group=loosestep.node_mesh("cuda").get_group())`.
    """
    if device_type != "cpu" and not dist.is_initialized():
        raise RuntimeError(
            f"a mesh of {device_type} needs torch.distributed with a backend for it; call "
            "torch.distributed.init_process_group('cpu:gloo,cuda:nccl') first"
        )
    nodes = open_world(topology, deadline=deadline).topology.nodes
    group, _ = dist.new_subgroups_by_enumeration(
        [list(node) for node in nodes], timeout=timedelta(seconds=timeout)
    )
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("node",))
