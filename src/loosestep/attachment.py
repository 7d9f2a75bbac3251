"""`attach()`: one line between a training loop and its peers."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from loosestep.core.collectives.collective import Collective
from loosestep.core.collectives.nccl import GRADIENTS, LANES, Reach, find_gpu, read_ways
from loosestep.core.engines.base import Engine
from loosestep.core.engines.collective import CollectiveEngine
from loosestep.core.engines.gossip import GossipEngine
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.node_gossip import NodeGroup
from loosestep.core.engines.rank_gossip import RankGroup
from loosestep.core.engines.stages import check_stage, describe_stage, stage_in
from loosestep.core.engines.wrapped import (
    CUT,
    HOW,
    Inside,
    averages_gradients,
    check_fit,
    check_gossip,
    check_spread,
    look_inside,
)
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.gossip.replayed_mailbox import ReplayedMailbox
from loosestep.core.plain_state import flatten
from loosestep.core.plain_torch import in_plain_torch
from loosestep.core.replica.replica import Replica, check_memory
from loosestep.core.world import World, open_world
from loosestep.record.format import Recording, RecordingError, rank_file
from loosestep.record.player import Player, require_same
from loosestep.record.recorder import NoTape, Recorder, Tape, make_header
from loosestep.record.source import DEFAULT_FOLDER, Replay, current_replay
from loosestep.run import Run
from loosestep.strategies import Strategy
from loosestep.strategies import strategy as read_strategy
from loosestep.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

log = logging.getLogger("loosestep")

_attached: WeakSet[nn.Module] = WeakSet()


@in_plain_torch
def attach(
    model: nn.Module | PipelineStage,
    optimizer: Optimizer | Iterable[Optimizer],
    strategy: Strategy | str,
    *,
    topology: Topology | None = None,
    deadline: float = 60.0,
    key: str | None = None,
    encrypt: bool = False,
    record: bool | str | os.PathLike[str] = False,
    hooks: bool = True,
) -> Run:
    """Connect a model and its optimizer(s) to their peers. The loop, the model and the optimizer
    stay as they are.

    Every rank calls it with the same model; all start from rank 0's parameters and buffers.
    `topology` says who is on which node (by default what started the processes knows). A model that
    is wrapped in DDP or sharded over exactly the ranks of its node is connected to the other nodes
    as it is; so is a PipelineStage, each rank of a node holding another (docs/pipeline.md).
    `deadline`: seconds without a heartbeat after which a rank is lost. `hooks=False`:
    call `run.step()` after `optimizer.step()` yourself, where hooks cannot run. `record`: True or a
    folder ("recording"): every rank writes down what it folded, so that `LOOSESTEP_REPLAY=folder`
    repeats the run bit for bit. `key` authenticates the messages of gossip (by default
    LOOSESTEP_KEY) and `encrypt=True` encrypts them; the first model, gradients inside a node, and
    everything of other strategies travel through torch.distributed, which does neither. On GPUs:
    docs/compositions.md says what travels over NCCL, and how `LOOSESTEP_GRADIENTS` and
    `LOOSESTEP_LANES` change it.
    """
    stage = stage_in(model)
    module = cast(nn.Module, model if stage is None else stage.submod)
    if deadline <= 0:
        raise ValueError(f"deadline must be positive seconds, got {deadline}")
    optimizers = (
        [optimizer]
        if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable)
        else [*optimizer]
    )
    world = open_world(topology, deadline=deadline, key=key)
    with ExitStack() as undo:
        undo.callback(world.close)
        folder = None if record is False else Path(DEFAULT_FOLDER if record is True else record)
        replay = current_replay()
        chosen, replica, inside, hosts = _prepare(
            world,
            module,
            optimizers,
            strategy,
            stage=stage,
            hooks=hooks,
            secret=encrypt or key is not None,
            record=folder,
            replay=replay,
        )
        undo.pop_all()
    world.start_pulse()
    try:
        tape, open_mailbox = _tape(world, chosen, replica, record=folder, replay=replay)
        learner = Learner(
            module, optimizers, chosen, replica, world.trace(), inside=inside, tape=tape
        )
        opens = partial(open_mailbox, key=key, encrypt=encrypt)
        engine = _engine(world, learner, hosts, open_mailbox=opens)
    except BaseException as error:
        if world.pulse is not None:
            world.pulse.fail(f"rank {world.rank} could not attach: {error}")
        raise
    _attached.add(module)
    note = chosen.note(world.topology.weights)
    if note is not None and world.rank == 0:
        log.warning(note)
    return Run(learner, engine, world=world, hooks=hooks, closed=lambda: _attached.discard(module))


def _engine(
    world: World, learner: Learner, hosts: list[str], *, open_mailbox: Callable[..., GossipMailbox]
) -> Engine:
    strategy = learner.strategy
    plan = strategy.gossip
    if plan is not None:
        group = NodeGroup if plan.replica == "node" else RankGroup
        return GossipEngine(
            learner,
            group(learner, world, plan),
            strategy=plan,
            world=world,
            neighbours=hosts.count(hosts[world.rank]),
            open_mailbox=open_mailbox,
        )
    comm = Collective(
        world,
        world.topology.flat() if strategy.learner == "rank" else world.topology,
        trace=learner.trace,
        averages_gradients=averages_gradients(learner.inside, strategy, world.topology),
        through=world.topology,
        shards=learner.replica.sharded,
        stages=learner.replica.pipeline_stage is not None,
    )
    return CollectiveEngine(learner, world=world, comm=comm)


def _prepare(
    world: World,
    model: nn.Module,
    optimizers: list[Optimizer],
    strategy: Strategy | str,
    *,
    stage: PipelineStage | None,
    hooks: bool,
    secret: bool,
    record: Path | None,
    replay: Replay | None,
) -> tuple[Strategy, Replica, Inside, list[str]]:
    """Check everything on every rank before anything is sent; a problem on one rank is raised on
    all of them.
    """
    problem: Exception | None = None
    report: dict[str, object] = {"problem": None, "host": socket.gethostname()}
    chosen = None
    replica = None
    inside = None
    try:
        asked = read_strategy(strategy)
        chosen = asked.fitted(world.topology.weights)
        if chosen != asked and world.rank == 0:
            log.info("%s on these nodes is %s: a %s is one learner", asked, chosen, chosen.learner)
        if secret and not chosen.gossip:
            raise ValueError(
                f"key= and encrypt= are for gossip; {chosen} sends through torch.distributed, "
                "which neither authenticates nor encrypts. Leave them out, and keep such runs on "
                "a network of their own"
            )
        inside = _check(world, model, optimizers, chosen, hooks=hooks, stage=stage)
        replica = Replica(
            model,
            multiple=_multiple(chosen, world.topology),
            stage=None if stage is None else describe_stage(stage),
        )
        bad = replica.find_bad()
        if bad is not None:
            raise ValueError(
                f"parameter {bad} contains NaN or Inf on rank {world.rank}; load a sane "
                "checkpoint before attaching"
            )
        _check_recording(world, chosen, replica, record=record, replay=replay)
        gpu = find_gpu(replica.staging.device)
        ways = read_ways()
        _check_ways(ways, chosen, replica, gpu)
        report |= {
            "strategy": str(chosen),
            "digest": replica.digest(),
            "inside": inside,
            "gpu": gpu,
            "ways": ways,
        }
        world.store.set(f"layout/{world.rank}", json.dumps(replica.layout()))
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
        report["problem"] = str(error)
    reports = world.agree(report)
    if problem is not None:
        raise problem
    assert chosen is not None
    assert replica is not None
    assert inside is not None
    for rank, other in enumerate(reports):
        if other["problem"] is not None:
            raise RuntimeError(f"rank {rank} could not attach: {other['problem']}")
    for rank, other in enumerate(reports):
        if other["strategy"] != reports[0]["strategy"]:
            raise ValueError(
                f"rank {rank} uses the strategy {other['strategy']}, rank 0 "
                f"{reports[0]['strategy']}; all ranks need the same"
            )
        if other["inside"] != reports[0]["inside"]:
            raise ValueError(
                f"the model of rank {rank} is {HOW[str(other['inside'])]}, that of rank 0 "
                f"{HOW[str(reports[0]['inside'])]}; wrap or shard it the same way on every node"
            )
        if other["ways"] != reports[0]["ways"]:
            raise ValueError(
                f"rank {rank} was started with {other['ways']}, rank 0 with {reports[0]['ways']}; "
                "set these variables on all ranks or on none"
            )
        first = world.topology.lane(world.topology.local_index(rank))[0] if inside in CUT else 0
        if other["digest"] != reports[first]["digest"]:
            raise ValueError(_difference(world, rank, first))
    world.reach = _find_reach(world, chosen, replica, inside, reports)
    return chosen, replica, inside, [str(other["host"]) for other in reports]


def _check_ways(
    ways: dict[str, str], strategy: Strategy, replica: Replica, gpu: str | None
) -> None:
    """Whether lanes can be what the environment asks for, as far as one rank can see."""
    if ways[LANES] != "nccl":
        return
    if strategy.needs_host:
        raise ValueError(
            f"{LANES}=nccl: the exchanges of {strategy} are made by the host; unset {LANES}"
        )
    if gpu is None:
        raise ValueError(
            f"{LANES}=nccl needs parameters on a CUDA device and a torch that was built with "
            f"NCCL; the parameters are on {replica.staging.device}, and NCCL is "
            f"{'there' if dist.is_nccl_available() else 'not there'}. Move the model before "
            f"attaching, or unset {LANES}"
        )


def _find_reach(
    world: World,
    strategy: Strategy,
    replica: Replica,
    inside: Inside,
    reports: list[dict[str, object]],
) -> Reach:
    """What stays on the devices: the same conclusion on every rank, drawn from the same reports."""
    gpus = tuple(None if other["gpu"] is None else str(other["gpu"]) for other in reports)
    ways = read_ways()
    reach = Reach(
        replica.staging.device,
        gpus,
        gradients=inside == "plain" and ways[GRADIENTS] == "auto",
        lanes=ways[LANES] == "nccl",
    )
    nodes = () if inside in CUT else world.topology.nodes
    lanes = range(world.topology.lanes)
    reach.check_lanes([*nodes, *map(world.topology.lane, lanes)])
    return reach


def _check_recording(
    world: World,
    strategy: Strategy,
    replica: Replica,
    *,
    record: Path | None,
    replay: Replay | None,
) -> None:
    """A new recording has a place of its own; one to be replayed is of this run."""
    if replay is not None:
        recording = Recording.read(replay.folder, world.rank)
        require_same(
            recording, nodes=_nodes(world), strategy=str(strategy), layout=replica.layout()
        )
    elif record is not None and not world.timed:
        raise RecordingError(
            "a simulation is a function of its seed, so there is nothing to record: leave record= "
            "out and simulate again"
        )
    elif record is not None and rank_file(record, world.rank).exists():
        raise RecordingError(
            f"{record} holds a recording of rank {world.rank} already; remove that folder, or "
            "record into another one"
        )


def _tape(
    world: World,
    strategy: Strategy,
    replica: Replica,
    *,
    record: Path | None,
    replay: Replay | None,
) -> tuple[Tape, Callable[..., GossipMailbox]]:
    """What the run tells its story to, and what opens its mailboxes."""
    if replay is not None:
        free = strategy.gossip is not None and strategy.learner == "rank"
        everybody = (
            range(world.topology.world) if not strategy.gossip else world.topology.mates(world.rank)
        )
        until = (
            replay.until.step
            if replay.until is not None and replay.until.rank == world.rank
            else None
        )
        recording = Recording.read(replay.folder, world.rank)
        player = Player(recording, world, together=() if free else everybody, until=until)
        return player, partial(ReplayedMailbox, player)
    if record is None:
        return NoTape(), world.mailbox
    header = make_header(
        rank=world.rank,
        nodes=_nodes(world),
        strategy=str(strategy),
        layout=replica.layout(),
    )
    return Recorder(record, world.rank, header), world.mailbox


def _nodes(world: World) -> list[list[int]]:
    return [list(node) for node in world.topology.nodes]


def _multiple(strategy: Strategy, topology: Topology) -> int:
    """What the flat vector's length must divide by."""
    if strategy.gossip:
        return topology.lanes if strategy.learner == "node" else 1
    return topology.multiple


def _check(
    world: World,
    model: nn.Module,
    optimizers: list[Optimizer],
    strategy: Strategy,
    *,
    hooks: bool,
    stage: PipelineStage | None,
) -> Inside:
    """What one rank can see by itself."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument must be a torch.nn.Module, got {type(model).__name__}")
    if model in _attached:
        raise RuntimeError(
            "this model is already attached; call run.finish() before attaching it again"
        )
    _check_optimizers(optimizers)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not any(p.numel() for p in trainable):
        raise ValueError(
            "the model has no parameters that require gradients, or only empty ones, so there is "
            "nothing to train or to average"
        )
    mates = world.topology.mates(world.rank)
    inside = look_inside(model, mates) if stage is None else check_stage(stage, model, mates)
    check_fit(inside, strategy, world.topology, mates)
    check_spread(optimizers, strategy, mates)
    check_memory(model)
    complex_ones = [
        name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()
    ]
    if complex_ones:
        raise ValueError(
            f"parameter {complex_ones[0]} is complex, which cannot be averaged here; keep its "
            "real and imaginary parts"
        )
    devices = sorted({str(p.device) for p in trainable})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            f"the model's parameters must be on one device of this rank, found {', '.join(devices)}"
        )
    ours = {id(p) for p in model.parameters()}
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    strangers = [p for p in held if id(p) not in ours]
    if strangers:
        raise ValueError(
            f"the optimizer holds {len(strangers)} of {len(held)} parameters that are not the "
            "model's (was the model moved or rebuilt after the optimizer was made?); build the "
            "optimizer from model.parameters()"
        )
    if strategy.gossip is not None:
        strategy.gossip.graph_of(
            len(world.topology.nodes) if strategy.learner == "node" else world.topology.world
        )
        check_gossip(model, mates)
    else:
        _check_groups(optimizers)
    lockstep = averages_gradients(inside, strategy, world.topology)
    if lockstep and any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
        raise ValueError(
            "LBFGS evaluates the model several times a step, which cannot be averaged by "
            f"{strategy}; use a strategy with replica='rank'"
        )
    if lockstep and not hooks:
        raise ValueError(
            f"{strategy} averages gradients in hooks; hooks=False needs a strategy with "
            "replica='rank'"
        )
    return inside


def _check_optimizers(optimizers: list[Optimizer]) -> None:
    """Torch optimizers, whose own hooks run."""
    kinds = [type(o).__name__ for o in optimizers]
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise TypeError(
            "the second argument must be a torch optimizer or several of them, got "
            f"{', '.join(kinds) or 'none'}"
        )
    if "AcceleratedOptimizer" in kinds:
        raise TypeError(
            "the optimizer was prepared by Accelerate, which wraps it: use "
            "loosestep.integrations.accelerate.attach, or attach before prepare"
        )


def _check_groups(optimizers: list[Optimizer]) -> None:
    """A rank that was away takes over what the groups hold, so that has to be plain."""
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                try:
                    flatten(None if name == "params" else value)
                except TypeError as error:
                    raise TypeError(
                        f"group {index} of {type(optimizer).__name__} holds {name}={value!r}, "
                        f"which cannot be sent to a rank that has to catch up: {error}; keep it "
                        "outside of the optimizer"
                    ) from error


def _difference(world: World, rank: int, first: int) -> str:
    """The first place where the model of `rank` differs from that of `first`."""
    theirs, ours = (json.loads(world.store.get(f"layout/{r}")) for r in (rank, first))
    advice = "build (and shard) the same model everywhere"
    for position, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        if a != b:
            return (
                f"the models differ between ranks: entry {position} is '{a}' on rank {rank} and "
                f"'{b}' on rank {first}; {advice}"
            )
    longer = max(theirs, ours, key=len)
    return (
        f"the models differ between ranks: {len(theirs)} tensors on rank {rank}, {len(ours)} on "
        f"rank {first}, the first beyond being '{longer[min(len(theirs), len(ours))]}'; {advice}"
    )
