"""torch's PostLocalSGD optimizer with its periodic or hierarchical model averager.

As documented: DDP with the post-local hook averages gradients inside a node (from the first step
here), the optimizer averages the parameters of all ranks every `period` steps. With `node_period`
the hierarchical averager does both: inside the node every `node_period`.
"""

from __future__ import annotations

import os
from collections import OrderedDict

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from peers.base import Trainer, Work

START = 1


def prepare(
    model: nn.Module, work: Work, *, period: int, node_period: int | None = None
) -> Trainer:
    node = int(os.environ["LOCAL_WORLD_SIZE"])
    world = dist.get_world_size()
    optimizer = work.make_optimizer(model.parameters())
    wrapped = DistributedDataParallel(model)
    if node_period is None or node in (1, world):
        averager = PeriodicModelAverager(period=period, warmup_steps=START)
    else:
        sizes = OrderedDict([(node_period, node), (period, world)])
        averager = HierarchicalModelAverager(period_group_size_dict=sizes, warmup_steps=START)
    own_gradients = node_period is not None or node == world
    subgroup, _ = dist.new_subgroups(group_size=1 if own_gradients else node)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=START)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    return Trainer(wrapped, PostLocalSGDOptimizer(optim=optimizer, averager=averager), work)
