"""Collective communication on torch.distributed: exchanges of parameters and averages of gradients.

Two threads, each with its own process groups: *exchanges* (slow, across nodes, in the background
for several steps) and *gradients* (fast, inside the node, during backward). Every operation starts
with a round in which the ranks tell each other what they are at; whoever is at a lower kind joins
the higher one with what it has. That round, and whatever the host has to know, travels over the
host always; gradients and vectors may stay on the devices (`near.py`).
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from loosestep.core.collectives.coded import (
    Scratch,
    Sums,
    average_row,
    average_through_nodes,
    average_with_feedback,
    begin_codes,
)
from loosestep.core.collectives.gloo import Channel, ordered_sum
from loosestep.core.collectives.groups import Channels, have
from loosestep.core.collectives.ring import WIDE
from loosestep.core.collectives.surroundings import Surroundings
from loosestep.core.contracts import (
    PATIENCE,
    Coded,
    Codes,
    Invitation,
    Kind,
    Landed,
    Member,
    Offer,
    Parcel,
    Scope,
    Vector,
)
from loosestep.core.errors import CommError
from loosestep.core.pending import Pending, T
from loosestep.core.plain_state import flatten, unflatten
from loosestep.events import Trace
from loosestep.topology import Topology

log = logging.getLogger("loosestep")

PIECE = 1 << 20  # elements that travel at a time where memory would be needed several times over
BLOCK = 1 << 16  # elements that are worked on at a time: they stay in the processor's cache
# the columns of an exchange's header
COLUMNS = 10
SEQUENCE, KIND, STEP, LOSS, COUNT, CHECKSUM, BEFORE, LANE, WIRE, CODED = range(COLUMNS)
SICK = 2  # in the last column: values to be coded are not finite
Sizes = Sequence[tuple[int, torch.dtype]]
Advance = Callable[[slice, torch.Tensor], torch.Tensor]  # what is made of a span's mean
WIRES: list[torch.dtype | None] = [None, torch.bfloat16, torch.float16, torch.float32]


class Standing(NamedTuple):
    """What a rank is at when gradients are averaged."""

    kind: float
    wide: float  # over the world, not the node
    checksum: float  # of its gradients of the round before
    agrees: float  # to what its engine would do at the next boundary
    torn: float  # its last backward raised when others had a part of its gradients
    gives: float = 0.0  # whoever waits for a consensus gets it before this round


class Collective:
    """The `Comm` of every strategy that is no gossip."""

    def __init__(
        self,
        world: Surroundings,
        topology: Topology,
        *,
        trace: Trace,
        averages_gradients: bool,
        through: Topology | None = None,
        lanes: int | None = None,
        shards: bool = False,
        stages: bool = False,
    ) -> None:
        """`topology`: the replicas. `through`: where these are single ranks, the nodes that their
        averages go through, so that a link carries a node's sum once and not every rank's own
        values. `shards`: every rank of a node holds other parameters; `stages`: and other buffers.
        """
        self.rank = world.rank
        self.topology = topology
        self._nodes = through or topology
        # every rank of a node holds another part of the model: lanes have nothing to share
        self._shards = shards
        self._stages = stages
        self.member: Member | None = None
        self.step = 0  # the run keeps it current
        self.part: tuple[int, int] | None = None
        # the widest scope whose gradients were averaged without us since we last met
        self.missed: Scope = "rank"
        self.torn = False  # our last backward raised when others had a part of its gradients
        self.gives = True  # a consensus, beside a backward, for which it only reads
        self.alone = False  # the last consensus was not called by all ranks
        self.asked = False  # for a consensus, by somebody who waits for it
        self._passed = 0  # rounds of gradients since somebody waits for a consensus
        self.identical = False  # several replicas did exactly the same so far
        self._pulse = world.pulse
        self._trace = trace
        self._now = world.now
        weights = topology.weights
        self._weights = None if len(set(weights)) == 1 else weights
        self._total = len(weights) if self._weights is None else sum(weights)
        nodes = self._nodes
        # fewer when other nodes, which this comm does not know, are smaller
        lanes = lanes or nodes.lanes
        reach = world.reach
        mates = nodes.mates(world.rank)
        apart = reach is not None and reach.lanes
        self._x = Channels(
            "exchanges",
            world=world,
            nodes=nodes,
            lanes=lanes,
            near_node=apart and not shards,
            near_lane=apart,
        )
        if lanes > 1 and nodes == topology and not shards:
            self.part = self._x.node.row(lanes), lanes
        self.members = len(nodes.nodes)
        self.own = (0, 1) if shards else (self._x.node.row(lanes), lanes)
        self._scratch = Scratch()
        self._gradient_scratch = Scratch()  # of another thread
        self._g: Channels | None = None
        if averages_gradients:
            near = reach is not None and reach.gradients and len(mates) > 1 and reach.apart(mates)
            self._g = Channels("gradients", world=world, nodes=nodes, lanes=lanes, near_node=near)
        self._exchanges = world.stream("exchanges")
        self._gradients = world.stream("gradients") if averages_gradients else None
        self._order: Pending[None] | None = None
        # what every exchange begins with, so that headers ride on it: a length and a type
        self._first: tuple[int, torch.dtype] | None = None
        self._sum: torch.Tensor | None = None  # of it, between the nodes
        # the first bucket of gradients, if what ranks are at can ride on it, and what is not told
        self._bucket: tuple[int, torch.dtype] | None = None
        self._flying: deque[Callable[[], None]] = deque()  # sums of gradients under way
        self._untold: tuple[Standing, list[Standing]] | None = None
        self._before = math.nan  # how far this rank was from the last mean, squared
        self._sequence = 0
        self._same = self._same_gradients = 0
        self._may_be_same = len(topology.nodes) > 1
        self._contributors = 1
        # the ranks whose gradients were averaged in the last round
        self.present = list(range(topology.world))
        # asked at the beginning of a round, for all to know
        self.agrees: Callable[[], bool] = lambda: False
        self.all_agree = False  # whether each of them did, at the beginning of the last round

    def now(self) -> float:
        """Seconds on the run's clock."""
        return self._now()

    def learn_order(self, vector: Sizes, buckets: Sizes, *, alike: bool) -> None:
        """Find out, in the background, whether the backend adds up as is known of it, vectors of
        such lengths; otherwise sums are taken in rank order, at twice the price. `alike`: every
        exchange of the run is of such a vector, whole and in its own types, so that headers can
        ride on it.
        """
        lanes = 1 if self._shards else self._x.lanes
        through = self._nodes != self.topology
        mine = [
            (size // lanes, torch.promote_types(dtype, torch.float32) if through else dtype)
            for size, dtype in vector
        ]
        sizes = {*mine, *((size // lanes, dtype) for size, dtype in buckets)}
        if not alike:
            sizes.update(vector)
        elif mine and not self._shards and self._x.near_lane is None:
            size, dtype = self._first = mine[0]
            sizes.add((size + self._x.room(COLUMNS), dtype))
        if alike and buckets and not self._shards:
            size, dtype = buckets[0]
            self._bucket = size // lanes, dtype
            sizes.add((size // lanes + self._x.room(len(Standing._fields)), dtype))
        known = sorted((s for s in sizes if s[1] in WIDE and s[0] > 0), key=str)
        self._order = self._exchanges.submit(lambda: self._learn_order(known))

    def _learn_order(self, sizes: list[tuple[int, torch.dtype]]) -> None:
        lane = self._x.lane
        if len(self._nodes.nodes) <= 2:  # the sum of two numbers has no order
            return
        follows = lane is None or lane.follows_ring(sizes)
        if not bool(self._x.tell(follows).all()):
            log.warning(
                "torch's all-reduce does not add up as the release did that loosestep was written "
                "for: sums are taken in rank order instead, which costs about twice as much"
            )
            return
        for channels in filter(None, (self._x, self._g)):
            channels.rely_on_ring()

    # Exchanges of parameters ----------------------------------------------------------------------

    def all_reduce(self, offer: Offer, *, here: bool = False) -> Pending[Landed]:
        """Start one exchange of all replicas in the background, or make it on the calling thread:
        then nobody has to wake another one up.
        """
        if not here:
            return self._exchanges.submit(lambda: self._exchange(offer))
        landed: Pending[Landed] = Pending()
        landed.fulfil(self._exchanges.here(lambda: self._exchange(offer)))
        return landed

    def average(self, offer: Offer) -> Landed:
        """Average now, every rank being here already (after `meet`, or while joining)."""

        def now() -> Landed:
            with offer.aside():
                return self._average(offer, self._call(Kind.EXCHANGE, offer))

        return self._exchanges.run(now)

    def submit(self, task: Callable[[], T]) -> Pending[T]:
        """Do something on the thread of exchanges, in its turn: `invite`, `average` and the
        like, for which nobody waits.
        """
        return self._exchanges.submit(task)

    def invite(self) -> None:
        """Start a round by hand: who waits at a lower kind joins, then everybody is here for
        `average` and the like.
        """
        self._exchanges.run(lambda: self._call(Kind.EXCHANGE, None))

    def meet(self, kind: Kind) -> None:
        """Wait until every rank is at `kind`, joining what the others do until then."""
        served = (
            self._gradients.submit(lambda: self._serve(kind))
            if self._gradients and kind < Kind.GATHER
            else None
        )
        self._exchanges.submit(lambda: self._arrive(kind)).wait()
        if served is not None:
            served.wait()

    def agree(self, reference: Vector) -> dict[str, Any]:
        """Exchanges in codes begin, with what all replicas agree on; what is `kept` between
        them.
        """
        return begin_codes(reference, self.members)

    def census(self, *numbers: float) -> list[list[float]]:
        """Everybody's numbers, in rank order, every rank being here already."""
        rows: list[list[float]] = self._exchanges.run(lambda: self._x.tell(*numbers)).tolist()
        return rows

    def _exchange(self, offer: Offer) -> Landed:
        with offer.aside():
            rows = self._call(Kind.EXCHANGE, offer, ride=True)
            joined = bool((rows[:, KIND] < Kind.EXCHANGE).any())
            if joined:
                # the joiners have their snapshots now, and better headers
                rows = self._call(Kind.EXCHANGE, offer)
            self._compare(rows)
            landed = self._average(offer, rows, exact=joined or offer.coded is not None)
        self._trace.emit("landed", seconds=landed.seconds)
        return landed

    def _arrive(self, kind: Kind) -> None:
        assert self.member is not None
        while True:
            rows = self._call(kind, None, ride=True)
            host = rows[rows[:, KIND].argmax()].long().tolist()  # one of those at the highest kind
            if host[KIND] == kind:
                return
            invitation = Invitation(
                Kind(host[KIND]),
                None if host[LANE] < 0 else host[LANE],
                WIRES[host[WIRE]],
                coded=bool(host[CODED]),
            )
            self._trace.emit("join", round=invitation.kind.name.lower())
            self.member.join(invitation)

    def _call(self, kind: Kind, offer: Offer | None, *, ride: bool = False) -> torch.Tensor:
        """Everybody's header; row r is rank r's. Where it rides on the sum of the first tensor of a
        vector, that is kept, for `_average` to use if everybody has put in what it should.
        """
        self._sequence += 1
        row = [0.0] * COLUMNS
        row[SEQUENCE] = self._sequence
        row[KIND] = kind
        row[STEP] = self.step
        row[BEFORE] = self._before
        row[LANE] = -1
        if offer is not None:
            offer.ready()
            row[LOSS] = float(offer.losses[0])
            row[COUNT] = offer.losses[1]
            row[CHECKSUM] = self._checksum(offer)
            row[LANE] = -1 if offer.lane is None else offer.lane
            row[WIRE] = WIRES.index(offer.wire)
            if offer.coded is not None:
                row[CODED] = SICK if self._is_sick(offer) else 1
        self._sum = None
        rows = self._ride(row, offer) if ride and self._rides else self._x.tell(*row)
        ahead = rows[:, SEQUENCE] != self._sequence
        if ahead.any():
            raise CommError(
                f"rounds are out of step: {rows[:, SEQUENCE].tolist()}; please report this"
            )
        return rows

    @property
    def _rides(self) -> bool:
        return self._first is not None and self._x.carries_rows(self._first[1])

    def _ride(self, row: list[float], offer: Offer | None) -> torch.Tensor:
        """Sum the first tensor of what is offered, or zeros, between the nodes, and everybody's
        header with it.
        """
        assert self._first is not None
        size, dtype = self._first
        node = self._x.node
        lanes = self._x.lanes
        mates = node.tell(*row)
        memory = have(self._x.lane).memory(size + self._x.room(len(row)), dtype)
        into = memory[:size]
        flat = None if offer is None else offer.vector[0]
        if self._nodes != self.topology and node.size > 1:
            wide = node.memory(size * lanes, dtype)
            into.copy_(node.part(wide.zero_() if flat is None else wide.copy_(flat), lanes))
        elif flat is None:
            into.zero_()
        else:
            torch.mul(_row(flat, node.row(lanes), lanes), self._weight, out=into)
        rows = self._x.sum_lane(memory, mates)()
        self._sum = into
        return rows

    @property
    def _weight(self) -> int:
        """Of this rank's replica."""
        lane = self._x.lane
        return 1 if self._weights is None or lane is None else self._weights[lane.index]

    def _checksum(self, offer: Offer) -> float:
        """Of what this rank sends, as long as all replicas may turn out to be the same."""
        if not self._may_be_same:
            return 0.0
        checksum = sum(float(tensor.sum()) for tensor in _sent(offer))
        return checksum if math.isfinite(checksum) else 0.0

    def _is_sick(self, offer: Offer) -> bool:
        """Whether a value is not finite: codes would make numbers of it, and everybody remember."""
        for tensor in _sent(offer):
            # the sum may overflow where every value is finite
            if not math.isfinite(float(tensor.sum())) and not bool(tensor.isfinite().all()):
                return True
        return False

    def _average(self, offer: Offer, rows: torch.Tensor, *, exact: bool = True) -> Landed:
        """`exact`: tell each other how far this mean is from everybody, instead of with the header
        of the next one.
        """
        start = self.now()
        if (rows[:, CODED] == SICK).any():
            self._find_bad(rows)
        carried = self._sum
        self._sum = None
        sums = []
        with self._x.world.watched() if offer.near else nullcontext():
            for number, tensor in enumerate(offer.vector):
                total = carried if number == 0 else None
                sums.append(self._average_tensor(number, tensor, offer, total))
        self._before = sum(spread for spread, _ in sums)
        finite = all(fine for _, fine in sums)
        spreads = rows[:, BEFORE]
        if exact or not self._all_see_all:
            spreads, fine = self._x.tell(self._before, finite).unbind(1)
            finite = bool(fine.all())
        if not finite:
            self._find_bad(rows)
        if offer.coded is not None:
            offer.coded.kept["rounds"] += 1
        buffers = self._average_buffers(offer.buffers)
        self._report(self._x)
        return Landed(
            vector=offer.vector,
            buffers=buffers,
            loss_sum=add_up(rows[:, LOSS]),
            loss_count=int(rows[:, COUNT].sum()),
            distance=math.sqrt(max(add_up(spreads), 0.0) / self._total),
            seconds=self.now() - start,
            steps=rows[:, STEP].long().tolist(),
        )

    @property
    def _all_see_all(self) -> bool:
        """Whether every rank has the whole mean before its lane is done with it."""
        alone = max(self._nodes.weights) == 1
        return not self._shards and (alone or self._nodes != self.topology)

    def _find_bad(self, rows: torch.Tensor) -> None:
        """The mean is not finite: find out whose values are not."""
        assert self.member is not None
        name = self.member.find_bad()
        (told,) = self._x.tell(name is not None).unbind(1)
        bad = told.nonzero().flatten().tolist()
        if not bad:
            raise CommError(
                "the mean of all replicas contains NaN or Inf, although the parameters of each are "
                "finite: they are too large to be added up, or what an optimizer holds is not "
                "finite. Lower the learning rate or clip gradients"
            )
        where = "" if name is None else f" ({name} on this rank)"
        raise CommError(
            f"the parameters of rank {bad[0]} contain NaN or Inf at step {int(rows[bad[0], STEP])}"
            f"{where}: nothing was exchanged. Lower the learning rate or clip gradients; the other "
            "ranks' parameters are intact"
        )

    def _average_tensor(
        self, number: int, tensor: torch.Tensor, offer: Offer, total: torch.Tensor | None
    ) -> tuple[float, bool]:
        """Overwrite `tensor` with the mean over replicas, or with `mean - tensor`; this rank's part
        of the spread, and whether the mean is finite. `total`: the lane's sum, if it is there.
        """
        outer = None if offer.outer is None else partial(offer.outer, number)
        if offer.coded is not None:
            return self._average_in_codes(number, tensor, offer.coded, outer), True
        wire = tensor if offer.wire is None else tensor.to(offer.wire)
        node = self._x.node
        lane = self._x.lane
        if offer.near:
            node = self._x.near_node or node
            lane = self._x.near_lane
        delta = offer.form == "delta"
        index = node.index
        if offer.settle and node.size > 1:
            for piece in wire.split(PIECE):
                piece.copy_(ordered_sum(node.gather(piece).unbind(0)).div_(node.size))
        spread = 0.0
        fine = True
        if self._shards:
            spread, fine = self._average_lane(wire, have(lane), delta=delta, outer=outer)
        elif self._nodes != self.topology:
            spread, fine = self._average_through(
                wire, node, lane, delta=delta, outer=outer, total=total
            )
        elif offer.lane is None:
            shards = wire.view(self._x.lanes, -1)
            mine = shards[node.row(self._x.lanes)]
            if lane is not None:
                spread, fine = self._average_lane(mine, lane, delta=delta, outer=outer, total=total)
            if node.size > 1:
                for piece in shards.split(PIECE, 1):
                    node.share(piece)
        else:
            if index == offer.lane and lane is not None:
                spread, fine = self._average_lane(wire, lane, delta=delta)
            node.broadcast(wire, root=offer.lane)
        if wire is not tensor:
            tensor.copy_(wire)
        return spread, fine

    def _average_in_codes(
        self, number: int, tensor: torch.Tensor, coded: Coded, outer: Advance | None
    ) -> float:
        """Overwrite `tensor` with what is missing to the goal of all; this rank's part of the
        spread.
        """
        lanes = self._x.lanes
        node = self._x.node
        sums = None
        if self._x.lane is not None:
            sums = Sums(
                coded,
                number,
                self._x.lane,
                weights=self._weights,
                total=self._total,
                scratch=self._scratch,
            )
        if self._nodes != self.topology:
            return average_through_nodes(
                tensor,
                sums,
                node=node,
                lanes=lanes,
                members=self.members,
                outer=outer,
                scratch=self._scratch,
            )
        row, rows = self.own
        shards = tensor.view(rows, -1)
        spread = 0.0
        if sums is not None:
            weight = 1 if self._weights is None else self._weights[sums.index]
            spread = weight * average_row(shards[row], sums, outer=outer)
        if node.size > 1 and not self._shards:
            for piece in shards.split(PIECE, 1):
                node.share(piece)
        return spread

    def _average_lane(
        self,
        flat: torch.Tensor,
        lane: Channel,
        *,
        delta: bool,
        outer: Advance | None = None,
        total: torch.Tensor | None = None,
    ) -> tuple[float, bool]:
        """The replicas of a lane: one sum of the whole vector, or piece by piece in rank order."""
        if total is None and lane.sums(flat.dtype):
            total = torch.mul(flat, self._weight, out=lane.scratch(flat))
            lane.sum(total)
        if total is not None:
            spread, fine = _adopt(flat, total, divisor=self._total, delta=delta, outer=outer)
            return self._weight * spread, fine
        spread = 0.0
        fine = True
        for begin, piece in _pieces(flat, grain=lane.size):
            mean = lane.mean(piece, self._weights, self._total)
            far, sane = _adopt(piece, mean, divisor=1, delta=delta, outer=outer, begin=begin)
            spread += far
            fine = fine and sane
        return self._weight * spread, fine

    def _average_through(
        self,
        flat: torch.Tensor,
        node: Channel,
        lane: Channel | None,
        *,
        delta: bool,
        outer: Advance | None,
        total: torch.Tensor | None,
    ) -> tuple[float, bool]:
        """Every rank is a replica: sums inside the nodes first, then between them, rounded once, at
        the end.
        """
        dtype = torch.promote_types(flat.dtype, torch.float32)
        lanes = self._x.lanes
        if total is not None:
            if node.size > 1:
                wide = node.scratch(flat, dtype)
                shards = wide.view(lanes, -1)
                shards[node.row(lanes)].copy_(total)
                node.share(shards)
                total = wide
            return _adopt(flat, total, divisor=self._total, delta=delta, outer=outer)
        spread = 0.0
        fine = True
        length = flat.numel() if self._x.sums_between_nodes else None
        for begin, piece in _pieces(flat, grain=self._nodes.multiple, length=length):
            wide = node.scratch(piece, dtype).copy_(piece)
            left = _sum_by_node(wide, node, lane, lanes=lanes, divisor=self._total)
            far, sane = _adopt(piece, wide, divisor=left, delta=delta, outer=outer, begin=begin)
            spread += far
            fine = fine and sane
        return spread, fine

    def _average_buffers(self, mine: torch.Tensor) -> torch.Tensor:
        """Overwrite buffers with their mean over all ranks that hold them, inside the node
        first.
        """
        if mine.numel() == 0:
            return mine
        if self._stages:
            lane = have(self._x.lane)
            return mine.copy_(ordered_sum(lane.gather(mine).unbind(0)).div_(len(lane.ranks)))
        total = ordered_sum(self._x.node.gather(mine).unbind(0))
        if self._x.lane is not None and self._x.lane is not self._x.node:
            total = ordered_sum(self._x.lane.gather(total).unbind(0))
        if self._x.node.size > self._x.lanes:
            self._x.node.broadcast(total, root=0)
        return mine.copy_(total.div_(self.topology.world))

    def _compare(self, rows: torch.Tensor) -> None:
        """Replicas that are bit for bit the same three exchanges in a row have seen the same
        data.
        """
        heads = rows[[node[0] for node in self.topology.nodes]]
        same = (
            len(heads) > 1
            and bool((heads[:, CHECKSUM] == heads[0, CHECKSUM]).all())
            and bool((heads[:, STEP] > 0).all())
        )
        self._same = self._same + 1 if same else 0
        self.identical = self.identical or self._same >= 3
        self._may_be_same = not self.identical and (same or bool((heads[:, STEP] == 0).any()))

    # Averages of gradients ------------------------------------------------------------------------

    def open_round(self, scope: Scope, checksum: float) -> None:
        """A backward has begun: find out who takes part. `checksum` is of the gradients of the
        round before.
        """
        assert self._gradients is not None
        self._gradients.submit(lambda: self._enter(scope, checksum))

    def reduce(self, parcel: Parcel, scope: Scope) -> Pending[None]:
        """Pack a parcel, overwrite it with its mean over the ranks that take part in the round,
        unpack it.
        """
        assert self._gradients is not None

        return self._gradients.submit(lambda: self._carry(parcel, scope))

    def reduce_here(self, parcel: Parcel, scope: Scope) -> None:
        """The same on the calling thread, after all that was sent before: nobody has to wake
        another thread up.
        """
        assert self._gradients is not None

        def last() -> None:
            self._carry(parcel, scope)
            self._land_all()

        self._gradients.here(last)

    def land_gradients(self) -> None:
        """Wait until all parcels of a round are unpacked, where it has no last one that does."""
        assert self._gradients is not None
        self._gradients.here(self._land_all)

    def stays(self, scope: Scope) -> bool:
        """Whether the gradients of such a round are averaged on the device that they are on."""
        return self._channels.near_node is not None and self._inside(scope)

    def _inside(self, scope: Scope) -> bool:
        return scope == "node" or len(self._nodes.nodes) == 1

    def _carry(self, parcel: Parcel, scope: Scope) -> None:
        if self._untold is not None and scope == "world":
            self._carry_first(parcel, *self._untold)
            return
        node = self._channels.node
        near = self._channels.near_node
        if near is not None and parcel.flags is not None and self._inside(scope):
            self._carry(parcel.flags, scope)  # everybody is here, so nobody will wait on the device
            with near.watched(), parcel.aside() as flat:
                near.total(flat, self._channels.lanes)
                flat.div_(self._contributors)
        elif self._inside(scope) and node.fits(parcel.flat):
            node.through_memory(parcel, self._contributors)
        elif parcel.codes is not None and not self._inside(scope):
            self._carry_in_codes(parcel, parcel.codes)
        elif self._flies(parcel, scope):
            parcel.pack(parcel.flat)
            summed = have(self._channels.lane).begin_sum(parcel.flat)

            def land() -> None:
                summed()
                parcel.unpack([parcel.flat], self._contributors)

            self._let_fly(land)
        else:
            self._land_all()
            parcel.pack(parcel.flat)
            divisor = self._reduce(parcel.flat, scope)
            parcel.unpack([parcel.flat], divisor)

    def _carry_in_codes(self, parcel: Parcel, codes: Codes) -> None:
        """Gradients in codes; what rides behind them, whole numbers, as it is."""
        flat = parcel.flat
        parcel.pack(flat)
        behind = flat[codes.values :]
        padding = -behind.numel() % self._nodes.multiple
        riders = torch.nn.functional.pad(behind, (0, padding))
        behind.zero_()
        self._reduce(riders, "world")
        node = self._channels.node
        row, rows = self.own
        shards = flat.view(rows, -1)
        mine = shards[row]
        members = self.present
        if self._shards:
            members = list(set(self.present) & set(have(self._channels.lane).ranks))
        elif node.size > 1:
            mine.copy_(node.part(flat, rows))
        if self._channels.lane is not None:
            total = len(members)
            coded = codes.coded
            lane = self._channels.lane
            sums = Sums(
                coded, codes.number, lane, weights=None, total=total, scratch=self._gradient_scratch
            )
            average_with_feedback(mine, sums, coded.kept["feedback"][codes.number])
            coded.kept["rounds"] += 1
        if node.size > 1 and not self._shards:
            node.share(shards)
        behind.copy_(riders[: behind.numel()])
        parcel.unpack([flat], 1)

    def _enter(self, scope: Scope, checksum: float) -> None:
        self._await_order()
        self._report(self._channels)
        patient = not self.alone and self._passed < PATIENCE
        gives = self.gives and not patient and (scope == "world" or len(self._nodes.nodes) == 1)
        wide = scope == "world"
        mine = Standing(Kind.GRADIENTS, wide, checksum, self.agrees(), self.torn, gives)
        if wide and self._gradients_carry:
            self._untold = mine, self._stand(self._channels.node, mine)
            return
        channel, standings = self._meet_all(scope, mine)
        while _is_given(standings):
            self._exchanges.run(self._give_consensus)
            channel, standings = self._meet_all(scope, mine)
        self._begin_round(mine, standings, channel)

    def _begin_round(self, mine: Standing, standings: list[Standing], channel: Channel) -> None:
        """Everybody who takes part is known."""
        waits = any(standing.kind == Kind.CONSENSUS for standing in standings)
        patient = not self.alone and self._passed < PATIENCE
        self.asked = waits and not patient
        self._passed = self._passed + 1 if waits else 0
        present = [standing for standing in standings if standing.kind == Kind.GRADIENTS]
        if any(standing.wide != mine.wide for standing in present):
            raise CommError(
                "the ranks of a node disagree about whose gradients are averaged; please report "
                "this"
            )
        same = (
            len(present) > 1
            and mine.checksum != 0
            and all(standing.checksum == mine.checksum for standing in present)
        )
        self._same_gradients = self._same_gradients + 1 if same else 0
        self.identical = self.identical or self._same_gradients >= 3
        self.all_agree = all(standing.agrees for standing in standings)
        self._took_part(standings, channel)

    def _meet_all(self, scope: Scope, mine: Standing) -> tuple[Channel, list[Standing]]:
        channel = self._channels.node
        standings = self._stand(channel, mine)
        if scope == "world" and self._channels.world is not channel:
            channel = self._channels.world
            standings = self._stand(channel, mine)
        return channel, standings

    def _give_consensus(self) -> None:
        assert self.member is not None
        self._arrive(Kind.CONSENSUS)
        self.member.join(Invitation(Kind.CONSENSUS))

    @property
    def _gradients_carry(self) -> bool:
        """Whether what ranks are at rides on the first bucket that is summed between nodes."""
        return self._bucket is not None and self._channels.carries_rows(self._bucket[1])

    def _carry_first(self, parcel: Parcel, mine: Standing, mates: list[Standing]) -> None:
        """A bucket with what everybody is at behind it."""
        self._untold = None
        summed = self._sum_with_standings(parcel, mates)

        def land() -> None:
            standings, total = summed()
            while _is_given(standings):
                self._exchanges.run(self._give_consensus)
                mates = self._stand(self._channels.node, mine)
                standings, total = self._sum_with_standings(parcel, mates)()
            self._begin_round(mine, standings, self._channels.world)
            parcel.unpack([total], self._contributors)

        self._let_fly(land)
        if mine.gives:  # it may have to be sent again, before anything else is
            self._land_all()

    def _sum_with_standings(
        self, parcel: Parcel | None, mates: list[Standing]
    ) -> Callable[[], tuple[list[Standing], torch.Tensor]]:
        """Begin to sum a first bucket, or zeros, and with it what every rank is at; what is
        returned waits for both.
        """
        assert self._bucket is not None
        size, dtype = self._bucket
        channels = self._channels
        node = channels.node
        memory = have(channels.lane).memory(size + channels.room(len(Standing._fields)), dtype)
        into = memory[:size]
        flat = into
        if node.size > 1:
            flat = node.memory(size * channels.lanes, dtype) if parcel is None else parcel.flat
        if parcel is None:
            flat.zero_()
        else:
            parcel.pack(flat)
        if node.size > 1:
            into.copy_(node.part(flat, channels.lanes))
        told = channels.sum_lane(memory, mates)

        def summed() -> tuple[list[Standing], torch.Tensor]:
            standings = [Standing(*row) for row in told().tolist()]
            self._check_torn(channels.world.ranks, standings)
            if node.size > 1:
                shards = flat.view(channels.lanes, -1)
                shards[node.row(channels.lanes)].copy_(into)
                node.share(shards)
            return standings, flat

        return summed

    def _flies(self, parcel: Parcel, scope: Scope) -> bool:
        """Whether a parcel is summed between nodes of one rank, in the backend's own way."""
        alone = self._channels.node.size == 1 and not self._inside(scope) and not self._shards
        return alone and have(self._channels.lane).sums(parcel.flat.dtype)

    def _let_fly(self, land: Callable[[], None]) -> None:
        """Two sums may be under way: the next begins before the last has ended. Where ranks of a
        node meet in between, one.
        """
        self._flying.append(land)
        while len(self._flying) > (self._channels.node.size == 1):
            self._flying.popleft()()

    def _land_all(self) -> None:
        while self._flying:
            self._flying.popleft()()

    def _await_order(self) -> None:
        """Sums of gradients wait for what the other thread finds out first."""
        if self._order is not None:
            self._order.wait()
            self._order = None

    def _took_part(self, standings: list[Standing], channel: Channel) -> None:
        self.torn = False
        self.present = [
            r
            for r, other in zip(channel.ranks, standings, strict=True)
            if other.kind == Kind.GRADIENTS
        ]
        self._contributors = len(self.present)

    def _serve(self, kind: Kind) -> None:
        """While this rank waits at `kind`: add zeros to its peers' gradient rounds, in the node,
        then in the world.
        """
        self._await_order()
        while True:
            reached = self._serve_in(self._channels.node, kind)
            if reached != Kind.GRADIENTS:
                reached = self._serve_in(self._channels.world, reached)
            if reached in (kind, Kind.GRADIENTS):
                self.torn = False
                return

    def _serve_in(self, channel: Channel, kind: Kind) -> Kind:
        """Join gradient rounds until the ranks of the channel have reached something else, and
        say what; GRADIENTS if a round is put off until all have given this rank its consensus.
        """
        assert self.member is not None
        world = self._channels.world
        crossing = self._gradients_carry and world is not self._channels.node
        while True:
            mine = Standing(kind, False, 0.0, False, self.torn)
            begun = False  # the first bucket has come with what others are at
            if channel is world and crossing:
                begun = True
                mates = [Standing(*told) for told in self._channels.node.tell(*mine)]
                standings, _ = self._sum_with_standings(None, mates)()
            else:
                standings = self._stand(channel, mine)
            top = Kind(int(max(standing.kind for standing in standings)))
            if top != Kind.GRADIENTS:
                return top
            wide = any(standing.wide for standing in standings)
            if wide and channel is not world:
                if crossing:
                    begun = True
                    standings, _ = self._sum_with_standings(None, standings)()
                else:
                    standings = self._stand(world, mine)
            scope: Scope = "world" if wide else "node"
            if _is_given(standings):
                if kind == Kind.CONSENSUS:
                    return Kind.GRADIENTS
                continue
            self._took_part(standings, world if wide else channel)
            self.missed = "world" if "world" in (scope, self.missed) else "node"
            parcels = list(self.member.blank_parcels())
            for parcel in parcels[begun:]:
                self._carry(parcel, scope)
            self._land_all()

    def _stand(self, channel: Channel, mine: Standing) -> list[Standing]:
        """What every rank of the channel is at."""
        told = (
            self._channels.tell(*mine).tolist()
            if channel is self._channels.world
            else channel.tell(*mine)
        )
        standings = [Standing(*numbers) for numbers in told]
        self._check_torn(channel.ranks, standings)
        return standings

    def _check_torn(self, ranks: Sequence[int], standings: list[Standing]) -> None:
        """A backward that raised on some ranks only has left the others with gradients that are
        nobody's.
        """
        torn = {
            rank: standing.torn
            for rank, standing in zip(ranks, standings, strict=True)
            if rank in self.present
        }
        if any(torn.values()) and not all(torn.values()):
            raised, others = (
                [rank for rank in torn if bool(torn[rank]) is which] for which in (True, False)
            )
            raise CommError(
                f"backward() raised on rank(s) {', '.join(map(str, raised))} when a part of its "
                "gradients had been averaged already, and not on rank(s) "
                f"{', '.join(map(str, others))}, which have made the step: from there on the "
                "replicas are not the same. Resume from a checkpoint, and skip a batch on all "
                "ranks or on none"
            )

    def _reduce(self, flat: torch.Tensor, scope: Scope) -> int:
        """Overwrite `flat` with its sum over the ranks that take part; what it is still to be
        divided by.
        """
        node = self._channels.node
        lane = self._channels.lane
        lanes = self._channels.lanes
        if self._inside(scope):
            node.total(flat, lanes)
            return self._contributors
        if self._shards:
            lane = have(lane)
            return lane.add_up(flat, len(set(self.present) & set(lane.ranks)))
        return _sum_by_node(flat, node, lane, lanes=lanes, divisor=self._contributors)

    @property
    def _channels(self) -> Channels:
        assert self._g is not None
        return self._g

    # State, life and death ------------------------------------------------------------------------

    def broadcast_state(
        self, state: dict[str, Any], root: int, scope: Scope = "world"
    ) -> dict[str, Any]:
        """The nested plain state of rank `root`, tensors included, on every rank of the scope; of
        shards, that of the same local rank on the node of `root`.
        """
        channel = self._x.node if scope == "node" else self._x.world
        if self._shards and scope == "world":
            channel = have(self._x.lane)
            root = channel.ranks[self.topology.node_of(root)]
        return self._exchanges.run(lambda: _broadcast(channel, state, channel.ranks.index(root)))

    def close(self) -> None:
        """End cleanly after `finish`: no thread, no descriptor left."""
        for stream in filter(None, (self._exchanges, self._gradients)):
            stream.close(timeout=10.0)
        for channels in filter(None, (self._x, self._g)):
            self._report(channels)
            channels.close()
        if self._pulse is not None:
            self._pulse.leave()

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """End at once, tell the others why, wait for nobody."""
        if self._pulse is not None:
            self._pulse.hurt(CommError(f"the run was ended: {reason}"))
            self._pulse.fail(reason, culprit)
        ended = [
            stream.close(timeout=2.0) for stream in filter(None, (self._exchanges, self._gradients))
        ]
        for channels in filter(None, (self._x, self._g)):
            channels.abandon()
        self._trace.emit("abort", reason=reason, threads_ended=all(ended))

    def _report(self, channels: Channels) -> None:
        sent, between = channels.traffic()
        if sent:
            self._trace.emit("sent", bytes=sent, between_nodes=between)


def _pieces(
    flat: torch.Tensor, *, grain: int, length: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """A flat tensor in pieces that divide by `grain`, so that the extra memory is bounded, each
    with its beginning.
    """
    length = length or max(PIECE // grain, 1) * grain
    return zip(range(0, flat.numel(), length), flat.split(length), strict=True)


def _adopt(
    flat: torch.Tensor,
    total: torch.Tensor,
    *,
    divisor: int,
    delta: bool,
    outer: Advance | None,
    begin: int = 0,
) -> tuple[float, bool]:
    """Overwrite `flat` with the mean, which `total` is once it is divided, or with what is missing
    to it; how far the values were from it, squared, and whether the mean is finite. Block by block,
    so that each comes from memory once.
    """
    norms = []  # read at the end: on a device that is the only wait
    length = BLOCK if flat.device.type == "cpu" else max(flat.numel(), 1)
    for at, piece, mean in zip(
        range(0, flat.numel(), length), flat.split(length), total.split(length), strict=True
    ):
        if divisor != 1:
            mean.div_(divisor)
        torch.sub(mean, piece, out=piece)
        norms.append(torch.linalg.vector_norm(piece))
        if outer is not None:
            goal = outer(slice(begin + at, begin + at + piece.numel()), mean)
            piece.add_(goal - mean)
            mean = goal
        if not delta:
            piece.copy_(mean)
    spread = 0.0
    for norm in norms:
        spread += float(norm) ** 2
    # a mean that is not finite is far from everybody, so everybody looks
    return spread, math.isfinite(spread) or bool(total.isfinite().all())


def _sum_by_node(
    flat: torch.Tensor, node: Channel, lane: Channel | None, *, lanes: int, divisor: int
) -> int:
    """In place: inside the node a sum for each lane, across nodes their sums, then all of them
    inside the node; what it is still to be divided by.
    """
    shards = flat.view(lanes, -1)
    mine = shards[node.row(lanes)]
    left = divisor
    if node.size > 1:
        mine.copy_(node.part(flat, lanes))
    if lane is not None:
        left = lane.add_up(mine, divisor)
    if node.size > 1:
        node.share(shards)
    return left


def _sent(offer: Offer) -> Vector:
    """What this rank sends of the vector."""
    if offer.part is None:
        return offer.vector
    return [_row(tensor, *offer.part) for tensor in offer.vector]


def _row(flat: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return flat.view(rows, -1)[row]


def _is_given(standings: Sequence[Standing]) -> bool:
    """Whether the ranks that are in a backward, all of them, give a consensus to those that wait
    for it, before they average gradients with them.
    """
    waits = any(standing.kind == Kind.CONSENSUS for standing in standings)
    there = [standing.gives for standing in standings if standing.kind == Kind.GRADIENTS]
    return waits and bool(there) and all(there)


def add_up(numbers: torch.Tensor) -> float:
    """In order; Python's own `sum` compensates for rounding from 3.12 on, and would differ
    between versions.
    """
    total = 0.0
    for number in numbers.flatten().tolist():
        total += number
    return total


def _broadcast(channel: Channel, state: dict[str, Any], root: int) -> dict[str, Any]:
    """Structure as JSON, then every tensor: never pickle."""
    sender = channel.index == root
    plain, tensors = flatten(state) if sender else ("", [])
    text = (
        torch.frombuffer(bytearray(plain.encode()), dtype=torch.uint8)
        if sender
        else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([text.numel()])
    channel.broadcast(size, root)
    if not sender:
        text = torch.empty(int(size), dtype=torch.uint8)
    channel.broadcast(text, root)
    if sender:
        for tensor in tensors:
            channel.broadcast(tensor, root)
        return state
    plain = bytes(text.numpy()).decode()
    received = [
        torch.empty(shape, dtype=getattr(torch, dtype))
        for shape, dtype in json.loads(plain)["tensors"]
    ]
    for tensor in received:
        channel.broadcast(tensor, root)
    return dict(unflatten(plain, received))
