"""A run: hooks, life cycle, consensus and state of one attached model."""

from __future__ import annotations

import atexit
import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from loosestep.comm.base import Comm, CommError, Invitation, Kind, Landed, LostPeer, Offer, Pending, Scope
from loosestep.comm.world import World
from loosestep.gradients import GradientAverager
from loosestep.replica import Replica
from loosestep.strategies.base import Strategy
from loosestep.trace.events import Trace

VERSION = 1


@dataclass
class Flight:
    """An exchange in the air."""

    step: int
    pending: Pending[Landed]


class Losses:
    """Observed losses, summed where they are: never a synchronisation with the device."""

    def __init__(self) -> None:
        self.sum: torch.Tensor | float = 0.0
        self.count = 0

    def add(self, loss: torch.Tensor | float) -> None:
        """Count one loss (the mean, if it has several elements)."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().mean() if loss.numel() > 1 else loss.detach().reshape(())
            loss = loss.to(torch.float64)
        self.sum = self.sum + loss
        self.count += 1

    def take(self) -> tuple[torch.Tensor | float, int]:
        """The sum and the count since the last call."""
        taken = (self.sum, self.count)
        self.sum, self.count = 0.0, 0
        return taken


class Run:
    """What `attach` returns. Use it as a context manager, or call `finish()` at the end."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        strategy: Strategy,
        *,
        world: World,
        comm: Comm,
        replica: Replica,
        trace: Trace,
        hooks: bool,
    ) -> None:
        self.model, self.optimizers, self.strategy = model, optimizers, strategy
        self.rank, self.topology, self.trace = world.rank, world.topology, trace
        self.state = strategy.begin()
        self.closed: Callable[[], object] = lambda: None
        self._world, self._comm, self._replica = world, comm, replica
        self._flight: Flight | None = None
        self._losses = Losses()
        self._stepped: set[int] = set()
        self._groups = self._count_groups()
        self._active = True
        self._warned = False
        self._averager: GradientAverager | None = None
        comm.member = self
        self._align()
        if strategy.averages_gradients and world.topology.world > 1:
            units = comm.topology
            self._averager = GradientAverager(
                replica.params,
                comm,
                multiple=units.lanes * len(units.nodes),
                scope=lambda: self._widest(strategy.scope(self.state)),
                waited=lambda seconds: trace.emit("wait", seconds=seconds, reason="gradients"),
            )
        self._handles = [o.register_step_post_hook(self._after_step) for o in optimizers] if hooks else []
        self._atexit = weakref.WeakMethod(self._at_exit)
        atexit.register(_call_weakly, self._atexit)

    # The user's side --------------------------------------------------------------------------------------------------

    def observe(self, loss: torch.Tensor | float) -> None:
        """Feed the schedule and the metrics with a training loss. Costs no synchronisation."""
        self._losses.add(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without averaging; the next backward outside averages the sum."""
        return self._averager.no_sync() if self._averager is not None else nullcontext()

    def step(self) -> None:
        """The step boundary, for `hooks=False`: call it after `optimizer.step()`."""
        self._boundary()

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Inside, the model is the mean of all replicas; afterwards it is what it was. All ranks call it equally often."""
        self._require_active()
        with self._guard():
            self._reach(Kind.CONSENSUS)
            mean = self._mean()
        stash, buffers = self._replica.snapshot(keep=False), self._replica.pack_buffers()
        self._adopt_mean(mean)
        try:
            yield self.model
        finally:
            self._replica.assign(stash)
            self._replica.assign_buffers(buffers)

    def finish(self) -> None:
        """Drain what is in flight and leave the same parameters on every rank. Training may go on alone afterwards."""
        if not self._active:
            return
        with self._guard():
            if self._flight is not None:
                self.fold()
            self._reach(Kind.FINISH)
            mean = self._mean()
            exact = {"counting": list(self._replica.counting)}
            if self.strategy.learner == "world":
                exact["vector"] = self._replica.snapshot()
            exact = self._comm.broadcast_state(exact, root=0)
            self._adopt_mean(mean)
            if "vector" in exact:
                self._replica.assign(exact["vector"])
            for buffer, value in zip(self._replica.counting, exact["counting"], strict=True):
                buffer.copy_(value)
            self._detach()
            self._comm.close()
        self._world.close()

    @property
    def stats(self) -> dict[str, Any]:
        """Where the run is, as a plain dict computed from its events."""
        totals = self.trace.totals
        return {
            "steps": totals.steps,
            "exchanges": totals.exchanges,
            "folds": totals.folds,
            "joins": totals.joins,
            "bytes_sent": totals.bytes_sent,
            "bytes_between_nodes": totals.bytes_between_nodes,
            "wait_seconds": totals.wait_seconds,
            "exchange_seconds": totals.exchange_seconds,
            "staleness_mean": totals.staleness_mean,
            "staleness_max": totals.staleness_max,
            "consensus_distance": totals.consensus_distance,
            "period": self.state.get("period", getattr(self.strategy, "period", None)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to resume exactly, beside the model and the optimizers. Differs between ranks."""
        flight = None
        if self._flight is not None:
            landed = self._flight.pending.wait()
            flight = {"step": self._flight.step, **vars(landed), "vector": [t.clone() for t in landed.vector]}
        return {
            "version": VERSION,
            "strategy": str(self.strategy),
            "state": copy.deepcopy(self.state),
            "flight": flight,
            "losses": [float(self._losses.sum), self._losses.count],
            "steps": self.trace.totals.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken; load the model and the optimizers of the same rank as well."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"this state has version {state.get('version')!r}, expected {VERSION}; it was written by another release"
            )
        if state["strategy"] != str(self.strategy):
            raise ValueError(
                f"this state belongs to the strategy {state['strategy']}, the run uses {self.strategy}; attach with the same one"
            )
        self.state = copy.deepcopy(state["state"])
        self.trace.totals.steps = state["steps"]
        self._comm.step = self.state["step"]
        self._losses.sum, self._losses.count = state["losses"]
        self._flight = None
        if state["flight"] is not None:
            fields = dict(state["flight"])
            landing: Pending[Landed] = Pending()
            step = fields.pop("step")
            vector = self._replica.snapshot()
            for kept, saved in zip(vector, fields.pop("vector"), strict=True):
                kept.copy_(saved)
            landing.fulfil(Landed(vector=vector, **fields))
            self._flight = Flight(step, landing)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._break(f"rank {self.rank} left the run: {type(error).__name__}: {error}", culprit=_culprit(error))

    # The strategy's side (`Exchanges`) --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int | None:
        """The step at which the exchange in flight was started."""
        return None if self._flight is None else self._flight.step

    def start(self, *, form: Literal["mean", "delta"] = "delta", lane: int | None = None) -> None:
        """Take a snapshot and exchange it with all replicas in the background."""
        assert self._flight is None, "an exchange is folded before the next one starts"
        offer = self._offer(form=form, lane=lane)
        self.trace.emit("start", exchange=self.state["exchanges"], step=self.state["step"])
        self._flight = Flight(self.state["step"], self._comm.all_reduce(offer))

    def fold(self) -> None:
        """Wait for the exchange in flight and hand it to the strategy."""
        assert self._flight is not None
        flight, start = self._flight, self._comm.now()
        landed = flight.pending.wait()
        self.trace.emit("wait", seconds=self._comm.now() - start, reason="fold")
        self._flight = None
        self._land(landed, staleness=self.state["step"] - flight.step)

    def gather(self) -> None:
        """Wait for all replicas and make each of them their mean."""
        if self._flight is not None:
            self.fold()
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
        if len(self.topology.mates(self.rank)) == 1:
            return
        start, vector = self._comm.now(), self._replica.snapshot(keep=False)
        self._comm.open_round("node", 0.0)
        for flat in vector:
            self._comm.reduce(flat, "node").wait()
        self.trace.emit("wait", seconds=self._comm.now() - start, reason="node")
        self._replica.assign(vector)

    # Communication's side (`Member`) ----------------------------------------------------------------------------------

    def join(self, invitation: Invitation) -> None:
        """Take part in a round that others are at while this rank waits at a lower kind."""
        if self._flight is not None:
            self.fold()
        if invitation.kind is Kind.EXCHANGE:
            form: Literal["mean", "delta"] = self.strategy.form(self.state).get("form", "delta")
            offer = self._offer(form=form, lane=invitation.lane, wire=invitation.wire)
            self.trace.emit("start", exchange=self.state["exchanges"], step=self.state["step"])
            landed = self._comm.average(offer)
            self.trace.emit("landed", seconds=landed.seconds)
            self._land(landed, staleness=0)
        elif invitation.kind is Kind.GATHER:
            self._gather()
        else:
            self._equalise()
            self._mean()

    def blank_buckets(self) -> Iterable[torch.Tensor]:
        """Zeros in the shape of what this node's ranks average every step."""
        if self._averager is None:
            return []
        if self.strategy.scope(self.state) == "rank":  # parameters, averaged inside the node now and then
            return [torch.zeros_like(flat) for flat in self._replica.snapshot(keep=False)]
        return self._averager.blank_buckets()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._boundary()

    def _boundary(self) -> None:
        self._require_active()
        with self._guard():
            self._check_unchanged()
            if self._world.pulse is not None:
                self._world.pulse.check()
                self._world.pulse.step = self.state["step"] + 1
            self._comm.step = self.state["step"] + 1
            self.trace.emit("step", step=self.state["step"] + 1)
            self.strategy.boundary(self.state, self)
        if self._comm.identical and not self._warned:
            self._warned = True
            warnings.warn(
                "several ranks computed exactly the same so far: they probably see the same data. Give each rank its own part, for "
                "instance with torch.utils.data.DistributedSampler",
                stacklevel=4,
            )

    def _align(self) -> None:
        """All replicas start from rank 0's parameters and buffers, frozen ones included."""
        tensors = {"tensors": [*self.model.parameters(), *self._replica.floating, *self._replica.counting]}
        with self._guard(), torch.no_grad():
            received = self._comm.broadcast_state(tensors, root=0)
            for mine, first in zip(tensors["tensors"], received["tensors"], strict=True):
                if mine is not first:
                    mine.copy_(first)

    def _offer(
        self, *, form: Literal["mean", "delta"], lane: int | None = None, wire: torch.dtype | None = None
    ) -> Offer:
        self.state["exchanges"] += 1
        return Offer(
            vector=self._replica.snapshot(),
            buffers=self._replica.pack_buffers(),
            form=form,
            lane=None if lane is None else lane % self._comm.topology.lanes,
            wire=wire,
            losses=self._losses.take(),
        )

    def _land(self, landed: Landed, *, staleness: int) -> None:
        replicas = len(self._comm.topology.nodes)
        self.strategy.land(self.state, self._replica, landed, staleness=staleness, replicas=replicas)
        self._replica.assign_buffers(landed.buffers)
        self.trace.emit("fold", staleness=staleness, step=self.state["step"])
        self.trace.emit("distance", value=landed.distance)

    def _gather(self) -> None:
        """All replicas are here: each becomes their mean, momentum included, so that they stay equal in lockstep."""
        self._adopt_mean(self._mean())
        self._average_optimizers()
        self.strategy.gathered(self.state)
        self.trace.emit("phase", name="cool-down", step=self.state["step"])

    def _reach(self, kind: Kind) -> None:
        start = self._comm.now()
        self._comm.meet(kind)
        self.trace.emit("wait", seconds=self._comm.now() - start, reason=kind.name.lower())
        self._equalise()

    def _mean(self) -> Landed:
        """The mean of all replicas, in new memory; when all ranks are one replica it has nothing to average but buffers."""
        vector = [] if self.strategy.learner == "world" else self._replica.snapshot(keep=False)
        settle = self.strategy.learner == "node" and self.strategy.scope(self.state) == "rank"
        return self._comm.average(Offer(vector=vector, buffers=self._replica.pack_buffers(), form="mean", settle=settle))

    def _adopt_mean(self, mean: Landed) -> None:
        if mean.vector:
            self._replica.assign(mean.vector)
            self.trace.emit("distance", value=mean.distance)
        self._replica.assign_buffers(mean.buffers)

    def _equalise(self) -> None:
        """Ranks that were away while their replica stepped take over everything from the one that made most steps."""
        scopes: list[Scope] = ["rank", "node", "world"]
        standings = self._comm.census(scopes.index(self._comm.missed), self.state["step"])
        widest = scopes[int(max(missed for missed, _ in standings))]
        if widest == "rank":
            return
        if self._flight is not None:
            self.fold()
        mates = range(len(standings)) if widest == "world" else self._comm.topology.mates(self.rank)
        if any(standings[rank][0] for rank in mates):
            leader = max(mates, key=lambda rank: (standings[rank][1], -rank))
            received = self._comm.broadcast_state(self._whole_state(), root=leader, scope=widest)
            if leader != self.rank:
                self._take_over(received)
        self._comm.missed = "rank"

    def _average_optimizers(self) -> None:
        moments = [
            value
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            for value in optimizer.state.get(param, {}).values()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        size = sum(moment.numel() for moment in moments)
        if len({tuple(row) for row in self._comm.census(len(moments), size)}) > 1 or not moments:
            return  # replicas that use different parameters hold different moments: they stay local
        multiple = self._comm.topology.lanes * len(self._comm.topology.nodes)
        wide = torch.float64 if any(moment.dtype == torch.float64 for moment in moments) else torch.float32
        flat = torch.cat([moment.detach().reshape(-1).to(wide) for moment in moments])
        vector = [torch.nn.functional.pad(flat, (0, -size % multiple))]
        self._comm.average(Offer(vector=vector, buffers=torch.empty(0), form="mean"))
        for moment, mean in zip(moments, vector[0][:size].split([m.numel() for m in moments]), strict=True):
            moment.copy_(mean.view(moment.shape))

    def _whole_state(self) -> dict[str, Any]:
        return {
            "vector": self._replica.snapshot(keep=False),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "state": self.state,
        }

    def _take_over(self, whole: dict[str, Any]) -> None:
        self._replica.assign(whole["vector"])
        for optimizer, state in zip(self.optimizers, whole["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.state = whole["state"]
        self._comm.step = self.state["step"]

    def _widest(self, scope: Scope) -> Scope:
        """A scope in which this rank is alone needs no communication."""
        if scope == "node" and len(self._comm.topology.mates(self.rank)) == 1:
            return "rank"
        return scope

    def _count_groups(self) -> list[int]:
        return [len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    def _check_unchanged(self) -> None:
        self._replica.check_unchanged()
        if self._count_groups() != self._groups:
            raise RuntimeError(
                f"the optimizer's parameter groups changed after attach (sizes {self._groups} before, {self._count_groups()} now), so new "
                "parameters would not be averaged; call run.finish() and attach again after add_param_group"
            )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Whatever goes wrong inside ends the run for everybody, once, with the reason."""
        try:
            yield
        except BaseException as error:
            self._break(
                str(error) if isinstance(error, CommError) else f"rank {self.rank} failed: {error}",
                culprit=_culprit(error),
            )
            raise

    def _break(self, reason: str, culprit: int | None) -> None:
        if self._active:
            self._detach()
            self._comm.abort(reason, culprit)
            self._world.owned = False  # torch's group may be stuck in an operation that nobody can cancel

    def _detach(self) -> None:
        self._active = False
        if self._averager is not None:
            self._averager.remove()
        for handle in self._handles:
            handle.remove()
        atexit.unregister(self._at_exit)
        self.closed()

    def _at_exit(self) -> None:
        self._break(f"rank {self.rank} ended its process without run.finish()", culprit=None)

    def _require_active(self) -> None:
        if not self._active:
            raise RuntimeError("this run has ended; attach the model again to go on")


def _culprit(error: BaseException) -> int | None:
    return error.rank if isinstance(error, LostPeer) else None


def _call_weakly(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
