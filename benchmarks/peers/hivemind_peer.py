"""hivemind: its Optimizer in the fully asynchronous mode, local updates with parameters averaged
in the background.
"""

from __future__ import annotations

import logging
import multiprocessing

import torch.distributed as dist
from torch import nn

from peers.base import Trainer, Work, own_address


def prepare(model: nn.Module, work: Work, *, period: int) -> Trainer:
    """An epoch, at whose end peers average, is `period` steps of every rank; matchmaking as
    short as a fast network allows.
    """
    multiprocessing.set_start_method("fork", force=True)
    import hivemind

    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    address = own_address()
    first = [] if rank == 0 else store.get("maddrs").decode().split()
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=first, start=True, use_ipfs=False
    )
    if rank == 0:
        store.set("maddrs", " ".join(str(maddr) for maddr in dht.get_visible_maddrs()))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        batch_size_per_step=work.batch,
        target_batch_size=work.batch * dist.get_world_size() * period,
        optimizer=work.make_optimizer(model.parameters()),
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=0.5,
        averaging_timeout=10.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
    )
    return Trainer(model, optimizer, work)
