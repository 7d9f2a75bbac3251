"""Who is one learner under gossip: what the engine asks of it, and the simplest one, a rank.

The other one is a node (`node_gossip.py`). The same tests run for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from loosestep.core.collectives.collective import Collective
from loosestep.core.contracts import Invitation, Kind, Vector
from loosestep.core.engines.collective import align
from loosestep.core.engines.gradients import GradientAverager
from loosestep.core.engines.learner import Learner
from loosestep.core.engines.momentum import momentum
from loosestep.core.errors import LostPeer
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.gossip.memory import Fold
from loosestep.core.replica.replica import Replica
from loosestep.core.replica.shards import local, reshard, sharding_modules
from loosestep.core.world import World
from loosestep.events import Trace
from loosestep.strategies.base import GossipPlan

Opens = Callable[[Vector], GossipMailbox]


class Group(Protocol):
    """A learner, as one of its ranks sees it.

    `members`: the ranks that this one gossips with, itself included, one of each learner; `place`:
    which of them speaks for this learner. `gradients`: how many a step of each member stands
    for. `shares`: whether its ranks share what has landed at every boundary. `mailbox` is None
    where this rank has nobody to talk to, and after the end.
    """

    averager: GradientAverager | None
    mailbox: GossipMailbox | None
    members: list[int]
    place: int
    gradients: dict[int, int]
    shares: bool

    def open(self, opens: Opens, join: Callable[[Invitation], None]) -> None:
        """Start from the same parameters everywhere and open the mailbox. `join` serves a mate
        that asks for a round.
        """

    def arrive(self, step: int) -> None:
        """The boundary of this step begins."""

    def leave(self) -> None:
        """The boundary of this step is complete."""

    def passes(self) -> bool:
        """Whether this boundary is taken care of in the background, so that nothing crosses now."""

    def invite(self) -> None:
        """Call the ranks of this learner that wait elsewhere: all of them share what follows."""

    def gather(self) -> Vector:
        """The tensors this rank gossips about, as they are now; what is written into them counts
        after `spread`.
        """

    def spread(self) -> None:
        """Bring what `gather` gave to all ranks of this learner, and into the model."""

    def keep(self) -> tuple[Vector, Callable[[], None]]:
        """Copy what gossip averages: what to write into, as into what `gather` gives, and what puts
        the copy back.
        """

    def serve(self, mean: torch.Tensor | None) -> None:
        """Give a mate this rank's part of a mean; the model is left alone."""

    def reach(self, kind: Kind) -> None:
        """Wait until all ranks of this learner are at this kind of round."""

    def global_steps(self) -> int:
        """The gradients of all learners, as last heard."""

    def load(self, step: int) -> None:
        """Go on after this step."""

    def close(self) -> None:
        """End in order, and let go of threads, sockets and memory."""

    def abort(self, reason: str, culprit: int | None) -> None:
        """Tell the ranks of this learner why it ends, and let go of everything."""


class RankGroup:
    """A rank that learns by itself: all of the model in one mailbox."""

    averager: GradientAverager | None = None
    mailbox: GossipMailbox | None = None
    shares = False

    def __init__(self, learner: Learner, world: World, strategy: GossipPlan) -> None:
        self.members = list(range(world.topology.world))
        self.gradients = dict.fromkeys(self.members, 1)
        self.place = world.rank
        self._learner = learner
        self._world = world
        self._average_momentum = strategy.average_momentum
        self._sharding = sharding_modules(learner.model)

    def open(self, opens: Opens, join: Callable[[Invitation], None]) -> None:
        """Start from rank 0's parameters and open the mailbox."""
        comm = Collective(
            self._world,
            self._world.topology.flat(),
            trace=self._learner.trace,
            averages_gradients=False,
        )
        with meeting(self, self._world, comm):
            align(self._learner, comm, self._world.topology)
            self.mailbox = opens(self.gather())

    def arrive(self, step: int) -> None:
        """Nobody else is told."""

    def leave(self) -> None:
        """Nobody else is told."""

    def passes(self) -> bool:
        """Parameters cross with the step."""
        return False

    def invite(self) -> None:
        """There is nobody to call."""

    def gather(self) -> Vector:
        """The model's own tensors."""
        reshard(self._sharding)
        extras = statistics(self._learner, average_momentum=self._average_momentum)
        return [
            *(local(param).data for param in self._learner.replica.params),
            *map(local, extras),
        ]

    def spread(self) -> None:
        """They are in the model already."""

    def keep(self) -> tuple[Vector, Callable[[], None]]:
        """Copy what gossip averages: the model's own tensors, and what puts the copy back."""
        tensors = self.gather()
        stash = [tensor.clone() for tensor in tensors]
        return tensors, lambda: torch._foreach_copy_(self.gather(), stash)

    def serve(self, mean: torch.Tensor | None) -> None:
        """Nobody asks."""

    def reach(self, kind: Kind) -> None:
        """Nobody else has to be there."""

    def global_steps(self) -> int:
        """The gradients of all learners, as last heard."""
        if self.mailbox is not None:
            self._heard = self.mailbox.global_steps
        return self._heard

    _heard = 0

    def load(self, step: int) -> None:
        """The mailbox knows."""

    def close(self) -> None:
        """Close the mailbox."""
        if self.mailbox is not None:
            self.global_steps()
            self.mailbox.close()
            self.mailbox = None

    def abort(self, reason: str, culprit: int | None) -> None:
        """Leave the gossip; the others go on."""
        self.close()


def statistics(learner: Learner, *, average_momentum: bool) -> Vector:
    """What is averaged beside the parameters: floating buffers, and on request the momentum."""
    momenta = momentum(learner.optimizers) if average_momentum else []
    return [*learner.replica.floating, *momenta]


@contextmanager
def meeting(group: Group, world: World, comm: Collective) -> Iterator[None]:
    """Meet all ranks at the end; who cannot come ends it for all."""
    try:
        yield
        comm.census(0)  # all mailboxes are open
    except BaseException as error:
        if isinstance(error, LostPeer):
            comm.abort(str(error), error.rank)
        else:
            comm.abort(f"rank {world.rank} could not attach: {error}")
        if group.mailbox is not None:
            group.mailbox.close()
        raise
    comm.close()


@contextmanager
def kept_positive(replica: Replica) -> Iterator[None]:
    """Keep variances positive: a late delta may pull one below zero, which becomes a tenth of
    what it was.
    """
    variances = replica.variances
    floors = torch._foreach_mul(variances, 0.1) if variances else ()
    yield
    if variances:
        below = torch._foreach_clamp_max(variances, 0.0)
        torch._foreach_sub_(variances, below)
        torch._foreach_addcmul_(variances, floors, torch._foreach_sign(below), -1.0)


def tell_fold(trace: Trace, fold: Fold, step: int, late: int = 0) -> None:
    """Log what was folded, which reached the parameters so many steps late."""
    if not fold.skipped and fold.chunks:
        trace.emit(
            "fold",
            staleness=fold.staleness_mean + late,
            staleness_max=fold.staleness_max + late,
            step=step,
            seconds=fold.seconds,
        )


def write(tensors: Vector, flat: torch.Tensor) -> None:
    """Cut a flat vector into tensors."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
