"""The gossip engine of nodes: the ranks of a node average gradients among themselves and are one
learner.

Local rank k owns shard k of the model and gossips about it with local rank k of the other nodes;
the shards are gathered inside the node at the step boundary. Of a model that is sharded already
each rank gossips about what it holds, and nothing is gathered. A rank of another node that dies
costs its own edges only; a rank of the same node ends its node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch

from loosestep.core.collectives.collective import Collective
from loosestep.core.contracts import Invitation, Kind, Offer, Parcel, Vector
from loosestep.core.engines.collective import align
from loosestep.core.engines.gossip import GossipEngine, write
from loosestep.core.engines.gradients import GradientAverager, Plain
from loosestep.core.gossip.contract import Mode
from loosestep.core.gossip.shadow import Fold
from loosestep.core.pending import Pending
from loosestep.core.replica.replica import Replica, Snapshot
from loosestep.core.replica.shards import is_dtensor, local, pieces, reshard
from loosestep.core.world import simulated
from loosestep.record.recorder import NoTape


@dataclass(frozen=True)
class Crossed:
    """A crossing that is complete: what it did, the gradient count that local rank 0 had heard,
    processor time.
    """

    fold: Fold
    heard: int
    seconds: float


@dataclass(frozen=True)
class Crossing:
    """A boundary on its way through the host: the step and the parameters that it is of, which
    become what they lack.
    """

    step: int
    begun: float
    snapshot: Snapshot
    sent: Pending[Crossed]


class NodeGossipEngine(GossipEngine):
    """The ranks of a node are one learner: synchronous inside, gossip outside, shard by shard."""

    def _open_mailbox(self, key: str | None, encrypt: bool) -> None:
        world = self._world
        sharded = self._learner.replica.sharded
        units = world.topology if sharded else world.topology.flat()
        self._me = self._node
        self._shard = world.topology.local_index(world.rank)
        self._lanes = world.topology.lanes
        self._divide(sharded)
        size = sum(extra.numel() for extra in self._extras)
        wide = reduce(torch.promote_types, (extra.dtype for extra in self._extras), torch.float32)
        self._extra = torch.zeros(max(-(-size // self._lanes), 1) * self._lanes, dtype=wide)
        comm = Collective(world, units, trace=self.trace, averages_gradients=False, shards=sharded)
        with self._meeting(comm):
            align(self._learner, comm, world.topology)
            if self._shard < self._lanes:
                self._mailbox = self._make_mailbox(self._pieces(self._vector()), key, encrypt)
            self._meet_mates()

    def _lane(self) -> list[int]:
        """The ranks of this rank's local index, or of the last lane."""
        topology = self._world.topology
        return list(topology.lane(min(topology.local_index(self._world.rank), topology.lanes - 1)))

    def _meet_mates(self) -> None:
        """The ranks of this node, which average gradients and share what each has gossiped
        about.
        """
        self._inner = self._world.inside_node()
        self._comm = Collective(
            self._inner,
            self._inner.topology,
            trace=self.trace,
            averages_gradients=True,
            lanes=self._lanes,
        )
        self._comm.member = self
        self._comm.agrees = self._is_back
        if self._mates > 1 and self._learner.inside == "plain":
            self.averager = GradientAverager(
                self._learner.replica.params,
                self._comm,
                multiple=self._lanes,
                scope=lambda: "world",
                waited=lambda seconds: self.trace.emit("wait", seconds=seconds, reason="gradients"),
                worked=self._world.worked,
            )

    @property
    def _mates(self) -> int:
        return len(self._world.topology.mates(self._world.rank))

    def _is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether no other rank of the node holds this rank's part of a tensor."""
        return is_dtensor(tensor) and pieces(tensor) == self._mates

    def _divide(self, sharded: bool) -> None:
        """What this rank alone holds (`_owned`) and what all ranks of the node hold, which is
        split among them.
        """
        self._common = self._learner.replica
        if sharded:
            model = self._learner.model
            self._common = Replica(
                model, multiple=self._lanes, keep=lambda param: not self._is_owned(param)
            )
        self._splits = not self._owned or bool(self._common.params or self._extras)
        self._holds = any(local(tensor).numel() for tensor in self._owned)

    @property
    def _owned(self) -> Vector:
        return [
            tensor
            for tensor in (*self._learner.replica.params, *self._statistics())
            if self._is_owned(tensor)
        ]

    @property
    def _extras(self) -> Vector:
        return [local(extra) for extra in self._statistics() if not self._is_owned(extra)]

    def _vector(self) -> Vector:
        """What all ranks of the node hold, as flat vectors, statistics and momentum last; in the
        memory kept for it.
        """
        self._take_in()
        return [*self._common.snapshot(), self._pack_extras(self._extra)]

    def _pack_extras(self, into: torch.Tensor) -> torch.Tensor:
        if extras := self._extras:
            packed = torch.cat(
                [extra.detach().reshape(-1).to("cpu", into.dtype) for extra in extras]
            )
            into[: packed.numel()] = packed
        return into

    def _shared_vector(self) -> Vector:
        """The same with the mean of the statistics of this node's ranks, which see different
        data.
        """
        vector = self._vector()
        self._average_statistics()
        return vector

    def _average_statistics(self) -> None:
        size = sum(buffer.numel() for buffer in self._learner.replica.floating)
        if size and self._mates > 1:
            self._comm.average(Offer(vector=[], buffers=self._extra[:size], form="mean"))

    def _pieces(self, vector: Vector) -> Vector:
        """What this rank gossips about: its shards, where they are, and its pieces of the vector.
        Shards alone are on one device, and cross their boundary without making it wait; where all
        of them are empty it still has to be heard.
        """
        reshard(self._sharding)
        split = vector if self._splits or not self._holds else []
        return [
            *map(local, self._owned),
            *(flat.view(self._lanes, -1)[self._shard] for flat in split),
        ]

    def _share(self, vector: Vector) -> int:
        """Every rank's pieces of the vector, on every rank of the node; and the gradient count that
        local rank 0 has heard, in the place of a loss, so that all ranks of the node go by the
        same.
        """
        landed = self._comm.average(
            Offer(vector=vector, buffers=torch.empty(0), form="mean", losses=self._count())
        )
        return int(landed.loss_sum)

    def _count(self) -> tuple[float, int]:
        """The gradient count that this rank has heard, if it is the one whose count its node
        goes by; and how many they are.
        """
        return (
            (self._mailbox.global_steps, 1)
            if self._mailbox is not None and self._shard == 0
            else (0.0, 0)
        )

    def _hear_count(self) -> None:
        """The same count where nothing else is shared at a boundary: in the background, so it is
        of the boundary before.
        """
        if self._counting is not None:
            count, shared = self._counting
            shared.wait()
            self._heard = round(float(count[0] / count[1]))  # a mean, of however many ranks
        self._heard += self._mates  # this step's

    def _tell_count(self) -> None:
        count = self._blank_count()
        count[:2] = torch.tensor(self._count())
        self._comm.open_round("node", 0.0)
        self._counting = count, self._comm.reduce(Plain(count), "node")

    def _blank_count(self) -> torch.Tensor:
        return torch.zeros(2 * self._lanes, dtype=torch.float64)

    def _adopt(self, vector: Vector) -> None:
        self._common.assign(vector[:-1])
        write(self._extras, vector[-1])

    def fold(self) -> None:
        """y <- y + u; x <- y for the own shard, then all shards of the node: shared at every
        step, so folded at every step.
        """
        if not self._splits:
            super().fold()
        elif self._defers:
            self._fold_in_passing()
        else:
            self._step()
            self._comm.invite()
            self._land("whole")

    # The same where the parameters are on an accelerator: in passing, so that the compute thread
    # never waits. Now and then, at a boundary that all ranks of the node agree on,
    #
    #     compute thread:         x <- x + d;  begin to copy x to the host
    #     communication thread:   y <- y + u for the own shard;  d <- y - x;  all shards of d
    #
    # They agree by what they tell each other anyway at the beginning of a round of gradients: who
    # is back.

    @cached_property
    def _defers(self) -> bool:
        """Not where somebody wants each step's values at that step, and not for what is held
        elsewhere or rounded.
        """
        strategy = self._strategy
        replica = self._learner.replica
        return (
            replica.staging.remote
            and isinstance(self._learner.tape, NoTape)
            and simulated.get() is None
            and strategy.max_staleness is None
            and not strategy.average_momentum
            and not self._owned
            and all(param.element_size() >= 4 for param in replica.params)
        )

    def _is_back(self) -> bool:
        """Whether the last crossing is complete, and was long enough ago for what it cost."""
        crossing = self._crossing
        if crossing is None or not crossing.sent.done():
            return crossing is None
        return time.monotonic() - crossing.begun >= crossing.sent.wait().seconds / self._fold_share

    def _all_are_back(self) -> bool:
        if self._mates == 1:
            return self._is_back()
        agreed = self._comm.all_agree
        self._comm.all_agree = False
        return agreed

    def _fold_in_passing(self) -> None:
        self._step()
        counts = self.averager is None and self._mates > 1  # nothing else makes them meet
        if counts:
            self._hear_count()
        else:
            self._heard += self._mates
        if len(self._comm.present) < self._mates:
            self._comm.invite()
            self._land("whole")
        elif self._all_are_back():
            self._take_in()
            self._send_off()
        if counts:
            self._tell_count()

    def _send_off(self) -> None:
        snapshot = self._common.stage()
        step = int(self._learner.state["step"])
        self._crossing = Crossing(
            step, time.monotonic(), snapshot, self._comm.submit(lambda: self._pass(snapshot, step))
        )

    def _pass(self, snapshot: Snapshot, step: int) -> Crossed:
        """On the communication thread: the boundary of the snapshot, which becomes what it
        lacks.
        """
        begun = time.thread_time()
        snapshot.ready()
        self._comm.invite()
        size = snapshot.buffers.numel()
        self._extra[:size] = snapshot.buffers
        self._average_statistics()
        mean = self._extra[:size].clone()
        fold = Fold()
        vector = [*snapshot.vector, self._extra]
        if self._mailbox is not None:
            pieces = [flat.view(self._lanes, -1)[self._shard] for flat in vector]
            fold = self._mailbox.cross(pieces, "lift", step=step)
        heard = self._share(vector)
        snapshot.buffers.neg_().add_(mean).add_(self._extra[:size])
        return Crossed(fold, heard, time.thread_time() - begun)

    def _take_in(self) -> None:
        """x <- x + d of the last crossing."""
        crossing = self._crossing
        self._crossing = None
        if crossing is None:
            return
        crossed = crossing.sent.wait()
        floors = self._floors()
        self._common.fold(crossing.snapshot.vector)
        self._common.fold_buffers(crossing.snapshot.buffers)
        self._keep_positive(floors)
        self._heard = max(self._heard, crossed.heard)
        self._note(crossed.fold, late=self._learner.state["step"] - crossing.step)

    _crossing: Crossing | None = None

    def _publish(self) -> None:
        if not self._splits:
            super()._publish()

    def mix(self, round_number: int) -> None:
        """One round of exactly the mixing matrix, for the own shard."""
        if self._splits:
            self._comm.invite()
        super().mix(round_number)

    def _land(self, mode: Mode, *, within: int | None = None) -> None:
        vector = self._shared_vector()
        floors = self._floors()
        if not self._splits:
            self._cross(self._pieces(vector), mode, within=within)
            return
        # somebody did not make this step: its shard comes from one who did
        if len(self._comm.present) < self._mates:
            leader = self._comm.present[0]
            vector = self._comm.broadcast_state({"vector": vector}, root=leader)["vector"]
        if self._mailbox is not None:
            self._cross(self._pieces(vector), mode)
        start = self.trace.clock()
        self._heard = self._share(vector)
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
        if not self._splits:
            self._hear_count()
            self._tell_count()

    def exchange(self, round_number: int) -> None:
        """Local ranks beyond the last lane have nobody to talk to."""
        if self._mailbox is not None:
            super().exchange(round_number)

    def enter_consensus(self) -> Callable[[], None]:
        """Each local rank fetches the mean of its shard, then they share them."""
        self._learner.replica.staging.leave()
        self._comm.meet(Kind.CONSENSUS)
        return self._swap_in()

    def _swap_in(self) -> Callable[[], None]:
        stash = [
            *self._common.snapshot(keep=False),
            self._pack_extras(torch.zeros_like(self._extra)),
        ]
        held = [local(tensor).clone() for tensor in self._owned]
        mean = [flat.clone() for flat in stash]
        if self._mailbox is not None:
            write(self._pieces(mean), torch.from_numpy(self._mailbox.consensus(timeout=None)))
        self._heard = self._share(mean)
        self._adopt(mean)
        self._floor_at_zero()

        def restore() -> None:
            self._adopt(stash)
            for tensor, old in zip(self._owned, held, strict=True):
                local(tensor).copy_(old)

        return restore

    def finish(self) -> None:
        """First the ranks of the node meet, then the nodes."""
        self._ending = True
        self._learner.replica.staging.leave()
        self._comm.meet(Kind.FINISH)
        self._take_the_newest()
        vector = self._shared_vector()
        if self._mailbox is not None:
            self._require_sound(self._pieces(vector))
            self._mailbox.finish(self._pieces(vector))
        self._heard = self._share(vector)
        self._adopt(vector)
        self._floor_at_zero()
        self._comm.close()
        self._end()

    def _take_the_newest(self) -> None:
        steps = [int(step) for (step,) in self._comm.census(self._learner.state["step"])]
        if len(set(steps)) > 1:
            newest = self._comm.broadcast_state(
                {"vector": self._vector()}, root=steps.index(max(steps))
            )
            self._adopt(newest["vector"])

    def _end(self) -> None:
        """The memory that only the node's ranks shared."""
        super()._end()
        self._common.let_go()
        self._extra = torch.empty(0)

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tell the node's ranks, leave the gossip."""
        self._comm.abort(reason, culprit)
        super().abort(reason, culprit)

    def join(self, invitation: Invitation) -> None:
        """Take part in what the node's other ranks do while this one waits."""
        with self._learner.replica.staging.stand_in():
            if invitation.kind is Kind.EXCHANGE:
                self._step()
                self._land("whole")
            else:
                self._swap_in()()

    def find_bad(self) -> str | None:
        """The name of a parameter that holds NaN or Inf."""
        return self._learner.replica.find_bad()

    def blank_parcels(self) -> Iterable[Parcel]:
        """Zeros in the shape of what the node's ranks average in the background."""
        return (
            self.averager.blank_parcels()
            if self.averager is not None
            else [Plain(self._blank_count())]
        )

    def global_steps(self) -> int:
        """A step of a node is a gradient of each of its ranks. As the node's ranks have shared
        it.
        """
        return self._heard

    _heard = 0
    _counting: tuple[torch.Tensor, Pending[None]] | None = None

    def load(self, saved: dict[str, Any]) -> None:
        """What the others have done is heard soon."""
        super().load(saved)
        self._counting = None
        self._heard = self._learner.state["step"] * self._world.topology.world
