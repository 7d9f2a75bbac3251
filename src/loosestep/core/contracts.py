"""What a strategy and a run expect of communication, whatever carries it.

An exchange is *offered* (a snapshot and what rides on it) and *lands* later. Rounds have a kind;
all ranks of a round agree on it. A rank that is at a lower kind joins its peers' higher rounds with
what it has, so nobody waits for a rank whose loader is shorter, and rounds are matched by their
sequence number, never by step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

import torch

from loosestep.codecs import Codec
from loosestep.core.pending import Pending, nothing
from loosestep.topology import Topology

Vector = list[torch.Tensor]  # one flat tensor per dtype
Scope = Literal["rank", "node", "world"]
Outer = Callable[[int, slice, torch.Tensor], torch.Tensor]
"""(number of the tensor, part of what this rank averages of it, mean) -> what the replicas
become instead of the mean.
"""

# steps that a rank makes before it takes part in a consensus that it has not called itself: loaders
# may be longer by so much, and then all see the same mean
PATIENCE = 4


class Kind(IntEnum):
    """The kinds of a round, lowest priority first: whoever is at a lower kind joins the higher
    one.
    """

    FINISH = 0
    CONSENSUS = 1
    GATHER = 2  # all replicas become their mean (the start of a cool-down)
    EXCHANGE = 3
    GRADIENTS = 4


@dataclass
class Coded:
    """How an exchange travels in codes. `kept`, a plain dict that is saved with the strategy's state:
    how many rounds there were, and what this rank owes. `reference`: what the replicas agree on. Of
    both what this rank exchanges itself, for every tensor of the vector.
    """

    codec: Codec
    kept: dict[str, Any]
    reference: Vector


@dataclass
class Codes:
    """How a parcel of gradients travels between nodes in codes: the first `values` of it, as number
    `number` of those that `coded` keeps something for. What was lost is kept["feedback"].
    """

    coded: Coded
    number: int
    values: int


@dataclass
class Offer:
    """What a replica puts into an exchange. `vector` and `buffers` are overwritten by the result.

    `form`: the result is the mean itself or the delta `mean - vector`. `lane`: None shards the
    vector over all lanes, a number sends it whole over that one. `wire`: the dtype that travels,
    None for the parameters' own. `settle`: the ranks of a node differ, so they are averaged first.
    `ready`: waits until the values have come from the device. `near`: the vector has stayed there
    and is averaged there, inside `aside`. `part`: the only row of the vector that holds values, of
    so many; the exchange fills in the others. `outer`: what is made of the mean before it is used.
    `coded`: travels in codes; the result is a delta.
    """

    vector: Vector
    buffers: torch.Tensor
    form: Literal["mean", "delta"] = "delta"
    lane: int | None = None
    wire: torch.dtype | None = None
    settle: bool = False
    part: tuple[int, int] | None = None
    outer: Outer | None = None
    coded: Coded | None = None
    losses: tuple[torch.Tensor | float, int] = (0.0, 0)
    ready: Callable[[], None] = nothing
    near: bool = False
    aside: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Landed:
    """The result of an exchange, the same numbers on every rank (vectors: on every rank of a
    node). `distance`: of the replicas from their mean, or, where that would have to be told, from
    the mean before it; nan if there was none. `staleness`: steps since the snapshot.
    """

    vector: Vector
    buffers: torch.Tensor
    loss_sum: float
    loss_count: int
    distance: float
    seconds: float
    steps: list[int] = field(default_factory=list)
    staleness: int = 0
    replicas: int = 1


@dataclass(frozen=True)
class Invitation:
    """A round that others are at, and how its vectors travel."""

    kind: Kind
    lane: int | None = None
    wire: torch.dtype | None = None
    coded: bool = False


class Member(Protocol):
    """What communication asks of a run while its compute thread waits at a lower kind."""

    def join(self, invitation: Invitation) -> None:
        """Take part in a round of the others (called on the communication thread)."""

    def find_bad(self) -> str | None:
        """The name of a parameter of this rank that holds NaN or Inf."""

    def blank_parcels(self) -> Iterable[Parcel]:
        """Zeros in the shape of what its peers average, to take part without contributing."""


class Parcel(Protocol):
    """Something to be averaged: packed and unpacked on the communication thread, so that compute
    goes on.
    """

    @property
    def flat(self) -> torch.Tensor:
        """Memory of its own, for ways of travelling that need it."""

    @property
    def codes(self) -> Codes | None:
        """How it travels between nodes; None: as it is."""

    def pack(self, into: torch.Tensor) -> None:
        """Write what is to be averaged into a flat tensor."""

    def unpack(self, parts: Sequence[torch.Tensor], divisor: int) -> None:
        """Use the sum of the parts, in order, divided by the divisor."""

    @property
    def flags(self) -> Parcel | None:
        """What the host has to know of a parcel that is averaged where it is; None if it cannot
        be.
        """

    def aside(self) -> AbstractContextManager[torch.Tensor]:
        """Its values where they are, to be overwritten; inside, the current stream is one beside
        the compute stream.
        """


class Comm(Protocol):
    """The protocol between a run and its peers."""

    rank: int
    topology: Topology
    step: int
    missed: Scope
    torn: bool
    """Whether this rank's last backward raised after a part of its gradients had been averaged;
    told at the next round.
    """
    alone: bool
    """Whether the last consensus was called by some ranks only: the next may be too."""
    asked: bool
    """Whether somebody waits for a consensus that this rank is to take part in at its boundary."""
    identical: bool
    member: Member | None
    members: int
    """How many exchange codes with each other: replicas, or the nodes that they go through."""
    own: tuple[int, int]
    """Row and number of rows: what this rank exchanges with other nodes."""
    part: tuple[int, int] | None
    """Row and number of rows: what this rank sends of a vector that is sharded over lanes; None
    for all of it.
    """

    def now(self) -> float:
        """The clock that events are stamped with."""

    def learn_order(
        self,
        vector: Sequence[tuple[int, torch.dtype]],
        buckets: Sequence[tuple[int, torch.dtype]],
        *,
        alike: bool,
    ) -> None:
        """Find out how the backend adds up vectors of such lengths, before the first of them is
        sent. `alike`: every exchange of the run is of this vector, whole and in its own types.
        """

    def all_reduce(self, offer: Offer, *, here: bool = False) -> Pending[Landed]:
        """Start one exchange of all replicas in the background, or make it on the calling thread."""

    def average(self, offer: Offer) -> Landed:
        """Average now, every rank being here already."""

    def meet(self, kind: Kind) -> None:
        """Wait until every rank is at `kind`, joining what the others do until then."""

    def agree(self, reference: Vector) -> dict[str, Any]:
        """Exchanges in codes begin, with what all replicas agree on; what is `kept` between them."""

    def census(self, *numbers: float) -> list[list[float]]:
        """Everybody's numbers, in rank order, every rank being here already."""

    def open_round(self, scope: Scope, checksum: float) -> None:
        """A backward has begun: find out who takes part in averaging its gradients."""

    def stays(self, scope: Scope) -> bool:
        """Whether the gradients of such a round are averaged on the device that they are on."""

    def reduce(self, parcel: Parcel, scope: Scope) -> Pending[None]:
        """Pack a parcel, overwrite it with its mean over the ranks that take part in the round,
        unpack it, before the last one of the round at the latest.
        """

    def reduce_here(self, parcel: Parcel, scope: Scope) -> None:
        """The same for the last parcel of a round, on the calling thread; all are unpacked then."""

    def land_gradients(self) -> None:
        """Wait until all parcels of a round are unpacked, where it has no last one."""

    def broadcast_state(
        self, state: dict[str, Any], root: int, scope: Scope = "world"
    ) -> dict[str, Any]:
        """The nested plain state of rank `root`, tensors included, on every rank of the scope."""

    def close(self) -> None:
        """End cleanly: no thread, no descriptor left."""

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """End at once and tell the others why."""
