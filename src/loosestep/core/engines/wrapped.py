"""Who averages gradients inside a node: loosestep, torch's DistributedDataParallel, or whatever
shards the model.

A model that is wrapped or sharded over exactly the ranks of its node is taken as it is, and
loosestep only connects the nodes. One that is wrapped over anything else is refused: it would tie
the nodes together on every step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from loosestep.core.replica.shards import is_dtensor, mesh_ranks, pieces, sharding_modules
from loosestep.strategies import Strategy
from loosestep.topology import Topology

# nobody but us, DDP over the node, DTensors over the node, pipeline stages over the node
Inside = Literal["plain", "ddp", "shards", "stages"]
HOW = {
    "plain": "plain",
    "ddp": "wrapped in DistributedDataParallel",
    "shards": "sharded",
    "stages": "cut into pipeline stages",
}
# each rank of a node holds another part of the model
CUT: tuple[Inside, ...] = ("shards", "stages")


def look_inside(model: nn.Module, mates: Sequence[int]) -> Inside:
    """What the ranks of this node, `mates`, do among themselves; raises for what cannot be
    connected.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(
        isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules()
    ):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel, whose flat parameters cannot be "
            "exchanged; shard it with torch.distributed.fsdp.fully_shard(model, "
            "mesh=loosestep.node_mesh())"
        )
    wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    spread = {name: param for name, param in model.named_parameters() if is_dtensor(param)}
    if wrappers and spread:
        raise ValueError(
            "the model has both DistributedDataParallel and DTensor parameters "
            f"({next(iter(spread))}); use one mesh of two axes inside the node with fully_shard "
            "instead"
        )
    if wrappers:
        _check_ddp(model, wrappers, mates)
        return "ddp"
    if spread:
        _check_shards(model, spread, mates)
        return "shards"
    return "plain"


def check_fit(inside: Inside, strategy: Strategy, topology: Topology, mates: Sequence[int]) -> None:
    """Whether a strategy can connect nodes that are wrapped or sharded."""
    if inside == "plain" or len(mates) == 1:
        return
    how = HOW[inside]
    if strategy.learner == "rank":
        raise ValueError(
            f"the model is {how} over the ranks of its node, so a node is one learner, but "
            f"{strategy} takes every rank for one; use replica='node', or DASO"
        )
    if strategy.parts_nodes:
        raise ValueError(
            f"the model is {how} over the ranks of its node, which step together; local_period "
            f"must be 1, got {strategy}"
        )
    if inside in CUT and len(set(topology.weights)) > 1:
        raise ValueError(
            f"the model is {how} inside nodes of {', '.join(map(str, topology.weights))} ranks, "
            "so the parts of one node do not fit those of another; start the same number of "
            "ranks on every node"
        )
    if inside == "stages" and strategy.spans_world and len(topology.nodes) > 1:
        raise ValueError(
            f"{strategy} averages gradients across nodes at the end of a backward, which a "
            "pipeline makes once a microbatch; average parameters instead: "
            "DASO(ramp='parameters'), or LocalSGD(period=1) in the place of AllReduce"
        )


def averages_gradients(inside: Inside, strategy: Strategy, topology: Topology) -> bool:
    """Whether loosestep has to average gradients in backward: inside nodes if nobody else does,
    or across nodes.
    """
    if inside == "plain":
        return strategy.averages_gradients and topology.world > 1
    return strategy.spans_world and len(topology.nodes) > 1


def check_gossip(model: nn.Module, mates: Sequence[int]) -> None:
    """Gossip on shards: a parameter has one owner inside the node, or everybody holds all of it."""
    for name, param in model.named_parameters():
        if is_dtensor(param) and 1 < pieces(param) < len(mates):
            raise ValueError(
                f"parameter {name} is sharded over a part of the node and copied over the rest; "
                "gossip would let the copies drift apart. Shard it over all ranks of the node, "
                "or use DASO"
            )


def check_spread(optimizers: Sequence[Optimizer], strategy: Strategy, mates: Sequence[int]) -> None:
    """Whether an optimizer whose state is spread over ranks, which broadcasts the parameters that
    each of them has updated, stays inside one learner.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    for optimizer in optimizers:
        if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
            continue
        group = sorted(dist.get_process_group_ranks(optimizer.process_group))
        if strategy.learner == "world" or (strategy.learner == "node" and group == list(mates)):
            continue
        raise ValueError(
            f"ZeroRedundancyOptimizer spreads its state over ranks {some(group)} and gives them "
            f"all the same parameters after every step, but {strategy} lets "
            + (
                "each rank learn on its own; use a plain optimizer or replica='node'"
                if strategy.learner == "rank"
                else f"the nodes learn on their own; give it the ranks of the node ({some(mates)}): "
                "process_group=loosestep.node_mesh().get_group()"
            )
        )


@contextmanager
def hold_sync(model: nn.Module) -> Iterator[None]:
    """Backward without communication inside the node, for accumulating gradients."""
    with ExitStack() as stack:
        for part in model.modules():
            if isinstance(part, DistributedDataParallel):
                stack.enter_context(part.no_sync())
        for part in sharding_modules(model):
            part.set_requires_gradient_sync(False, recurse=False)
            stack.callback(part.set_requires_gradient_sync, True, recurse=False)
        yield


def _check_ddp(
    model: nn.Module, wrappers: Sequence[DistributedDataParallel], mates: Sequence[int]
) -> None:
    for wrapper in wrappers:
        group = sorted(dist.get_process_group_ranks(wrapper.process_group))
        if group != list(mates):
            raise ValueError(
                f"the model is wrapped in DistributedDataParallel over ranks {some(group)}, "
                "which averages gradients among all of them on every step; the ranks of this "
                f"node are {some(mates)}. Attach the plain module (loosestep averages inside the "
                "node itself), or give DistributedDataParallel the node's group: "
                f"process_group=loosestep.node_mesh().get_group(){_hints()}"
            )
    covered = {
        id(p)
        for w in wrappers
        for name, p in w.module.named_parameters()
        if name not in w.parameters_to_ignore
    }
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in covered:
            raise ValueError(
                f"parameter {name} trains outside of DistributedDataParallel, so nobody would "
                "average its gradients inside the node; wrap the whole model, or nothing of it"
            )


def _check_shards(model: nn.Module, spread: dict[str, nn.Parameter], mates: Sequence[int]) -> None:
    for name, param in spread.items():
        ranks = mesh_ranks(param)
        if not set(ranks) <= set(mates):
            raise ValueError(
                f"parameter {name} is a DTensor over ranks {some(ranks)}, which are not all on "
                f"this node ({some(mates)}), so every step would wait for other nodes; shard it "
                "over the node: mesh=loosestep.node_mesh(), or the inner axes of a mesh whose "
                "first axis is the nodes"
            )
    name, widest = max(spread.items(), key=lambda item: len(mesh_ranks(item[1])))
    # one axis of a mesh may be smaller, the whole mesh may not
    if mesh_ranks(widest) != list(mates):
        raise ValueError(
            f"no parameter is a DTensor over all ranks of the node ({some(mates)}), {name} is "
            f"over ranks {some(mesh_ranks(widest))}, and nobody averages between them; use a "
            "mesh of all ranks of the node, or pass topology= with the ranks of one mesh as one "
            "node"
        )
    covered = {id(param) for part in sharding_modules(model) for param in part.parameters()}
    for name, param in model.named_parameters():
        averaged = name in spread and (id(param) in covered or mesh_ranks(param) == list(mates))
        if covered and param.requires_grad and not averaged:
            raise ValueError(
                f"parameter {name} trains outside of fully_shard, so nobody would average its "
                "gradients inside the node; call fully_shard on the whole model too"
            )
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer) and pieces(buffer) > 1:
            raise ValueError(
                f"buffer {name} is sharded, which cannot be averaged; keep buffers whole on every "
                "rank"
            )


def _hints() -> str:
    """How to keep the trainers that are loaded from wrapping the model."""
    known = {
        "lightning": "Lightning: Trainer(strategy=loosestep.integrations.lightning.LoosestepStrategy(...))",
        "accelerate": "Accelerate: accelerator.prepare_model(model, evaluation_mode=True) places the model "
        "without wrapping it",
    }
    return "".join(f". {hint}" for library, hint in known.items() if library in sys.modules)


def some(ranks: Sequence[int]) -> str:
    """Ranks as text: 0, 1, 2 or 0-7."""
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
