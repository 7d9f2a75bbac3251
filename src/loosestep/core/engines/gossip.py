"""The gossip engine: a mailbox averages shadows in the background, the step boundary folds them in.

A learner is a rank here (`rank_gossip.py`) or a node (`node_gossip.py`). A peer that dies costs its
own edges only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from loosestep.core.contracts import Invitation, Kind, Vector
from loosestep.core.engines.gradients import GradientAverager
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.peer_news import PeerNews
from loosestep.core.engines.rank_gossip import (
    Group,
    kept_positive,
    statistics,
    tell_fold,
    write,
)
from loosestep.core.engines.usefulness import Usefulness
from loosestep.core.errors import CommError
from loosestep.core.gossip.budget import FOLDING, Budget, Idle
from loosestep.core.gossip.contract import Exchange, GossipMailbox, Mode
from loosestep.core.world import World
from loosestep.strategies.base import GossipPlan

log = logging.getLogger("loosestep")

PARTS = 1 << 20  # of a model: shares are recorded in them
LOOK = 50  # steps between two looks at whether exchanges help


class GossipEngine:
    """Drives the strategies that gossip; is their `Gossiping`."""

    def __init__(
        self,
        learner: Learner,
        group: Group,
        *,
        strategy: GossipPlan,
        world: World,
        neighbours: int,
        open_mailbox: Callable[..., GossipMailbox],
    ) -> None:
        """`neighbours`: the ranks on this host, this one included. `open_mailbox`: a world's, or
        a replay's.
        """
        self._learner = learner
        self._group = group
        self._strategy = strategy
        self._world = world
        self.trace = learner.trace
        self._size = sum(
            tensor.numel()
            for tensor in (
                *learner.replica.params,
                *statistics(learner, average_momentum=strategy.average_momentum),
            )
        )
        self._begun: list[tuple[int, int, Exchange]] = []
        self._graph = strategy.graph_of(len(group.members))
        if self._graph.note() and world.rank == 0:
            log.warning(self._graph.note())
        self._news = PeerNews(self._graph, group.members, world=world, trace=learner.trace)
        self._news.size = self._size
        self._ended: dict[str, Any] = {}

        def opens(tensors: Vector) -> GossipMailbox:
            return open_mailbox(
                group.members,
                params=tensors,
                layout=bytes.fromhex(learner.replica.digest()),
                emit=self._news.hear,
                tape=learner.tape.writer,
                fold_share=self._fold_share(),
                codec=strategy.moves_in,
                gradients=group.gradients,
            )

        group.open(opens, self.join)
        self._budget = self._open_budget(neighbours)
        self._usefulness = Usefulness(learner.replica, str(learner.strategy))
        self._opened = self.trace.clock()

    def _fold_share(self) -> float:
        """Which part of a core folding may take: of the compute thread about what steps may lose,
        for the budget sees only what is folded more while others exchange; a thread of its own for
        an accelerator may take more, most of all for statistics, which drift apart faster.
        """
        if self._learner.replica.staging.remote and self._learner.tape.writer is None:
            return 1.0 if self._learner.replica.floating else 0.25
        return min(1.0, FOLDING * self._strategy.slowdown)

    def _open_budget(self, neighbours: int) -> Budget:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(neighbours)
        return Budget(
            self._strategy.rate,
            slowdown=self._strategy.slowdown if self._world.timed else None,
            cores=len(cores) / neighbours,
            least=self._mailbox.least_share if self._mailbox is not None else 0.0,
            idle=Idle(),
        )

    @property
    def averager(self) -> GradientAverager | None:
        """What averages gradients inside a learner of several ranks."""
        return self._group.averager

    @averager.setter
    def averager(self, averager: GradientAverager | None) -> None:
        self._group.averager = averager

    @property
    def _mailbox(self) -> GossipMailbox | None:
        return self._group.mailbox

    # The strategy's side (`Gossiping`) ------------------------------------------------------------

    def fold(self, mode: Mode = "due", *, peer: int | None = None, share: float = 1.0) -> None:
        """y <- y + u; x <- y. Where the ranks of the learner share what has landed, in all of
        them.
        """
        group = self._group
        if mode == "due":
            if group.passes():
                return
            group.invite()
        within = 0 if group.shares else self._strategy.max_staleness
        tensors = group.gather()
        with kept_positive(self._learner.replica):
            if group.mailbox is not None:
                fold = group.mailbox.cross(tensors, mode, within=within, peer=peer, share=share)
                tell_fold(self.trace, fold, self._learner.state["step"])
            if group.shares:
                group.spread()

    def due(self) -> float:
        """Which share of a model to begin to exchange now. A replay begins what was begun."""
        mailbox = self._mailbox
        if mailbox is None:
            return 0.0
        now = self.trace.clock()
        used = mailbox.cpu_seconds()
        share = self._budget.due(now, used, others=mailbox.neighbours_slower())
        mailbox.slower = self._budget.slower or 0.0
        return self._learner.tape.number(round(share * PARTS)) / PARTS

    def exchange(self, round_number: int, share: float = 1.0) -> None:
        """Begin to average with the partner of this round; never waits. The partner is to meet the
        parameters of this step, also where their fold was put off.
        """
        mailbox = self._mailbox
        group = self._group
        partner = self._graph.partner(group.place, round_number, self._alive())
        if partner is None or mailbox is None:
            return
        place, weight = partner
        peer = group.members[place]
        step = self._learner.state["step"]
        if not group.shares:
            self.fold("publish", peer=peer, share=share)
        self.trace.emit("start", exchange=round_number, step=step, peer=peer)
        pending = mailbox.exchange(peer, weight, share)
        if self._strategy.max_staleness is not None:
            self._begun.append((step, peer, pending))

    def mix(self, round_number: int) -> None:
        """One round of exactly the mixing matrix, from exactly the values of this step."""
        self._group.invite()
        self.fold("whole")
        start = self.trace.clock()
        if self._mailbox is not None:
            row = self._graph.round(self._group.place, round_number, self._alive())
            weights = {self._group.members[place]: weight for place, weight in row.items()}
            if weights:
                self.trace.emit("start", exchange=round_number, step=self._learner.state["step"])
                self._mailbox.lockstep_round(round_number, weights, timeout=self._world.deadline)
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="lockstep")
        self.fold("whole")

    def wait_for(self, age: int) -> None:
        """Wait for own exchanges that were begun `age` or more steps ago, as long as their peer
        is there.
        """
        if self._mailbox is None:
            return
        start = self.trace.clock()
        step = self._learner.state["step"]
        for begun, peer, pending in self._begun:
            while step - begun >= age and peer in self._mailbox.alive() and not pending.wait(0.05):
                if self.trace.clock() - start > self._world.deadline:
                    break
        self._begun = [exchange for exchange in self._begun if not exchange[-1].done()]
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="staleness")

    # The run's side (`Engine`) --------------------------------------------------------------------

    def boundary(self) -> None:
        """Carry out what the strategy wants after an optimizer step."""
        step = self._learner.state["step"] + 1
        self._usefulness.before(step)
        self._group.arrive(step)
        if self._mailbox is not None:
            self._mailbox.step()
        self._strategy.boundary(self._learner.state, self)
        self._group.leave()
        self._usefulness.after(step)

    def enter_consensus(self) -> Callable[[], None]:
        """Put the mean of the live learners into the model, streamed without stopping them."""
        self._group.reach(Kind.CONSENSUS)
        return self._swap_in()

    def _swap_in(self) -> Callable[[], None]:
        tensors, restore = self._group.keep()
        mean = self._mean()
        if mean is not None:
            write(tensors, mean)
        self._group.spread()
        self._floor_at_zero()
        return restore

    def _mean(self) -> torch.Tensor | None:
        """The mean of the live learners, as far as this rank gossips about it."""
        if self._mailbox is None:
            return None
        return torch.from_numpy(self._mailbox.consensus(timeout=None))

    def join(self, invitation: Invitation) -> None:
        """Take part in what the other ranks of this learner do while this one waits."""
        with self._learner.replica.staging.stand_in():
            if invitation.kind is Kind.EXCHANGE:
                if self._mailbox is not None:
                    self._mailbox.step()
                self.fold("whole")
            else:
                self._group.serve(self._mean())

    def finish(self) -> None:
        """Answer until every live learner is done, then hold the same parameters as all of them."""
        self._news.ending = True
        self._group.reach(Kind.FINISH)
        start = self.trace.clock()
        tensors = self._group.gather()
        if self._mailbox is not None:
            self._require_sound(tensors)
            self._mailbox.finish(tensors)
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="finish")
        self._group.spread()
        self._floor_at_zero()
        self._ended = self.stats()
        self._group.close()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Leave the gossip; the others go on."""
        self._news.ending = True
        self.trace.emit("abort", reason=reason)
        self._ended = self.stats()
        self._group.abort(reason, culprit)

    def global_steps(self) -> int:
        """Count the gradients of all learners, as last heard from each."""
        return self._group.global_steps()

    def stats(self) -> dict[str, Any]:
        """Tell what the mailbox counts."""
        mailbox = self._mailbox
        if mailbox is None:
            return self._ended
        counters = mailbox.counters
        seconds = self.trace.clock() - self._opened
        return {
            "exchanges": counters["exchanges"],
            "exchanges_per_second": counters["exchanges"] / seconds if seconds > 0 else 0.0,
            "bytes_sent": counters["bytes_sent"],
            "bytes_between_nodes": self._news.between_nodes(counters["bytes_sent"]),
            "consensus_distance": mailbox.consensus_distance * self._size**0.5,
            "exchanges_per_step": counters["exchanges"] / max(1, self._learner.state["step"]),
            "megabytes_per_second": counters["bytes_sent"] / 1e6 / seconds if seconds > 0 else 0.0,
            "distance_in_steps": self._usefulness.distance_in_steps(mailbox.consensus_distance),
            "queue_full": counters.get("queue_full", 0),
            "repeated": counters.get("repeated", 0),
            "rate": self._budget.current,
            "slower": self._budget.slower,
            "learners": len(mailbox.alive()) + 1,
            "lost": sorted(mailbox.lost()),
            "communication_cpu_seconds": mailbox.cpu_seconds(),
            "fold_seconds": counters["fold_seconds"],
            "fold_cpu_seconds": counters["fold_cpu_seconds"],
            "rejected": counters["rejected"],
        }

    def advice(self) -> str | None:
        """What to do where exchanges are too rare to help, once that is known."""
        mailbox = self._mailbox
        step = self._learner.state["step"]
        if mailbox is None or self._strategy.lockstep or len(self._group.members) < 2:
            return None
        if step % LOOK or not mailbox.alive() or self._world.rank != 0:
            return None  # the ranks of a host keep one pace, and one line is enough
        return self._usefulness.advice(
            step,
            exchanges=mailbox.counters["exchanges"],
            wanted=self._strategy.rate,
            limit=self._budget.rate if self._budget.too_rare else None,
            distance=mailbox.consensus_distance,
            age=self.trace.totals.staleness_mean,
        )

    def save(self) -> dict[str, Any]:
        """Save nothing: gossip resumes from the parameters, and what is in the air is not part
        of a checkpoint.
        """
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on counting steps, from parameters that are in the shadow before anybody asks for
        them.
        """
        if self._mailbox is not None:
            self._mailbox.steps = self._learner.state["step"]
        self._group.load(self._learner.state["step"])
        if not self._news.ending:
            self.fold("whole")

    # Inside ---------------------------------------------------------------------------------------

    def _alive(self) -> set[int]:
        """The places of the learners that are there."""
        assert self._mailbox is not None
        alive = {*self._mailbox.alive(), self._group.members[self._group.place]}
        return {place for place, rank in enumerate(self._group.members) if rank in alive}

    def _floor_at_zero(self) -> None:
        """Variances of the mean, the same on every rank."""
        for variance in self._learner.replica.variances:
            variance.clamp_(min=0)

    def _require_sound(self, tensors: Vector) -> None:
        """A learner whose parameters are spoilt leaves before the others average theirs."""
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise CommError(
                f"the parameters of rank {self._world.rank} contain NaN or Inf at step "
                f"{self._learner.state['step']}: they are not part of the result, and the other "
                "ranks end without this one. Lower the learning rate or clip gradients"
            )
