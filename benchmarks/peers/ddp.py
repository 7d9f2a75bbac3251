"""torch DistributedDataParallel, plain or with one of its communication hooks."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from peers.base import Trainer, Work

ONE_BUCKET = 1024
"""MB. PowerSGD's callbacks wait for further all-reduces inside gloo's two threads: with two
buckets both wait for ever.
"""


def prepare(model: nn.Module, work: Work, *, hook: str | None = None) -> Trainer:
    """PowerSGD begins at the second iteration (the default of 1,000 would hide it) and keeps its
    error feedback.
    """
    optimizer = work.make_optimizer(model.parameters())
    if hook == "powersgd":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Trainer(wrapped, optimizer, work)
    wrapped = DistributedDataParallel(model)
    if hook == "bf16":
        wrapped.register_comm_hook(None, bf16)
    return Trainer(wrapped, optimizer, work)


def bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and wants no strings
    """torch's hook under another name: by its own, DDP refuses it without NCCL, although gloo
    can do it.
    """
    return default_hooks.bf16_compress_hook(state, bucket)
