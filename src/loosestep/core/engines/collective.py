"""The collective engine: exchanges that all replicas take part in, started and folded as the
strategy says.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from loosestep.core.contracts import (
    PATIENCE,
    Coded,
    Comm,
    Invitation,
    Kind,
    Landed,
    Offer,
    Outer,
    Parcel,
    Scope,
    Vector,
)
from loosestep.core.engines.gradients import GradientAverager, Plain
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.optimizers import align_optimizers, digest
from loosestep.core.engines.wrapped import averages_gradients
from loosestep.core.errors import CommError
from loosestep.core.pending import Pending
from loosestep.core.replica.replica import Replica
from loosestep.core.replica.shards import (
    is_dtensor,
    load_localised,
    local,
    localise,
    reshard,
    sharding_modules,
)
from loosestep.core.world import World
from loosestep.strategies import Exchanges, Strategy
from loosestep.topology import Topology

log = logging.getLogger("loosestep")
OWN = ("outer", "codes", "gradients")  # of the strategy's state, what only exchanges change


@dataclass
class StartedExchange:
    """An exchange in the air."""

    step: int
    pending: Pending[Landed]


class CollectiveEngine:
    """Drives the strategies that are no gossip over a `Comm`; is their `Exchanges` and the
    comm's `Member`.
    """

    def __init__(self, learner: Learner, *, world: World, comm: Comm) -> None:
        self._learner = learner
        self._world = world
        self._comm = comm
        self._strategy: Strategy[Exchanges] = learner.strategy
        self._replica = learner.replica
        self.trace = learner.trace
        self._flight: StartedExchange | None = None
        self._held = 0  # consensuses, in which all ranks have taken part
        # snapshots are exchanged where the parameters are
        self._stay = world.reach is not None and world.reach.lanes
        self.averager: GradientAverager | None = None
        comm.member = self
        align(learner, comm, world.topology)
        self._codec = None if comm.members == 1 else self._strategy.moves_in
        part = comm.part if self._codec is None else comm.own
        if self._strategy.codec is not None and comm.members == 1 and comm.rank == 0:
            log.warning(
                "codec=%s changes nothing here: all ranks are on one node and share its memory",
                self._strategy.codec,
            )
        self._strategy.prepare(self.state, self._replica, part)
        if self._codec is not None:
            self.state["codes"] = self._agree(*comm.own)
        if averages_gradients(learner.inside, self._strategy, world.topology):
            self.averager = GradientAverager(
                self._replica.params,
                comm,
                multiple=world.topology.multiple,
                scope=lambda: self._widest(self._strategy.scope(self.state)),
                waited=lambda seconds: self.trace.emit("wait", seconds=seconds, reason="gradients"),
                worked=world.worked,
                late=learner.inside != "plain",
            )
            if comm.members > 1 and self._strategy.gradients_in is not None:
                feedback = self.averager.rows(comm.own[1])
                self.state["gradients"] = {**comm.agree(feedback), "feedback": feedback}
                self.averager.encode(self._coded_gradients)
        exchanges = self._strategy.learner != "world"
        comm.learn_order(
            [(s.padded, s.dtype) for s in self._replica.segments] if exchanges else [],
            [] if self.averager is None else self.averager.lengths(),
            alike=self._strategy.exchanges_alike,
        )

    @property
    def state(self) -> dict[str, Any]:
        return self._learner.state

    # The run's side (`Engine`) --------------------------------------------------------------------

    def boundary(self) -> None:
        """An optimizer step was made."""
        step = self.state["step"] + 1
        pulse = self._world.pulse
        if pulse is not None:
            pulse.check()
            pulse.step = step
        self._comm.step = step
        if self.averager is not None:
            if self.averager.backwards > 1:  # one of them without a step
                self._strategy.scaled(self.state)
            self.averager.backwards = 0
        self._strategy.boundary(self.state, self)
        behind = step - (0 if self._comm.alone else PATIENCE)
        if self._comm.asked or (pulse is not None and pulse.is_asked(self._held, behind)):
            self._hold_consensus(called=False)

    def enter_consensus(self) -> Callable[[], None]:
        """Put the mean of all replicas into the model; what is returned puts everything back."""
        pulse = self._world.pulse
        if pulse is not None:
            pulse.ask(self._held, int(self.state["step"]))
        mean = self._hold_consensus(called=True)
        if pulse is not None:
            pulse.stop_asking()
        stash = self._replica.snapshot(keep=False)
        buffers = self._replica.pack_buffers()
        self._adopt_mean(mean)

        def restore() -> None:
            self._replica.assign(stash)
            self._replica.assign_buffers(buffers)

        return restore

    def finish(self) -> None:
        """Drain what is in flight and leave the same parameters on every rank."""
        if self._flight is not None:
            self._fold_now()
        self._reach(Kind.FINISH)
        mean = self._mean()
        exact: dict[str, Any] = {"counting": list(self._replica.counting)}
        if self._strategy.learner == "world":
            exact["vector"] = self._replica.snapshot()
        exact = self._comm.broadcast_state(exact, root=0)
        self._adopt_mean(mean)
        if "vector" in exact:
            self._replica.assign(exact["vector"])
        for buffer, value in zip(self._replica.counting, exact["counting"], strict=True):
            buffer.copy_(value)
        self._comm.close()

    def abort(self, reason: str, culprit: int | None) -> None:
        """End at once; tell the others why."""
        self._comm.abort(reason, culprit)

    def global_steps(self) -> int:
        """All ranks step about as often as this one."""
        return int(self.state["step"]) * self._world.topology.world

    def stats(self) -> dict[str, Any]:
        """The period in force."""
        return {"period": self._strategy.period_at(self.state)}

    def advice(self) -> str | None:
        """Ranks that do exactly the same learn nothing from each other."""
        if not self._comm.identical:
            return None
        return (
            "several ranks computed exactly the same so far: they probably see the same data. "
            "Give each rank its own part, for instance with torch.utils.data.DistributedSampler. "
            "(Or DistributedDataParallel averages over all of them: do not wrap)"
        )

    def save(self) -> dict[str, Any]:
        """The exchange in flight, waited for and not folded; one that a lost rank has broken off
        is not there.
        """
        try:
            landed = None if self._flight is None else self._flight.pending.wait()
        except CommError:
            landed = None
        if self._flight is None or landed is None:
            return {"flight": None}
        self._replica.staging.receive()
        flight = {
            "step": self._flight.step,
            **vars(landed),
            "vector": [t.to("cpu", copy=True) for t in landed.vector],
        }
        flight["buffers"] = landed.buffers.clone()
        return {"flight": copy.copy(flight)}

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `save`."""
        self._comm.step = self.state["step"]
        if self._flight is not None:  # it still writes into the memory that is filled here
            self._flight.pending.wait()
            self._replica.staging.receive()
            self._flight = None
        if saved["flight"] is None:
            return
        fields = dict(saved["flight"])
        step = fields.pop("step")
        vector = self._replica.snapshot()
        for kept, stored in zip(vector, fields.pop("vector"), strict=True):
            kept.copy_(stored)
        landing: Pending[Landed] = Pending()
        landing.fulfil(Landed(vector=vector, **fields))
        self._flight = StartedExchange(step, landing)

    # The strategy's side (`Exchanges`) ------------------------------------------------------------

    @property
    def in_flight(self) -> int | None:
        """The step at which the exchange in flight was started."""
        return None if self._flight is None else self._flight.step

    def start(
        self,
        *,
        form: Literal["mean", "delta"] = "delta",
        lane: int | None = None,
        vector: Vector | None = None,
        outer: Outer | None = None,
        wire: torch.dtype | None = None,
        now: bool = False,
    ) -> None:
        """Take a snapshot (or `vector` in its place) and exchange it with all replicas in the
        background.
        """
        assert self._flight is None, "an exchange is folded before the next one starts"
        coded = self._coded()
        offer = self._offer(
            form=form, lane=lane, vector=vector, outer=outer, wire=wire, coded=coded
        )
        self.trace.emit("start", exchange=self.state["exchanges"], step=self.state["step"])
        start = self._comm.now()
        self._flight = StartedExchange(self.state["step"], self._comm.all_reduce(offer, here=now))
        if now:  # it is over
            self.trace.emit("wait", seconds=self._comm.now() - start, reason="exchange")

    @property
    def replica(self) -> Replica:
        """This rank's copy of the model."""
        return self._replica

    def fold(self) -> Landed:
        """Wait for the exchange in flight; the strategy puts it into the replica."""
        assert self._flight is not None
        flight = self._flight
        start = self._comm.now()
        landed = flight.pending.wait()
        self.trace.emit("wait", seconds=self._comm.now() - start, reason="fold")
        self._flight = None
        return self._arrived(landed, staleness=self.state["step"] - flight.step)

    def _fold_now(self) -> None:
        self._strategy.land(self.state, self._replica, self.fold())

    def gather(self) -> None:
        """Wait for all replicas and make each of them their mean."""
        if self._flight is not None:
            self._fold_now()
        self._replica.staging.leave()
        self._comm.meet(Kind.GATHER)
        self._gather()

    def average(self, *, wire: torch.dtype | None = None) -> None:
        """Blocking: parameters <- mean, sent as `wire`."""
        start = self._comm.now()
        offer = self._offer(form="mean", wire=wire)
        landed = self._comm.all_reduce(offer).wait()
        self.trace.emit("wait", seconds=self._comm.now() - start, reason="average")
        self._adopt_mean(landed)

    def average_node(self) -> None:
        """Blocking, inside the node: parameters <- the mean of the node's ranks."""
        if len(self._world.topology.mates(self._comm.rank)) == 1:
            return
        start = self._comm.now()
        vector = self._replica.snapshot(keep=False)
        self._comm.open_round("node", 0.0)
        for flat in vector:
            self._comm.reduce(Plain(flat), "node").wait()
        self.trace.emit("wait", seconds=self._comm.now() - start, reason="node")
        self._replica.assign(vector)

    # Communication's side (`Member`) --------------------------------------------------------------

    def join(self, invitation: Invitation) -> None:
        """Take part in a round that others are at while this rank waits at a lower kind."""
        with self._replica.staging.stand_in():
            self._join(invitation)

    def _join(self, invitation: Invitation) -> None:
        if self._flight is not None and invitation.kind is not Kind.CONSENSUS:
            self._fold_now()
        if invitation.kind is Kind.EXCHANGE:
            form = {
                **self._strategy.form(self.state),
                "lane": invitation.lane,
                "wire": invitation.wire,
            }
            offer = self._offer(**form, coded=self._coded() if invitation.coded else None)
            self.trace.emit("start", exchange=self.state["exchanges"], step=self.state["step"])
            landed = self._comm.average(offer)
            self.trace.emit("landed", seconds=landed.seconds)
            self._strategy.land(self.state, self._replica, self._arrived(landed, staleness=0))
        elif invitation.kind is Kind.GATHER:
            self._gather()
        else:
            self._share_consensus(called=False)

    def _hold_consensus(self, *, called: bool) -> Landed:
        self._meet(Kind.CONSENSUS)
        return self._share_consensus(called=called)

    def _share_consensus(self, *, called: bool) -> Landed:
        """The mean, everybody being here: those that have called it, and those that were asked."""
        self._held += 1
        self._comm.asked = False
        self._comm.alone = not all(flag for (flag,) in self._comm.census(called))
        self._equalise()
        return self._mean()

    def find_bad(self) -> str | None:
        """The name of a parameter that holds NaN or Inf."""
        return self._replica.find_bad()

    def blank_parcels(self) -> Iterable[Parcel]:
        """Zeros in the shape of what this node's ranks average every step."""
        if self.averager is None:
            return []
        # parameters, averaged inside the node now and then
        if self._strategy.scope(self.state) == "rank":
            return [Plain(torch.zeros_like(flat)) for flat in self._replica.snapshot(keep=False)]
        return self.averager.blank_parcels()

    # Inside ---------------------------------------------------------------------------------------

    def _agree(self, row: int, rows: int) -> dict[str, Any]:
        """What is kept between exchanges in codes, with a reference if the strategy has none."""
        theirs = self._strategy.reference(self.state)
        if theirs is not None:
            return self._comm.agree(theirs)
        reference = []
        for flat in self._replica.snapshot(keep=False):
            wide = torch.promote_types(flat.dtype, torch.float32)
            reference.append(flat.view(rows, -1)[row].to(wide, copy=True))
        return {**self._comm.agree(reference), "reference": reference}

    def _coded(self) -> Coded | None:
        """How an exchange of differences travels."""
        if self._codec is None:
            return None
        kept = self.state["codes"]
        theirs = self._strategy.reference(self.state)
        return Coded(self._codec, kept, kept["reference"] if theirs is None else theirs)

    def _coded_gradients(self) -> Coded:
        """How gradients travel between nodes."""
        codec = self._strategy.gradients_in
        assert codec is not None
        return Coded(codec, self.state["gradients"], [])

    def _offer(
        self,
        *,
        form: Literal["mean", "delta"] = "delta",
        lane: int | None = None,
        wire: torch.dtype | None = None,
        vector: Vector | None = None,
        outer: Outer | None = None,
        coded: Coded | None = None,
    ) -> Offer:
        self.state["exchanges"] += 1
        lane = None if lane is None or self._replica.sharded else lane % self._comm.topology.lanes
        part = self._comm.part if lane is None else None
        stay = self._stay and coded is None
        snapshot = self._replica.stage(self._learner.losses.take(), stay=stay, part=part)
        if vector is not None:
            snapshot.ready()
            torch._foreach_copy_(snapshot.vector, vector)
        return Offer(
            **vars(snapshot),
            form=form,
            lane=lane,
            wire=wire,
            part=part,
            outer=outer,
            coded=coded,
        )

    def _arrived(self, landed: Landed, *, staleness: int) -> Landed:
        """What every strategy does alike with what has landed."""
        self._replica.assign_buffers(landed.buffers)
        self.trace.emit("fold", staleness=staleness, step=self.state["step"])
        if not math.isnan(landed.distance):
            self.trace.emit("distance", value=landed.distance)
        return replace(landed, staleness=staleness, replicas=len(self._comm.topology.nodes))

    def _gather(self) -> None:
        """All replicas are here: each becomes their mean, momentum included, so that they stay
        equal in lockstep.
        """
        self._adopt_mean(self._mean())
        self._average_optimizers()
        if any(scaled for (scaled,) in self._comm.census(self.state.get("scaled", False))):
            self._strategy.scaled(self.state)
        self._strategy.gathered(self.state)
        self.trace.emit("phase", name="cool-down", step=self.state["step"])

    def _reach(self, kind: Kind) -> None:
        self._meet(kind)
        self._equalise()

    def _meet(self, kind: Kind) -> None:
        start = self._comm.now()
        self._replica.staging.leave()
        self._comm.meet(kind)
        self.trace.emit("wait", seconds=self._comm.now() - start, reason=kind.name.lower())

    def _mean(self) -> Landed:
        """The mean of all replicas, in new memory; when all ranks are one replica, and are seen to
        be, it has nothing to average but buffers.
        """
        vector = self._strategy.truth(self.state, self._replica)
        buffers = self._replica.pack_buffers()
        if self._strategy.learner != "world":
            settle = self._strategy.learner == "node" and self._strategy.scope(self.state) == "rank"
            return self._comm.average(
                Offer(vector=vector, buffers=buffers, form="mean", settle=settle)
            )
        if self._is_one_replica(vector):
            return self._comm.average(Offer(vector=[], buffers=buffers, form="mean"))
        mine = [flat.clone() for flat in vector]
        mean = self._comm.average(Offer(vector=vector, buffers=buffers, form="mean", settle=True))
        apart = [float((a - b).double().square().sum()) for a, b in zip(mine, vector, strict=True)]
        spread = self._comm.census(sum(apart))
        return replace(mean, distance=math.sqrt(sum(own for (own,) in spread) / len(spread)))

    def _is_one_replica(self, vector: Vector) -> bool:
        """Whether all ranks hold the same parameters; of shards, those of a lane."""
        digests = [row[0] for row in self._comm.census(digest("", vector))]
        topology = self._comm.topology
        lanes = [topology.lane(k) for k in range(topology.lanes)]
        groups = lanes if self._replica.sharded else [range(len(digests))]
        apart = [r for group in groups for r in group if digests[r] != digests[group[0]]]
        if not apart:
            self.trace.emit("distance", value=0.0)
        elif self._comm.rank == 0:
            log.warning(
                "the ranks train one model together, and the parameters of rank(s) %s are not "
                "those of rank 0 any more (run.stats['consensus_distance'] says how far); the "
                "usual causes are learning rates or optimizer states that differ between ranks",
                ", ".join(map(str, apart)),
            )
        return not apart

    def _adopt_mean(self, mean: Landed) -> None:
        if mean.vector:
            self._replica.assign(mean.vector)
            self.trace.emit("distance", value=mean.distance)
        self._replica.assign_buffers(mean.buffers)

    def _equalise(self) -> None:
        """Ranks that were away while their replica stepped take over everything from the one
        that made most steps.
        """
        scopes: list[Scope] = ["rank", "node", "world"]
        standings = self._comm.census(scopes.index(self._comm.missed), self.state["step"])
        widest = scopes[int(max(missed for missed, _ in standings))]
        if widest == "rank":
            return
        if self._flight is not None:
            self._fold_now()
        mates = (
            range(len(standings))
            if widest == "world"
            else self._comm.topology.mates(self._comm.rank)
        )
        if any(standings[rank][0] for rank in mates):
            leader = max(mates, key=lambda rank: (standings[rank][1], -rank))
            mine = self._whole_state()
            received = self._comm.broadcast_state(mine, root=leader, scope=widest)
            if received is not mine:
                self._take_over(received)
        self._comm.missed = "rank"

    def _average_optimizers(self) -> None:
        moments = self._learner.state_tensors()
        size = sum(moment.numel() for moment in moments)
        rows = self._comm.census(len(moments), size)
        units = self._comm.topology
        lanes = (
            [units.lane(k) for k in range(units.lanes)]
            if self._replica.sharded
            else [range(units.world)]
        )
        if any(rows[rank] != rows[lane[0]] for lane in lanes for rank in lane) or rows[0][0] == 0:
            return  # replicas that use different parameters hold different moments: they stay local
        multiple = self._world.topology.multiple
        wide = (
            torch.float64
            if any(moment.dtype == torch.float64 for moment in moments)
            else torch.float32
        )
        flat = torch.cat([moment.detach().reshape(-1).to("cpu", wide) for moment in moments])
        vector = [torch.nn.functional.pad(flat, (0, -size % multiple))]
        self._comm.average(Offer(vector=vector, buffers=torch.empty(0), form="mean"))
        for moment, mean in zip(
            moments, vector[0][:size].split([m.numel() for m in moments]), strict=True
        ):
            moment.copy_(mean.view(moment.shape))

    def _whole_state(self) -> dict[str, Any]:
        return {
            "vector": self._replica.snapshot(keep=False),
            "optimizers": [
                localise(optimizer.state_dict()) for optimizer in self._learner.optimizers
            ],
            "state": {key: value for key, value in self.state.items() if key not in OWN},
        }

    def _take_over(self, whole: dict[str, Any]) -> None:
        self._replica.assign(whole["vector"])
        for optimizer, state in zip(self._learner.optimizers, whole["optimizers"], strict=True):
            load_localised(optimizer, state)
        # an outer optimizer has missed no exchange
        self._learner.state = {**self.state, **whole["state"]}
        self._comm.step = self.state["step"]

    def _widest(self, scope: Scope) -> Scope:
        """A scope in which this rank is alone needs no communication, nor one that something
        else looks after.
        """
        alone = len(self._comm.topology.mates(self._comm.rank)) == 1
        if scope == "node" and (alone or self._learner.inside != "plain"):
            return "rank"
        return scope


def align(learner: Learner, comm: Comm, topology: Topology) -> None:
    """All replicas start from rank 0's parameters and buffers, frozen ones included; shards from
    those of its node. So do the optimizers of one learner.
    """
    reshard(sharding_modules(learner.model))
    params = list(learner.model.parameters())
    whole = [
        *(p for p in params if not is_dtensor(p)),
        *learner.replica.floating,
        *learner.replica.counting,
    ]
    shards = [local(param) for param in params if is_dtensor(param)]
    if shards:
        head = comm.topology.mates(comm.rank)[0]
        _take_over(
            whole, comm.broadcast_state({"tensors": whole}, root=head, scope="node")["tensors"]
        )
    mine = [*whole, *shards]
    _take_over(mine, comm.broadcast_state({"tensors": mine}, root=0)["tensors"])
    align_optimizers(learner, comm, topology)


@torch.no_grad()
def _take_over(mine: Vector, theirs: Vector) -> None:
    for tensor, other in zip(mine, theirs, strict=True):
        if tensor is not other:
            tensor.copy_(other)
