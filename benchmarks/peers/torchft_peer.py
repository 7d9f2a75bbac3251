"""torchft: LocalSGD and DiLoCo with a manager per rank and a lighthouse on rank 0. Every rank is
a replica group of its own.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from peers.base import Trainer, Work, own_address, take_node_name

PATIENCE = timedelta(seconds=30)


def prepare(
    model: nn.Module, work: Work, *, period: int, outer: bool = False, delay: int = 0
) -> Trainer:
    """DiLoCo's outer optimizer has the settings of its paper and of torchft's example: SGD, 0.7,
    Nesterov momentum 0.9.

    With `delay` the averaging is under way during so many steps; half of what they did stays, as in
    the paper on streaming DiLoCo.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    logging.getLogger("torchft").setLevel(logging.ERROR)
    take_node_name()
    optimizer = work.make_optimizer(model.parameters())
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    world = dist.get_world_size()
    address = own_address()
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{address}:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=2000
        )
        port = lighthouse.address().rpartition(":")[2]
        store.set("lighthouse", f"http://{address}:{port}")
    own_store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=own_store.port,
        lighthouse_addr=store.get("lighthouse").decode(),
        replica_id=f"rank{rank}",
        hostname=address,
        init_sync=False,  # the same seed everywhere
    )
    if outer:
        outside = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        overlap = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5} if delay else {}
        context: Any = DiLoCo(
            manager,
            [model],
            optimizer,
            outside,
            sync_every=period,
            use_bucketization=True,
            **overlap,
        )
    else:
        context = LocalSGD(manager, model, optimizer, sync_every=period)
    context.__enter__()
    trainer = Trainer(model, optimizer, work)
    trainer.kept = (context, manager, own_store, lighthouse, world)  # type: ignore[attr-defined]  # alive as long as the trainer
    return trainer
