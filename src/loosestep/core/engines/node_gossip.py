"""A node as one learner under gossip: its ranks average gradients among themselves, and share what
they gossip about.

Local rank k owns shard k of the model and gossips about it with local rank k of the other nodes;
the shards are gathered inside the node at the step boundary. Of a model that is sharded already
each rank gossips about what it holds, and nothing is gathered. A rank of another node that dies
costs its own edges only; a rank of the same node ends its node.

Where the parameters are on an accelerator the boundary is crossed in passing, so that the compute
thread never waits for the host (`Passing`); benchmarks/GPU.md has what a step costs so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from loosestep.core.collectives.collective import Collective
from loosestep.core.contracts import Invitation, Kind, Offer, Parcel, Vector
from loosestep.core.engines.collective import align
from loosestep.core.engines.gradients import GradientAverager, Plain
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.rank_gossip import (
    Opens,
    kept_positive,
    meeting,
    statistics,
    tell_fold,
    write,
)
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.gossip.memory import Fold
from loosestep.core.pending import Pending
from loosestep.core.replica.replica import Replica, Snapshot
from loosestep.core.replica.shards import is_dtensor, local, pieces, reshard, sharding_modules
from loosestep.core.world import World
from loosestep.strategies.base import GossipPlan

PASSING = 0.25  # of a core: what boundaries in passing may take


@dataclass(frozen=True)
class Passed:
    """A boundary that is complete: what it did, the gradient count that local rank 0 had heard,
    processor time.
    """

    fold: Fold
    heard: int
    seconds: float


@dataclass(frozen=True)
class Passing:
    """A boundary on its way through the host: the step and the parameters that it is of, which
    become what they lack.

    Now and then, at a boundary that all ranks of the node agree on:

        compute thread:         x <- x + d;  begin to copy x to the host
        communication thread:   y <- y + u for the own shard;  d <- y - x;  all shards of d

    They agree by what they tell each other anyway at the beginning of a round of gradients: who is
    back.
    """

    step: int
    begun: float
    snapshot: Snapshot
    sent: Pending[Passed]


class NodeGroup:
    """The ranks of a node as one learner: synchronous inside, gossip outside, shard by shard."""

    averager: GradientAverager | None = None
    mailbox: GossipMailbox | None = None

    def __init__(self, learner: Learner, world: World, strategy: GossipPlan) -> None:
        topology = world.topology
        self._learner = learner
        self._world = world
        self._average_momentum = strategy.average_momentum
        self._bound = strategy.max_staleness
        self._sharding = sharding_modules(learner.model)
        self._shard = topology.local_index(world.rank)
        self._lanes = topology.lanes
        self.mates = len(topology.mates(world.rank))
        self.place = topology.node_of(world.rank)
        # Local ranks beyond the last lane have nobody to talk to; they listen to what its ranks
        # say.
        self.members = list(topology.lane(min(self._shard, self._lanes - 1)))
        self.gradients = {rank: len(topology.mates(rank)) for rank in self.members}
        self._common = learner.replica
        if learner.replica.sharded:
            self._common = Replica(
                learner.model, multiple=self._lanes, keep=lambda param: not self._is_owned(param)
            )
        self.shares = not self._owned or bool(self._common.params or self._extras)
        self._holds = any(local(tensor).numel() for tensor in self._owned)
        size = sum(extra.numel() for extra in self._extras)
        wide = reduce(torch.promote_types, (extra.dtype for extra in self._extras), torch.float32)
        self._extra = torch.zeros(max(-(-size // self._lanes), 1) * self._lanes, dtype=wide)
        self._vector: Vector = []
        self._passing: Passing | None = None
        self._counting: tuple[torch.Tensor, Pending[None]] | None = None
        self._heard = 0

    def open(self, opens: Opens, join: Callable[[Invitation], None]) -> None:
        """Start from the same parameters everywhere, open the mailbox, meet the ranks of this
        node.
        """
        world = self._world
        sharded = self._learner.replica.sharded
        units = world.topology if sharded else world.topology.flat()
        comm = Collective(
            world,
            units,
            trace=self._learner.trace,
            averages_gradients=False,
            shards=sharded,
            stages=self._learner.replica.pipeline_stage is not None,
        )
        with meeting(self, world, comm):
            align(self._learner, comm, world.topology)
            if self._shard < self._lanes:
                self.mailbox = opens(self._pieces(self._pack()))
            self.join = join
            self._meet_mates()

    def _meet_mates(self) -> None:
        self._inner = self._world.inside_node()
        self._comm = Collective(
            self._inner,
            self._inner.topology,
            trace=self._learner.trace,
            averages_gradients=True,
            lanes=self._lanes,
        )
        self._comm.member = self
        self._comm.alone = True  # whoever wants a consensus gets it at once, and reads it alone
        self._comm.agrees = self._is_back
        if self.mates > 1 and self._learner.inside == "plain":
            self.averager = GradientAverager(
                self._learner.replica.params,
                self._comm,
                multiple=self._lanes,
                scope=lambda: "world",
                waited=lambda seconds: self._learner.trace.emit(
                    "wait", seconds=seconds, reason="gradients"
                ),
                worked=self._world.worked,
            )

    # What is gossiped about -----------------------------------------------------------------------

    def _is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether no other rank of the node holds this rank's part of a tensor."""
        if self._learner.replica.pipeline_stage is not None:
            return True
        return is_dtensor(tensor) and pieces(tensor) == self.mates

    @property
    def _statistics(self) -> Vector:
        return statistics(self._learner, average_momentum=self._average_momentum)

    @property
    def _owned(self) -> Vector:
        """What this rank alone holds."""
        tensors = (*self._learner.replica.params, *self._statistics)
        return [tensor for tensor in tensors if self._is_owned(tensor)]

    @property
    def _extras(self) -> Vector:
        """The statistics that all ranks of the node hold."""
        return [local(extra) for extra in self._statistics if not self._is_owned(extra)]

    def gather(self) -> Vector:
        """This rank's shards, where they are, and its pieces of what all ranks of the node hold,
        with the mean of their statistics: they see different data.
        """
        vector = self._pack()
        self._average_statistics()
        absent = len(self._comm.present) < self.mates
        if self.shares and absent:
            # Somebody did not make this step: its shard comes from one who did.
            leader = self._comm.present[0]
            vector = self._comm.broadcast_state({"vector": vector}, root=leader)["vector"]
        self._vector = vector
        return self._pieces(vector)

    def spread(self) -> None:
        """Every rank's pieces on every rank of the node, and into the model."""
        trace = self._learner.trace
        start = trace.clock()
        self._heard = self._share(self._vector)
        trace.emit("wait", seconds=trace.clock() - start, reason="node")
        self._adopt(self._vector)

    def keep(self) -> tuple[Vector, Callable[[], None]]:
        """Copy what gossip averages: what to write into, as into what `gather` gives, and what puts
        the copy back. A boundary in passing is not waited for.
        """
        extra = self._pack_extras(torch.zeros_like(self._extra))
        stash = [*self._common.snapshot(keep=False), extra]
        held = [local(tensor).detach().clone() for tensor in self._owned]

        def restore() -> None:
            self._adopt(stash)
            for tensor, old in zip(self._owned, held, strict=True):
                local(tensor).detach().copy_(old)

        self._vector = [flat.clone() for flat in stash]
        return self._pieces(self._vector), restore

    def serve(self, mean: torch.Tensor | None) -> None:
        """Share this rank's pieces of a mean with a mate that asks for it, beside a backward: the
        model is left alone.
        """
        vector = [*self._common.snapshot(keep=False), torch.zeros_like(self._extra)]
        if mean is not None:
            pieces = [flat.view(self._lanes, -1)[self._shard] for flat in vector]
            shared = sum(piece.numel() for piece in pieces)
            write(pieces, mean[mean.numel() - shared :])
        self._heard = max(self._heard, self._share(vector))

    def _pack(self) -> Vector:
        """What all ranks of the node hold, as flat vectors in the memory kept for it, statistics
        and momentum last.
        """
        self._take_in()
        return [*self._common.snapshot(), self._pack_extras(self._extra)]

    def _pack_extras(self, into: torch.Tensor) -> torch.Tensor:
        if extras := self._extras:
            flat = [extra.detach().reshape(-1).to("cpu", into.dtype) for extra in extras]
            packed = torch.cat(flat)
            into[: packed.numel()] = packed
        return into

    def _average_statistics(self) -> None:
        floating = self._learner.replica.floating
        size = sum(buffer.numel() for buffer in floating if not self._is_owned(buffer))
        if size and self.mates > 1:
            self._comm.average(Offer(vector=[], buffers=self._extra[:size], form="mean"))

    def _pieces(self, vector: Vector) -> Vector:
        """Shards alone are on one device, and cross their boundary without making it wait; where
        all of them are empty this rank still has to be heard.
        """
        reshard(self._sharding)
        if self._shard >= self._lanes:
            return []
        split = vector if self.shares or not self._holds else []
        return [
            *(local(tensor).detach() for tensor in self._owned),
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

    def _adopt(self, vector: Vector) -> None:
        self._common.assign(vector[:-1])
        write(self._extras, vector[-1])

    # The boundary ---------------------------------------------------------------------------------

    def arrive(self, step: int) -> None:
        """Tell the mates which step this is, and hear how many gradients there are."""
        if self._inner.pulse is not None:
            self._inner.pulse.check()
            self._inner.pulse.step = step
        self._comm.step = step
        if self._counts_apart:
            self._hear_count()
        elif self._in_passing:
            self._heard += self.mates

    def leave(self) -> None:
        """Tell the mates how many gradients there are, where nothing else does."""
        if self._counts_apart:
            count = self._blank_count()
            count[:2] = torch.tensor(self._count())
            self._comm.open_round("node", 0.0)
            self._counting = count, self._comm.reduce(Plain(count), "node")

    def invite(self) -> None:
        """Call the ranks of this node that wait elsewhere."""
        if self.shares:
            self._comm.invite()

    def passes(self) -> bool:
        """Whether this boundary is crossed in passing, or not at all because the last one still
        is.
        """
        if not self._in_passing or len(self._comm.present) < self.mates:
            return False
        if self._all_are_back():
            self._take_in()
            snapshot = self._common.stage()
            step = int(self._learner.state["step"])
            sent = self._comm.submit(lambda: self._pass(snapshot, step))
            self._passing = Passing(step, time.monotonic(), snapshot, sent)
        return True

    @cached_property
    def _in_passing(self) -> bool:
        """Not where somebody wants each step's values at that step, and not for what is held
        elsewhere or rounded.
        """
        replica = self._learner.replica
        return (
            self.shares
            and replica.staging.remote
            and not self._learner.tape.binds
            and self._world.timed
            and self._bound is None
            and not self._average_momentum
            and not self._owned
            and all(param.element_size() >= 4 for param in replica.params)
        )

    def _is_back(self) -> bool:
        """Whether the last passing is complete, and was long enough ago for what it cost."""
        passing = self._passing
        if passing is None or not passing.sent.done():
            return passing is None
        cost = passing.sent.wait().seconds
        share = 1.0 if self._learner.replica.floating else PASSING  # statistics drift faster
        return time.monotonic() - passing.begun >= cost / share

    def _all_are_back(self) -> bool:
        if self.mates == 1:
            return self._is_back()
        agreed = self._comm.all_agree
        self._comm.all_agree = False
        return agreed

    def _pass(self, snapshot: Snapshot, step: int) -> Passed:
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
        if self.mailbox is not None:
            mine = [flat.view(self._lanes, -1)[self._shard] for flat in vector]
            fold = self.mailbox.cross(mine, "lift", step=step)
        heard = self._share(vector)
        snapshot.buffers.neg_().add_(mean).add_(self._extra[:size])
        return Passed(fold, heard, time.thread_time() - begun)

    def _take_in(self) -> None:
        """x <- x + d of the last passing."""
        passing = self._passing
        self._passing = None
        if passing is None:
            return
        passed = passing.sent.wait()
        with kept_positive(self._learner.replica):
            self._common.fold(passing.snapshot.vector)
            self._common.fold_buffers(passing.snapshot.buffers)
        self._heard = max(self._heard, passed.heard)
        step = int(self._learner.state["step"])
        tell_fold(self._learner.trace, passed.fold, step, late=step - passing.step)

    # Gradient counts: all ranks of the node go by what local rank 0 has heard ---------------------

    @cached_property
    def _counts_apart(self) -> bool:
        """Whether nothing else is shared at every step, so that counts need a message of their
        own.
        """
        alone = self._in_passing and self.averager is None and self.mates > 1
        return not self.shares or alone

    def _count(self) -> tuple[float, int]:
        """The count that this rank has heard, if it is the one its node goes by; and how many
        they are.
        """
        speaks = self.mailbox is not None and self._shard == 0
        return (self.mailbox.global_steps, 1) if self.mailbox is not None and speaks else (0.0, 0)

    def _hear_count(self) -> None:
        """What was told at the boundary before, and this step's gradients."""
        if self._counting is not None:
            count, shared = self._counting
            shared.wait()
            self._heard = round(float(count[0] / count[1]))  # a mean, of however many ranks
        self._heard += self.mates

    def _blank_count(self) -> torch.Tensor:
        return torch.zeros(2 * self._lanes, dtype=torch.float64)

    def global_steps(self) -> int:
        """A step of a node is a gradient of each of its ranks. As the node's ranks have shared
        it.
        """
        return self._heard

    # Life and death -------------------------------------------------------------------------------

    def find_bad(self) -> str | None:
        """The name of a parameter that holds NaN or Inf."""
        return self._learner.replica.find_bad()

    def blank_parcels(self) -> Iterable[Parcel]:
        """Zeros in the shape of what the node's ranks average in the background."""
        if self.averager is not None:
            return self.averager.blank_parcels()
        return [Plain(self._blank_count())]

    def reach(self, kind: Kind) -> None:
        """Meet the ranks of the node. At the end those that made fewer steps take over what the
        others have.
        """
        self._learner.replica.staging.leave()
        self._comm.meet(kind)
        if kind is not Kind.FINISH:
            return
        steps = [int(step) for (step,) in self._comm.census(self._learner.state["step"])]
        if len(set(steps)) > 1:
            leader = steps.index(max(steps))
            newest = self._comm.broadcast_state({"vector": self._pack()}, root=leader)
            self._adopt(newest["vector"])

    def load(self, step: int) -> None:
        """What the others have done is heard soon."""
        self._counting = None
        self._heard = step * self._world.topology.world

    def close(self) -> None:
        """Leave the node, close the mailbox, let go of the memory that only the node's ranks
        shared.
        """
        self._comm.close()
        self._let_go()

    def _let_go(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
            self.mailbox = None
        self._common.let_go()
        self._extra = torch.empty(0)
        self._vector = []

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tell the ranks of the node why, leave the gossip."""
        self._comm.abort(reason, culprit)
        self._let_go()
