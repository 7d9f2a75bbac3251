"""gloo in the place of NCCL, so that what stays on a device can be tested without several GPUs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from loosestep.core.collectives.nccl import NearChannel


def gloo(store: dist.Store, index: int, size: int) -> Any:
    return ProcessGroupGloo(store, index, size, timedelta(seconds=30))


@contextmanager
def near(rank: int, *, gpus: str = "own", **environment: str) -> Iterator[Counter[str]]:
    """Inside, this rank takes its device for a GPU that NCCL reaches: one of its "own", or one that
    all "share"; or "none".

    What is counted: bytes that went from device to device "inside" the node and "between" nodes,
    greetings aside.
    """
    identity = {"own": f"gpu {rank}", "share": "the only gpu", "none": None}[gpus]
    traffic: Counter[str] = Counter()

    def count(channel: NearChannel, tensor: torch.Tensor, times: float, *, between: int) -> None:
        if tensor.numel() > 1:
            traffic["between" if between else "inside"] += int(
                times * tensor.numel() * tensor.element_size()
            )

    def count_sum(channel: NearChannel, values: torch.Tensor) -> None:
        # a ring: all but one of its parts go round twice
        parts = 2 * (channel.size - 1) / channel.size
        count(channel, values, parts, between=channel._right_is_stranger)

    with (
        patch("loosestep.attachment.find_gpu", lambda device: identity),
        patch("loosestep.core.collectives.nccl.open_group", gloo),
        patch.object(NearChannel, "_count", count),
        patch.object(NearChannel, "_count_sum", count_sum),
        patch.dict(os.environ, environment),
    ):
        yield traffic
