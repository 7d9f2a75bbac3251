"""The gossip engine: a mailbox averages shadows in the background, the step boundary folds them in.

A learner is a rank, or a node whose ranks average gradients among themselves: then local rank k owns shard k of the
model, gossips about it with local rank k of the other nodes, and the shards are gathered inside the node at the step
boundary. Of a model that is sharded already each rank gossips about what it holds, and nothing is gathered. A rank of another node that dies costs its own edges only; a rank of the same node ends its node.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from loosestep.comm.base import Invitation, Kind, Offer, Parcel, Vector
from loosestep.comm.collective import Collective
from loosestep.comm.courier import Pending
from loosestep.comm.mailbox import Mailbox
from loosestep.comm.pace import FOLDING, Pace
from loosestep.comm.replayed import ReplayedMailbox
from loosestep.comm.world import World
from loosestep.exchanges import align
from loosestep.gradients import GradientAverager
from loosestep.learner import Learner
from loosestep.replica import Replica
from loosestep.shards import is_dtensor, local, pieces, reshard, sharding_modules
from loosestep.strategies.adpsgd import ADPSGD
from loosestep.trace.player import Player
from loosestep.trace.recorder import Recorder

log = logging.getLogger("loosestep")


class GossipEngine:
    """Drives ADPSGD; is its `Gossiping`."""

    averager: GradientAverager | None = None

    def __init__(
        self, learner: Learner, strategy: ADPSGD, *, world: World, neighbours: int, key: str | None, encrypt: bool
    ) -> None:
        self._learner, self._strategy, self._world, self.trace = learner, strategy, world, learner.trace
        self._extras = [*learner.replica.floating]
        if strategy.average_momentum:
            self._extras += momentum(learner)
        self._variances = variances(learner.model)
        self._begun: list[tuple[int, int, Pending]] = []
        cores = len(os.sched_getaffinity(0)) / neighbours if hasattr(os, "sched_getaffinity") else 1.0
        if not learner.replica.staging.remote:
            cores = min(1.0, cores)  # the others compute
        self._pace = Pace(strategy.rate, share=strategy.cpu_share, cores=cores)
        self._fold_share = FOLDING * strategy.cpu_share * cores
        self._open_mailbox(key, encrypt)
        learners = len(self._members)
        self._graph = strategy.graph(learners)
        if self._graph.note():
            log.info(self._graph.note())

    # Who I am ---------------------------------------------------------------------------------------------------------

    def _open_mailbox(self, key: str | None, encrypt: bool) -> None:
        """Every rank is a learner: all of the model in one mailbox."""
        world = self._world
        self._members = list(range(world.topology.world))
        self._me = world.rank
        comm = Collective(world, world.topology.flat(), trace=self.trace, averages_gradients=False)
        align(self._learner, comm)
        self._mailbox: Mailbox | ReplayedMailbox | None = self._make_mailbox(
            self._tensors(), self._members, key, encrypt
        )
        comm.census(0)  # all mailboxes are open
        comm.close()

    def _make_mailbox(
        self, tensors: Vector, members: list[int], key: str | None, encrypt: bool
    ) -> Mailbox | ReplayedMailbox:
        tape = self._learner.tape
        if isinstance(tape, Player):
            return ReplayedMailbox(tape, world=members, params=tensors)
        return self._world.mailbox(
            members,
            params=tensors,
            layout=bytes.fromhex(self._learner.replica.digest()),
            key=key,
            encrypt=encrypt,
            emit=self._event,
            tape=tape if isinstance(tape, Recorder) else None,
            fold_share=self._fold_share,
        )

    def _tensors(self) -> Vector:
        return [*(local(p).data for p in self._learner.replica.params), *self._extras]

    # The strategy's side (`Gossiping`) --------------------------------------------------------------------------------

    def fold(self) -> None:
        """y <- y + u; x <- y"""
        self._land(force=False)

    def _land(self, *, force: bool, stepped: bool = True) -> None:
        floors = self._floors()
        self._cross(self._tensors(), force=force, stepped=stepped)
        self._keep_positive(floors)

    def _cross(self, tensors: Vector, *, force: bool, stepped: bool) -> None:
        """y <- y + u; x <- y, after a step or (completely) in the middle of one."""
        assert self._mailbox is not None
        if stepped:
            fold = self._mailbox.boundary(tensors, force=force, within=self._strategy.max_staleness)
        else:
            fold = self._mailbox.settle(tensors)
        if not fold.skipped and fold.chunks:
            self.trace.emit(
                "fold",
                staleness=fold.staleness_mean,
                staleness_max=fold.staleness_max,
                step=self._learner.state["step"],
                seconds=fold.seconds,
            )

    def due(self) -> int:
        """How many exchanges to begin now."""
        if self._mailbox is None:
            return 0
        return self._learner.tape.number(self._pace.due(self.trace.clock(), self._mailbox.cpu_seconds()))

    def exchange(self, round_number: int) -> None:
        """Begin to average with the partner of this round; never waits."""
        assert self._mailbox is not None
        partner = self._graph.partner(self._me, round_number, self._alive())
        if partner is None:
            return
        peer, weight = partner
        self.trace.emit("start", exchange=round_number, step=self._learner.state["step"], peer=self._members[peer])
        pending = self._mailbox.exchange(self._members[peer], weight)
        if self._strategy.max_staleness is not None:
            self._begun.append((self._learner.state["step"], self._members[peer], pending))

    def mix(self, round_number: int) -> None:
        """One round of exactly the mixing matrix, from exactly the values of this step."""
        self._land(force=True)
        row = self._graph.round(self._me, round_number, self._alive()) if self._mailbox is not None else {}
        start = self.trace.clock()
        if row and self._mailbox is not None:
            self.trace.emit("start", exchange=round_number, step=self._learner.state["step"])
            weights = {self._members[peer]: weight for peer, weight in row.items()}
            self._mailbox.lockstep_round(round_number, weights, timeout=self._world.deadline)
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="lockstep")
        self._land(force=True, stepped=False)

    def wait_for(self, age: int) -> None:
        """Wait for own exchanges that were begun `age` or more steps ago, as long as their peer is there."""
        if self._mailbox is None:
            return
        start, step = self.trace.clock(), self._learner.state["step"]
        for begun, peer, pending in self._begun:
            while step - begun >= age and peer in self._mailbox.alive() and not pending.wait(0.05):
                if self.trace.clock() - start > self._world.deadline:
                    break
        self._begun = [exchange for exchange in self._begun if not exchange[-1].done()]
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="staleness")

    # The run's side (`Engine`) ----------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """An optimizer step was made."""
        self._strategy.boundary(self._learner.state, self)

    def enter_consensus(self) -> Callable[[], None]:
        """The mean of the live learners, streamed without stopping them."""
        assert self._mailbox is not None
        mean = torch.from_numpy(self._mailbox.consensus(timeout=self._world.deadline))
        tensors = self._tensors()
        stash = [tensor.clone() for tensor in tensors]
        _write(tensors, mean)
        return lambda: torch._foreach_copy_(tensors, stash)

    def finish(self) -> None:
        """Answer until every live learner is done, then hold the same parameters as all of them."""
        assert self._mailbox is not None
        start = self.trace.clock()
        self._mailbox.finish(self._tensors())
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="finish")
        self._end()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Leave the gossip; the others go on."""
        self.trace.emit("abort", reason=reason)
        self._end()

    def _end(self) -> None:
        """Keep the last figures, let go of the mailbox."""
        if self._mailbox is not None:
            self._last = self.stats(), self.global_steps()
            self._mailbox.close()
            self._mailbox = None

    _last: tuple[dict[str, Any], int] | None = None

    def global_steps(self) -> int:
        """Gradients of all learners, as last heard from each."""
        if self._mailbox is None:
            return self._last[1] if self._last else int(self._learner.state["step"]) * self._world.topology.world
        return self._mailbox.global_steps

    def stats(self) -> dict[str, Any]:
        """What the mailbox counts."""
        mailbox = self._mailbox
        if mailbox is None:
            return self._last[0] if self._last else {}
        counters = mailbox.counters
        strangers = [rank for rank in self._members if self._world.topology.node_of(rank) != self._node]
        return {
            "exchanges": counters["exchanges"],
            "bytes_sent": counters["bytes_sent"],
            "bytes_between_nodes": counters["bytes_sent"] * len(strangers) // max(1, len(self._members) - 1),
            "consensus_distance": mailbox.consensus_distance * self._size**0.5,
            "rate": self._pace.current,
            "learners": len(mailbox.alive()) + 1,
            "lost": sorted(mailbox.dead()),
            "communication_cpu_seconds": mailbox.cpu_seconds(),
            "fold_seconds": counters["fold_seconds"],
            "rejected": counters["rejected"],
        }

    @property
    def _node(self) -> int:
        return self._world.topology.node_of(self._world.rank)

    @property
    def _size(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors())

    def advice(self) -> str | None:
        """Nothing to say so far."""
        return None

    def save(self) -> dict[str, Any]:
        """Gossip resumes from the parameters: what is in the air is not part of a checkpoint."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """The progress counter goes on; the shadow follows the parameters at the next boundary."""
        if self._mailbox is not None:
            self._mailbox.steps = self._learner.state["step"]

    # Inside -----------------------------------------------------------------------------------------------------------

    def _alive(self) -> set[int]:
        assert self._mailbox is not None
        alive = self._mailbox.alive()
        return {index for index, rank in enumerate(self._members) if rank in alive or index == self._me}

    def _floors(self) -> Vector:
        """A tenth of every variance."""
        return list(torch._foreach_mul(self._variances, 0.1)) if self._variances else []

    def _keep_positive(self, floors: Vector) -> None:
        """Variances stay positive: a late delta may pull one below zero."""
        for variance, floor in zip(self._variances, floors, strict=False):
            torch.where(variance < 0, floor, variance, out=variance)

    def _event(self, kind: str, **fields: Any) -> None:
        """Called by the mailbox's thread: log it, and tell the user once what concerns him."""
        self.trace.emit(kind, **fields)
        if kind == "peer_dead":
            log.warning("rank %s is gone (%s); the others go on without it", fields.get("peer"), fields.get("why"))
        elif kind in ("peer_no_progress", "frame_refused", "mailbox_failed"):
            log.warning("%s: %s", kind.replace("_", " "), ", ".join(f"{k}={v}" for k, v in fields.items()))


class NodeGossipEngine(GossipEngine):
    """The ranks of a node are one learner: synchronous inside, gossip outside, shard by shard."""

    def _open_mailbox(self, key: str | None, encrypt: bool) -> None:
        world, sharded = self._world, self._learner.replica.sharded
        units = world.topology if sharded else world.topology.flat()
        comm = Collective(world, units, trace=self.trace, averages_gradients=False, shards=sharded)
        align(self._learner, comm)
        self._me, index = self._node, world.topology.local_index(world.rank)
        self._shard, self._lanes = index, world.topology.lanes
        self._divide(sharded)
        size = sum(extra.numel() for extra in self._extras)
        self._extra = torch.zeros(max(-(-size // self._lanes), 1) * self._lanes)
        self._members = list(world.topology.lane(min(index, self._lanes - 1)))
        self._mailbox = None
        if index < self._lanes:
            self._mailbox = self._make_mailbox(self._pieces(self._vector()), self._members, key, encrypt)
        self._inner = world.inside_node()
        self._comm = Collective(
            self._inner, self._inner.topology, trace=self.trace, averages_gradients=True, lanes=self._lanes
        )
        self._comm.member = self
        if self._mates > 1 and self._learner.inside == "plain":
            self.averager = GradientAverager(
                self._learner.replica.params,
                self._comm,
                multiple=self._lanes,
                scope=lambda: "world",
                waited=lambda seconds: self.trace.emit("wait", seconds=seconds, reason="gradients"),
                worked=world.worked,
            )
        comm.census(0)
        comm.close()

    @property
    def _mates(self) -> int:
        return len(self._world.topology.mates(self._world.rank))

    def _is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether no other rank of the node holds this rank's part of a tensor."""
        return is_dtensor(tensor) and pieces(tensor) == self._mates

    def _divide(self, sharded: bool) -> None:
        """What this rank alone holds (`_owned`) and what all ranks of the node hold, which is split among them."""
        learner = self._learner
        self._owned = [tensor for tensor in (*learner.replica.params, *self._extras) if self._is_owned(tensor)]
        self._extras = [local(extra) for extra in self._extras if not self._is_owned(extra)]
        self._common = learner.replica
        if sharded:
            self._common = Replica(learner.model, multiple=self._lanes, keep=lambda param: not self._is_owned(param))
        self._splits = not self._owned or bool(self._common.params or self._extras)
        self._sharding = sharding_modules(learner.model)

    def _vector(self) -> Vector:
        """What all ranks of the node hold, as flat vectors, statistics and momentum last."""
        if self._extras:
            packed = torch.cat([extra.detach().reshape(-1).to("cpu", torch.float32) for extra in self._extras])
            self._extra[: packed.numel()] = packed
        return [*self._common.snapshot(), self._extra]

    def _pieces(self, vector: Vector) -> Vector:
        """What this rank gossips about: its shards, where they are, and its pieces of the vector."""
        reshard(self._sharding)
        return [*map(local, self._owned), *(flat.view(self._lanes, -1)[self._shard] for flat in vector)]

    def _share(self, vector: Vector) -> None:
        """Every rank's pieces of the vector, on every rank of the node."""
        if self._splits:
            self._comm.average(Offer(vector=vector, buffers=torch.empty(0), form="mean"))

    def _adopt(self, vector: Vector) -> None:
        self._common.assign(vector[:-1])
        if self._extras:
            _write(self._extras, vector[-1])

    def fold(self) -> None:
        """y <- y + u; x <- y for the own shard, then all shards of the node: shared at every step, so folded at every step."""
        if self._splits:
            self._comm.invite()
        self._land(force=self._splits)

    def mix(self, round_number: int) -> None:
        """One round of exactly the mixing matrix, for the own shard."""
        if self._splits:
            self._comm.invite()
        super().mix(round_number)

    def _land(self, *, force: bool, stepped: bool = True) -> None:
        floors = self._floors()
        vector = self._vector()
        if len(self._comm.present) < self._mates:  # somebody did not make this step: its shard comes from one who did
            leader = self._comm.present[0]
            vector = self._comm.broadcast_state({"vector": vector}, root=leader)["vector"]
        if self._mailbox is not None:
            self._cross(self._pieces(vector), force=force, stepped=stepped)
        start = self.trace.clock()
        self._share(vector)
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="node")
        self._adopt(vector)
        self._keep_positive(floors)

    def boundary(self) -> None:
        """An optimizer step was made."""
        if self._inner.pulse is not None:
            self._inner.pulse.check()
            self._inner.pulse.step = self._learner.state["step"] + 1
        self._comm.step = self._learner.state["step"] + 1
        super().boundary()

    def exchange(self, round_number: int) -> None:
        """Local ranks beyond the last lane have nobody to talk to."""
        if self._mailbox is not None:
            super().exchange(round_number)

    def enter_consensus(self) -> Callable[[], None]:
        """Each local rank fetches the mean of its shard, then they share them."""
        self._comm.meet(Kind.CONSENSUS)
        return self._swap_in()

    def _swap_in(self) -> Callable[[], None]:
        stash, held = [flat.clone() for flat in self._vector()], [local(tensor).clone() for tensor in self._owned]
        mean = [flat.clone() for flat in stash]
        if self._mailbox is not None:
            _write(self._pieces(mean), torch.from_numpy(self._mailbox.consensus(timeout=self._world.deadline)))
        self._share(mean)
        self._adopt(mean)

        def restore() -> None:
            self._adopt(stash)
            for tensor, old in zip(self._owned, held, strict=True):
                local(tensor).copy_(old)

        return restore

    def finish(self) -> None:
        """First the ranks of the node meet, then the nodes."""
        self._comm.meet(Kind.FINISH)
        self._take_the_newest()
        vector = self._vector()
        if self._mailbox is not None:
            self._mailbox.finish(self._pieces(vector))
        self._share(vector)
        self._adopt(vector)
        self._comm.close()
        self._end()

    def _take_the_newest(self) -> None:
        steps = [int(step) for (step,) in self._comm.census(self._learner.state["step"])]
        if len(set(steps)) > 1:
            newest = self._comm.broadcast_state({"vector": self._vector()}, root=steps.index(max(steps)))
            self._adopt(newest["vector"])

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tell the node's ranks, leave the gossip."""
        self._comm.abort(reason, culprit)
        super().abort(reason, culprit)

    def join(self, invitation: Invitation) -> None:
        """Take part in what the node's other ranks do while this one waits."""
        if invitation.kind is Kind.EXCHANGE:
            self._land(force=True)
        else:
            self._swap_in()()

    def blank_parcels(self) -> Iterable[Parcel]:
        """Zeros in the shape of the gradient buckets."""
        return self.averager.blank_parcels() if self.averager is not None else []

    def global_steps(self) -> int:
        """A step of a node is a gradient of each of its ranks."""
        if self._mailbox is None:
            return self._last[1] if self._last else int(self._learner.state["step"]) * self._world.topology.world
        return self._mailbox.global_steps * self._world.topology.world // len(self._world.topology.nodes)


def variances(model: nn.Module) -> Vector:
    """The running variances of batch norms. A mean may be negative, and which other statistics may not is not known here."""
    return [local(buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "running_var"]


def momentum(learner: Learner) -> list[torch.Tensor]:
    """The momentum of SGD, Adam or AdamW, made now if the optimizer has not made a step yet."""
    found: list[torch.Tensor] = []
    for optimizer in learner.optimizers:
        name = "momentum_buffer" if isinstance(optimizer, torch.optim.SGD) else "exp_avg"
        for group in optimizer.param_groups:
            usable = (
                group.get("momentum") and not group.get("dampening") if name == "momentum_buffer" else "betas" in group
            )
            if not usable:
                raise ValueError(
                    f"average_momentum needs SGD with momentum and without dampening, Adam or AdamW; got {type(optimizer).__name__}"
                )
            for param in (p for p in group["params"] if p.requires_grad):
                state = optimizer.state[param]
                if name == "exp_avg" and not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
                found.append(state[name])
    return found


def _write(tensors: Vector, flat: torch.Tensor) -> None:
    """Cut a flat vector into tensors."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
