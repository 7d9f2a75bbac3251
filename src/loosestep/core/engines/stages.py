"""A model that is cut into pipeline stages over the ranks of a node, a stage a rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import distributed as dist
from torch import nn

from loosestep.core.engines.wrapped import Inside, look_inside, some


def stage_in(model: object) -> Any | None:
    """The `PipelineStage` that was given in the place of a model. Importing torch's pipelining
    takes long, so nothing here does: where nobody has, there is no stage.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return model if module is not None and isinstance(model, module._PipelineStageBase) else None


def describe_stage(stage: Any) -> str:
    """What must be the same on the same local rank of every node."""
    return f"stage {stage.stage_index} of {stage.num_stages}"


def check_stage(stage: Any, model: nn.Module, mates: Sequence[int]) -> Inside:
    """Whether the ranks of this node, `mates`, are one pipeline, each with a stage."""
    group = sorted(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
    if group != list(mates):
        raise ValueError(
            f"the pipeline runs over ranks {some(group)}; the ranks of this node are {some(mates)}. "
            "Every node is a pipeline of its own: "
            "PipelineStage(..., group=loosestep.node_mesh().get_group())"
        )
    if stage.num_stages != len(mates):
        raise ValueError(
            f"the pipeline has {stage.num_stages} stages on a node of {len(mates)} ranks; cut the "
            "model into as many stages as the node has ranks"
        )
    within = look_inside(model, mates)
    if within != "plain":
        raise ValueError(
            f"{describe_stage(stage)} is itself spread over the ranks of the node ({within}), which "
            "are the other stages; leave it plain"
        )
    return "stages"
