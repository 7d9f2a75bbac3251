"""A run: hooks, life cycle, consensus and state of one attached model."""

from __future__ import annotations

import atexit
import copy
import logging
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from loosestep.core.engines.base import Engine
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.wrapped import hold_sync
from loosestep.core.errors import CommError, LostPeer
from loosestep.core.plain_torch import plain_torch
from loosestep.core.replica.shards import local
from loosestep.core.world import World
from loosestep.events import Totals
from loosestep.record.recorder import digest_of

log = logging.getLogger("loosestep")

VERSION = 1


class Run:
    """What `attach` returns. Use it as a context manager, or call `finish()` at the end."""

    def __init__(
        self,
        learner: Learner,
        engine: Engine,
        *,
        world: World,
        hooks: bool,
        closed: Callable[[], None],
    ) -> None:
        self.model = learner.model
        self.optimizers = learner.optimizers
        self.strategy = learner.strategy
        self.rank = world.rank
        self.topology = world.topology
        self.trace = learner.trace
        self._learner = learner
        self._engine = engine
        self._world = world
        self._closed = closed
        self.tape = learner.tape
        self._global_steps = engine.global_steps()
        self._order: dict[int, int] = {}  # the place of each optimizer in a step
        self._stepped: set[int] = set()  # the places that this step has come by
        self._groups = self._count_groups()
        self._active = True
        self._warned = False
        self._handlers: dict[int, Any] = {}  # that the user's signals had before
        # a compiled step ends its graph here instead of tracing us
        after_step = torch.compiler.disable(self._after_step)
        self._handles = (
            [o.register_step_post_hook(after_step) for o in self.optimizers] if hooks else []
        )
        self._exit = partial(_call_weakly, weakref.WeakMethod(self._at_exit))
        atexit.register(self._exit)
        totals = self.trace.totals if world.topology.world > 1 else None
        self._reminder = weakref.finalize(self, _remind, world.rank, totals)

    def observe(self, loss: torch.Tensor | float) -> None:
        """Feed the schedule and the metrics with a training loss. Costs no synchronisation."""
        self._learner.losses.add(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging; the next backward outside averages the sum."""
        averager = self._engine.averager
        with averager.no_sync() if averager is not None else nullcontext(), hold_sync(self.model):
            yield

    def step(self) -> None:
        """The step boundary, for `hooks=False`: call it after `optimizer.step()`."""
        self._boundary()

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Inside, the model is the mean of all replicas; afterwards it is what it was.

        A rank may call it alone: the others take part at their next step boundary, or before the
        gradients that they need from this rank, and do not wait for what it does inside. Under
        collective strategies the first time takes a few steps, in which they wait for their own.
        """
        self._require_active()
        with self._guard():
            self._come_out_of_turn()
            restore = self._engine.enter_consensus()
        try:
            yield self.model
        finally:
            with plain_torch():
                self._learner.replica.wait_for_readers()
                restore()

    def finish(self) -> None:
        """Drain what is in flight and leave the same parameters on every rank. Training may go
        on alone afterwards.
        """
        if not self._active:
            return
        with self._guard():
            self._come_out_of_turn()
            self._engine.finish()
            self._global_steps = self.tape.ended(self._engine.global_steps(), self._digest)
            self._detach()
        self._let_go()
        self._learner.to_host()  # not after a failure, when a device may never answer
        self._world.close()

    def stop(self) -> None:
        """Ask all ranks to end: `should_stop` turns true here at once and on the others within a
        heartbeat. Nothing else happens: the loop looks, breaks, and `finish` leaves all equal.
        """
        self._world.stop.asked = True

    @property
    def should_stop(self) -> bool:
        """Whether somebody has asked the ranks to end; never true unless `stop` was called, or a
        signal came after `stop_on`.
        """
        return self._world.stop.asked

    def stop_on(self, *signals: int) -> None:
        """Call `stop` when one of these signals comes (SIGTERM if none is named), until the run
        ends: for time limits (`#SBATCH --signal=TERM@120`), `scancel`, a preempted pod.
        """
        for number in signals or (signal.SIGTERM,):
            self._handlers[number] = signal.signal(number, lambda *_: self.stop())

    def recorded(self, compute: Callable[[], Any]) -> Any:
        """What `compute()` gives, as JSON holds it; in a replay what it gave then. For whatever
        else depends on time.
        """
        return self.tape.value(compute)

    def notes(self, name: str) -> dist.Store:
        """A store that all ranks of this run share, for whatever the training needs to agree on."""
        return self._world.notes(name)

    @property
    def state(self) -> dict[str, Any]:
        """Where the strategy is: a plain dict."""
        return self._learner.state

    @property
    def global_steps(self) -> int:
        """Gradients of all learners up to the last step: for schedules and for stopping. Under
        gossip as heard by then.
        """
        return self._global_steps

    @property
    def stats(self) -> dict[str, Any]:
        """Where the run is, as a plain dict computed from its events."""
        totals = self.trace.totals
        return {
            "steps": totals.steps,
            "global_steps": self.global_steps,
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
            **self._engine.stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to resume exactly, beside the model and the optimizers.
        Differs between ranks.
        """
        with plain_torch():
            engine = self._engine.save()  # first: what is in flight may change the strategy's state
        return {
            "version": VERSION,
            "strategy": str(self.strategy),
            "state": copy.deepcopy(self.state),
            "losses": [float(self._learner.losses.sum), self._learner.losses.count],
            "steps": self.trace.totals.steps,
            **engine,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken; load the model and the optimizers of the same
        rank before.
        """
        if state.get("version") != VERSION:
            raise ValueError(
                f"this state has version {state.get('version')!r}, expected {VERSION}; it was "
                "written by another release"
            )
        if state["strategy"] != str(self.strategy):
            raise ValueError(
                f"this state belongs to the strategy {state['strategy']}, the run uses "
                f"{self.strategy}; attach with the same one"
            )
        self._learner.state = copy.deepcopy(state["state"])
        self._learner.losses.sum, self._learner.losses.count = state["losses"]
        self.trace.totals.steps = state["steps"]
        with plain_torch():
            self._engine.load(state)
        self._global_steps = self._engine.global_steps()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            reason = (
                str(error)
                if isinstance(error, LostPeer)
                else f"rank {self.rank} left the run: {_spell(error)}"
            )
            self._break(reason, culprit=_culprit(error))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._engine.averager is not None:
            with self._guard():
                self._engine.averager.check_step()
        # a GradScaler leaves it to a fused optimizer to do nothing
        if getattr(optimizer, "found_inf", None) is not None:
            self.strategy.scaled(self.state)
        place = self._order.setdefault(id(optimizer), len(self._order))
        # a GradScaler left another one out: this is the next step
        if place <= max(self._stepped, default=-1):
            self._stepped.clear()
        self._stepped.add(place)
        if len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._boundary()

    def _boundary(self) -> None:
        self._require_active()
        with self._guard():
            self._world.worked()
            self._check_unchanged()
            self.trace.emit("step", step=self.state["step"] + 1)
            self.tape.step()
            self._engine.boundary()
            self._global_steps = self.tape.stepped(self._engine.global_steps(), self._digest)
        advice = None if self._warned else self._engine.advice()
        if advice is not None:
            self._warned = True
            warnings.warn(advice, stacklevel=4)

    def _come_out_of_turn(self) -> None:
        """The parameters are about to be overwritten, not after a step but whenever the user
        asks for it.
        """
        self._learner.replica.check_places()
        self._learner.replica.wait_for_readers()
        if self._engine.averager is not None:
            self._engine.averager.close()

    def _digest(self) -> int:
        replica = self._learner.replica
        return digest_of([*map(local, replica.params), *replica.floating])

    def _count_groups(self) -> list[int]:
        return [
            len(group["params"])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def _check_unchanged(self) -> None:
        self._learner.replica.check_unchanged()
        if self._count_groups() != self._groups:
            raise RuntimeError(
                f"the optimizer's parameter groups changed after attach (sizes {self._groups} "
                f"before, {self._count_groups()} now), so new parameters would not be averaged; "
                "call run.finish() and attach again after add_param_group"
            )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Whatever goes wrong inside ends the run, once, with the reason."""
        try:
            with plain_torch():
                yield
        except BaseException as error:
            reason = (
                str(error) if isinstance(error, CommError) else f"rank {self.rank} failed: {error}"
            )
            self._break(reason, culprit=_culprit(error))
            raise

    def _break(self, reason: str, culprit: int | None) -> None:
        if self._active:
            self._detach()
            self.tape.breaking(reason)
            self._engine.abort(reason, culprit)
            self.tape.aborted(reason)
            # but torch's group is kept: it may be stuck in an operation that nobody can cancel
            self._let_go()

    def _detach(self) -> None:
        self._active = False
        if self._engine.averager is not None:
            self._engine.averager.remove()
        for handle in self._handles:
            handle.remove()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        atexit.unregister(self._exit)
        self._reminder.detach()
        self._closed()

    def _let_go(self) -> None:
        """Of memory. Communication has ended: nothing is queued any more that would read or
        write it.
        """
        self._engine.averager = None
        self._learner.replica.let_go()

    def _at_exit(self) -> None:
        self._reminder()
        self._break(f"rank {self.rank} ended its process without run.finish()", culprit=None)

    def _require_active(self) -> None:
        if not self._active:
            raise RuntimeError("this run has ended; attach the model again to go on")


def _spell(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _culprit(error: BaseException) -> int | None:
    return error.rank if isinstance(error, LostPeer) else None


def _remind(rank: int, totals: Totals | None) -> None:
    """At the end of the process, or when the run is thrown away; but not after an exception."""
    if totals is not None and totals.steps and not hasattr(sys, "last_value"):
        log.warning(
            "rank %s has ended without run.finish(): its parameters are those of its own training, "
            "not what all ranks have learned, and they differ between ranks. Call run.finish() "
            "before saving, or train inside `with loosestep.attach(...) as run:`",
            rank,
        )


def _call_weakly(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
