"""The gossip engine: a mailbox averages shadows in the background, the step boundary folds them in.

A learner is a rank here, or a node (`gossip_nodes.py`). A peer that dies costs its own edges only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loosestep.core.collectives.collective import Collective
from loosestep.core.contracts import Vector
from loosestep.core.engines.collective import align
from loosestep.core.engines.gradients import GradientAverager
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.momentum import momentum
from loosestep.core.errors import CommError, LostPeer
from loosestep.core.gossip.budget import FOLDING, RELAYING, Pace
from loosestep.core.gossip.contract import Exchange, GossipMailbox, Mode
from loosestep.core.gossip.replayed_mailbox import ReplayedMailbox
from loosestep.core.gossip.shadow import Fold
from loosestep.core.replica.shards import local, reshard, sharding_modules
from loosestep.core.world import World
from loosestep.record.player import Player
from loosestep.record.recorder import Recorder
from loosestep.strategies.base import GossipPlan

log = logging.getLogger("loosestep")


class GossipEngine:
    """Drives the strategies that gossip; is its `Gossiping`."""

    averager: GradientAverager | None = None

    def __init__(
        self,
        learner: Learner,
        strategy: GossipPlan,
        *,
        world: World,
        neighbours: int,
        key: str | None,
        encrypt: bool,
    ) -> None:
        self._learner = learner
        self._strategy = strategy
        self._world = world
        self.trace = learner.trace
        self._sharding = sharding_modules(learner.model)
        self._size = sum(
            tensor.numel() for tensor in (*learner.replica.params, *self._statistics())
        )
        self._begun: list[tuple[int, int, Exchange]] = []
        cores = (
            len(os.sched_getaffinity(0)) / neighbours if hasattr(os, "sched_getaffinity") else 1.0
        )
        if not learner.replica.staging.remote:
            cores = min(1.0, cores)  # the others compute
        self._pace = Pace(strategy.rate, share=strategy.cpu_share, cores=cores)
        self._fold_share = FOLDING * strategy.cpu_share * cores
        if learner.replica.staging.remote and not isinstance(learner.tape, Recorder):
            # As often as the relay can where there are statistics, which drift apart faster than
            # parameters.
            self._fold_share = 1.0 if learner.replica.floating else RELAYING
        self._mailbox: GossipMailbox | None = None
        self._members = self._lane()
        self._gone = set[int]()
        self._parts = 1
        self._ending = False
        self._slow: set[int] = set()  # peers that the user has been told about
        self._graph = strategy.graph_of(len(self._members))
        if self._graph.note() and world.rank == 0:
            log.warning(self._graph.note())
        self._open_mailbox(key, encrypt)
        self._opened = self.trace.clock()

    # Who I am -------------------------------------------------------------------------------------

    def _open_mailbox(self, key: str | None, encrypt: bool) -> None:
        """Every rank is a learner: all of the model in one mailbox."""
        world = self._world
        self._me = world.rank
        comm = Collective(world, world.topology.flat(), trace=self.trace, averages_gradients=False)
        with self._meeting(comm):
            align(self._learner, comm, world.topology)
            self._mailbox = self._make_mailbox(self._tensors(), key, encrypt)

    def _lane(self) -> list[int]:
        """The ranks that speak for the learners: all."""
        return list(range(self._world.topology.world))

    @property
    def _mates(self) -> int:
        """The ranks whose gradients a step of this learner stands for."""
        return 1

    @contextmanager
    def _meeting(self, comm: Collective) -> Iterator[None]:
        """Everybody is here at the end; who cannot be ends it for all."""
        try:
            yield
            comm.census(0)  # all mailboxes are open
        except BaseException as error:
            if isinstance(error, LostPeer):
                comm.abort(str(error), error.rank)
            else:
                comm.abort(f"rank {self._world.rank} could not attach: {error}")
            if self._mailbox is not None:
                self._mailbox.close()
            raise
        comm.close()

    def _make_mailbox(self, tensors: Vector, key: str | None, encrypt: bool) -> GossipMailbox:
        tape = self._learner.tape
        if isinstance(tape, Player):
            return ReplayedMailbox(tape, world=self._members, params=tensors)
        return self._world.mailbox(
            self._members,
            params=tensors,
            layout=bytes.fromhex(self._learner.replica.digest()),
            key=key,
            encrypt=encrypt,
            emit=self._event,
            tape=tape if isinstance(tape, Recorder) else None,
            fold_share=self._fold_share,
            gradients=self._mates,
        )

    def _statistics(self) -> Vector:
        """What is averaged beside the parameters: floating buffers, and on request the momentum."""
        momenta = momentum(self._learner.optimizers) if self._strategy.average_momentum else []
        return [*self._learner.replica.floating, *momenta]

    def _tensors(self) -> Vector:
        reshard(self._sharding)
        return [
            *(local(p).data for p in self._learner.replica.params),
            *map(local, self._statistics()),
        ]

    # The strategy's side (`Gossiping`) ------------------------------------------------------------

    def fold(self) -> None:
        """y <- y + u; x <- y"""
        self._step()
        self._land("due", within=self._strategy.max_staleness)

    def _publish(self) -> None:
        """The same before an exchange, where this step's fold was put off: the peer is to meet
        what is, not what was.
        """
        self._land("publish")

    def _step(self) -> None:
        if self._mailbox is not None:
            self._mailbox.step()

    def _land(self, mode: Mode, *, within: int | None = None) -> None:
        floors = self._floors()
        self._cross(self._tensors(), mode, within=within)
        self._keep_positive(floors)

    def _cross(self, tensors: Vector, mode: Mode, *, within: int | None = None) -> None:
        """y <- y + u; x <- y"""
        assert self._mailbox is not None
        self._note(self._mailbox.cross(tensors, mode, within=within))

    def _note(self, fold: Fold, late: int = 0) -> None:
        """Tell what was folded, which reached the parameters so many steps late."""
        if not fold.skipped and fold.chunks:
            self.trace.emit(
                "fold",
                staleness=fold.staleness_mean + late,
                staleness_max=fold.staleness_max + late,
                step=self._learner.state["step"],
                seconds=fold.seconds,
            )

    def due(self) -> int:
        """How many exchanges to begin now."""
        if self._mailbox is None:
            return 0
        return self._learner.tape.number(
            self._pace.due(self.trace.clock(), self._mailbox.cpu_seconds())
        )

    def exchange(self, round_number: int) -> None:
        """Begin to average with the partner of this round; never waits."""
        assert self._mailbox is not None
        partner = self._graph.partner(self._me, round_number, self._alive())
        if partner is None:
            return
        peer, weight = partner
        self._publish()
        self.trace.emit(
            "start",
            exchange=round_number,
            step=self._learner.state["step"],
            peer=self._members[peer],
        )
        pending = self._mailbox.exchange(self._members[peer], weight)
        if self._strategy.max_staleness is not None:
            self._begun.append((self._learner.state["step"], self._members[peer], pending))

    def mix(self, round_number: int) -> None:
        """One round of exactly the mixing matrix, from exactly the values of this step."""
        self._step()
        self._land("whole")
        row = (
            self._graph.round(self._me, round_number, self._alive())
            if self._mailbox is not None
            else {}
        )
        start = self.trace.clock()
        if row and self._mailbox is not None:
            self.trace.emit("start", exchange=round_number, step=self._learner.state["step"])
            weights = {self._members[peer]: weight for peer, weight in row.items()}
            self._mailbox.lockstep_round(round_number, weights, timeout=self._world.deadline)
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="lockstep")
        self._land("whole")

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
        """An optimizer step was made."""
        self._strategy.boundary(self._learner.state, self)

    def enter_consensus(self) -> Callable[[], None]:
        """The mean of the live learners, streamed without stopping them."""
        assert self._mailbox is not None
        mean = torch.from_numpy(self._mailbox.consensus(timeout=None))
        tensors = self._tensors()
        stash = [tensor.clone() for tensor in tensors]
        write(tensors, mean)
        self._floor_at_zero()
        return lambda: torch._foreach_copy_(self._tensors(), stash)

    def finish(self) -> None:
        """Answer until every live learner is done, then hold the same parameters as all of them."""
        assert self._mailbox is not None
        start = self.trace.clock()
        self._ending = True
        self._require_sound(self._tensors())
        self._mailbox.finish(self._tensors())
        self._floor_at_zero()
        self.trace.emit("wait", seconds=self.trace.clock() - start, reason="finish")
        self._end()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Leave the gossip; the others go on."""
        self._ending = True
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
            return (
                self._last[1]
                if self._last
                else int(self._learner.state["step"]) * self._world.topology.world
            )
        return self._mailbox.global_steps

    def stats(self) -> dict[str, Any]:
        """What the mailbox counts."""
        mailbox = self._mailbox
        if mailbox is None:
            return self._last[0] if self._last else {}
        counters = mailbox.counters
        seconds = self.trace.clock() - self._opened
        return {
            "exchanges": counters["exchanges"],
            "exchanges_per_second": counters["exchanges"] / seconds if seconds > 0 else 0.0,
            "bytes_sent": counters["bytes_sent"],
            "bytes_between_nodes": self._between_nodes(counters["bytes_sent"]),
            "consensus_distance": mailbox.consensus_distance * self._size**0.5,
            "rate": self._pace.current,
            "learners": len(mailbox.alive()) + 1,
            "lost": sorted(mailbox.lost()),
            "communication_cpu_seconds": mailbox.cpu_seconds(),
            "fold_seconds": counters["fold_seconds"],
            "fold_cpu_seconds": counters["fold_cpu_seconds"],
            "rejected": counters["rejected"],
        }

    @property
    def _node(self) -> int:
        return self._world.topology.node_of(self._world.rank)

    def _between_nodes(self, sent: int) -> int:
        """How many of these bytes went to other nodes, if all peers got as much."""
        strangers = [
            rank for rank in self._members if self._world.topology.node_of(rank) != self._node
        ]
        return sent * len(strangers) // max(1, len(self._members) - 1)

    def advice(self) -> str | None:
        """Nothing to say so far."""
        return None

    def save(self) -> dict[str, Any]:
        """Gossip resumes from the parameters: what is in the air is not part of a checkpoint."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """The progress counter goes on, from parameters that are in the shadow before anybody
        asks for them.
        """
        if self._mailbox is not None:
            self._mailbox.steps = self._learner.state["step"]
        if not self._ending:
            self._land("whole")

    # Inside ---------------------------------------------------------------------------------------

    def _alive(self) -> set[int]:
        assert self._mailbox is not None
        alive = self._mailbox.alive()
        return {
            index for index, rank in enumerate(self._members) if rank in alive or index == self._me
        }

    def _floors(self) -> Vector:
        """A tenth of every variance."""
        variances = self._learner.replica.variances
        return list(torch._foreach_mul(variances, 0.1)) if variances else []

    def _keep_positive(self, floors: Vector) -> None:
        """Variances stay positive: a late delta may pull one below zero, which becomes its
        floor.
        """
        if variances := self._learner.replica.variances:
            below = torch._foreach_clamp_max(variances, 0.0)
            torch._foreach_sub_(variances, below)
            torch._foreach_addcmul_(variances, floors, torch._foreach_sign(below), -1.0)

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

    def _event(self, kind: str, **fields: Any) -> None:
        """Called by the mailbox, from either thread: log it, and tell the user once what
        concerns him.
        """
        if kind == "traffic":
            self._log_traffic(**fields)
            return
        self.trace.emit(kind, **fields)
        if kind == "peer_dead":
            log.warning(
                "rank %s is gone (%s); the others go on without it",
                fields.get("peer"),
                fields.get("why"),
            )
        if kind == "peer_left" and not fields["finished"]:
            log.warning(
                "rank %s has left before the end; the others go on, and its model is not part of "
                "their result",
                fields["peer"],
            )
        if kind in ("peer_dead", "peer_left") and not self._ending:
            self._check_graph(fields["peer"])
        if kind == "peer_no_progress":
            if fields["peer"] in self._slow:  # at every long step of the same peer
                return
            self._slow.add(fields["peer"])
        if kind in ("peer_no_progress", "frame_refused", "mailbox_failed"):
            log.warning(
                "%s: %s", kind.replace("_", " "), ", ".join(f"{k}={v}" for k, v in fields.items())
            )

    def _log_traffic(self, *, sent: int, distance: float) -> None:
        if sent:
            self.trace.emit("sent", bytes=sent, between_nodes=self._between_nodes(sent))
            self.trace.emit("distance", value=distance * self._size**0.5)

    def _check_graph(self, gone: int) -> None:
        """Say so when learners are left that no longer hear of each other."""
        self._gone.add(gone)
        parts = self._graph.parts(
            {index for index, rank in enumerate(self._members) if rank not in self._gone}
        )
        if len(parts) > self._parts:
            named = [[self._members[index] for index in part] for part in parts]
            self.trace.emit("graph_apart", parts=named)
            log.warning(
                "without rank %s the graph has fallen apart: the ranks %s average among "
                "themselves only, until the end of the run",
                gone,
                " and ".join(map(str, named)),
            )
        self._parts = len(parts)


def write(tensors: Vector, flat: torch.Tensor) -> None:
    """Cut a flat vector into tensors."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
