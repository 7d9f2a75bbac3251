"""Clocks of all ranks under a collective strategy: no tensors, only when each rank is where.

The strategy object itself decides; all ranks decide alike, so one of it drives the clocks of all. A
step is forward, backward with gradients averaged bucket by bucket behind it, the boundary. An
exchange leaves when the last rank has started it and lands on all of them at once; `fold` waits for
that. Bytes of gradients and of an exchange that are on an uplink at the same time get half of it
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import nn

from loosestep.codecs import Codec
from loosestep.core.contracts import Landed, Outer, Scope, Vector
from loosestep.core.engines.gradients import fill_buckets
from loosestep.core.replica.replica import Replica
from loosestep.sim.cluster import FORWARD
from loosestep.sim.predict.costs import Cost, Costs, Nodes, Times
from loosestep.strategies.base import Strategy
from loosestep.topology import Topology

Loss = Callable[[int], float]


class Gradients:
    """Averaging during backward. A bucket is sent when its gradients are there and the one before
    has arrived.

    Backward is taken to spend its time on the parameters in proportion to their bytes, the last
    ones first.
    """

    def __init__(
        self, sizes: Sequence[int], nodes: Nodes, costs: Costs, codec: Codec | None = None
    ) -> None:
        self._codec = codec
        self._nodes = nodes
        self._costs = costs
        buckets = [
            sum(sizes[index] for index in bucket)
            for bucket in fill_buckets(sizes, [None] * len(sizes))
        ]
        backward = 1 - FORWARD
        ready = [FORWARD + backward * done / sum(sizes) for done in accumulate(buckets)]
        self._buckets = list(zip(buckets, ready, strict=True))
        self._first = FORWARD + backward * sizes[-1] / sum(sizes)

    def average(
        self,
        begin: Times,
        seconds: Times,
        *,
        scope: Scope,
        contend: Callable[[Times, float], float],
    ) -> tuple[Times, float]:
        """When backward returns on ranks that began a step at `begin` and compute for `seconds`;
        bytes between nodes.

        `contend(start, wire)`: the seconds an operation loses because it shares the uplink.
        """
        costs = self._costs
        across = scope == "world" and costs.members > 1
        free = begin + self._first * seconds
        if costs.mates > 1:
            free = self._nodes.latest(free) + costs.node_header().seconds
        if across and (self._codec is not None or not costs.rides):
            free = np.full_like(free, free.max() + costs.header().seconds)
        sent = 0.0
        for size, share in self._buckets:
            there = np.maximum(begin + share * seconds, free)
            if not across:
                free = self._nodes.latest(there) + costs.node_average(size).seconds
                continue
            cost = costs.world_average(size, self._codec)
            free = np.full_like(free, there.max() + cost.seconds + contend(there, cost.wire))
            sent += cost.sent
        return np.maximum(begin + seconds, free), sent


@dataclass
class TimedExchange:
    """An exchange in the air: when it lands, and how many seconds of its way are on the link."""

    step: int
    lands: float
    wire: float
    losses: tuple[float, int]

    def contend(self, start: float, wire: float) -> float:
        """The seconds that bytes lose which come onto the link at `start` for `wire` seconds: two
        flows share it evenly, so the shorter takes twice as long, and the other that much longer.
        """
        shared = min(max(0.0, self.lands - start), self.wire, wire)
        self.lands += shared
        return shared


class CollectiveClocks:
    """Drives a collective strategy on clocks; is its `Exchanges`."""

    def __init__(
        self,
        strategy: Strategy,
        topology: Topology,
        costs: Costs,
        *,
        sizes: Sequence[int],
        fixed: float,
        loss: Loss | None = None,
    ) -> None:
        self.strategy = strategy
        self.state = strategy.begin()
        self._costs = costs
        self._ranks = topology.world
        self._replicas = topology.world if strategy.learner == "rank" else costs.members
        self._size = sum(sizes)
        self._fixed = fixed
        self._loss = loss
        self._nodes = Nodes(topology)
        self._gradients = Gradients(sizes, self._nodes, costs, strategy.gradients_in)
        self._replica = Replica(nn.Linear(1, 1))  # strategies fold into a model of two numbers
        self._flight: TimedExchange | None = None
        self._observed = (0.0, 0)
        self.clock: Times = np.zeros(topology.world)
        self.waited: Times = np.zeros(topology.world)
        self.sent = 0.0
        self.exchanges = 0
        strategy.prepare(self.state, self._replica)

    def step(self, seconds: Times) -> None:
        """Every rank computes so long, then all are at the boundary."""
        scope = self.strategy.scope(self.state)
        end = self.clock + seconds
        if (scope == "node" and self._costs.mates > 1) or (scope == "world" and self._ranks > 1):
            averaged, sent = self._gradients.average(
                self.clock, seconds, scope=scope, contend=self._contend
            )
            self.waited += averaged - end
            self.sent += sent
            end = averaged
        self.clock = end + self._fixed
        if self._loss is not None:
            total, count = self._observed
            self._observed = (
                total + self._ranks * self._loss(self.state["step"]),
                count + self._ranks,
            )
        self.strategy.boundary(self.state, self)

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
        now: bool = False,
        wire: torch.dtype | None = None,
    ) -> None:
        """Leaves when the last rank is here."""
        self.clock = self.clock + self._costs.snapshot(self._size)
        size = self._size * _share(wire)
        cost = self._count(self._costs.exchange(size, lane=lane, codec=self.strategy.moves_in))
        self.state["exchanges"] += 1
        losses = self._observed
        self._observed = (0.0, 0)
        self._flight = TimedExchange(
            self.state["step"], self.clock.max() + cost.seconds, cost.wire, losses
        )

    @property
    def replica(self) -> Replica:
        """A replica of few numbers: what lands in it takes no time."""
        return self._replica

    def fold(self) -> Landed:
        """Wait for the exchange in flight."""
        assert self._flight is not None, "there is no exchange to fold"
        flight = self._flight
        self._flight = None
        self._wait_until(flight.lands)
        self.clock = self.clock + self._costs.snapshot(self._size)
        return Landed(
            vector=self._replica.snapshot(keep=False),
            buffers=torch.empty(0),
            loss_sum=flight.losses[0],
            loss_count=flight.losses[1],
            distance=0.0,
            seconds=0.0,
            steps=[flight.step] * self._ranks,
            staleness=self.state["step"] - flight.step,
            replicas=self._replicas,
        )

    def gather(self) -> None:
        """All replicas become their mean, momentum included."""
        if self._flight is not None:
            self.strategy.land(self.state, self._replica, self.fold())
        self._block(self._costs.exchange(self._size) + self._costs.exchange(self._size))
        self.strategy.gathered(self.state)

    def average(self, *, wire: torch.dtype | None = None) -> None:
        """Blocking, over the lanes."""
        self.state["exchanges"] += 1
        self._block(self._costs.exchange(_share(wire) * self._size))

    def average_node(self) -> None:
        """Blocking, inside the node."""
        if self._costs.mates > 1:
            cost = self._costs.node_header() + self._costs.node_average(self._size)
            self._wait_until(self._nodes.latest(self.clock) + cost.seconds)

    # Inside ---------------------------------------------------------------------------------------

    def _block(self, cost: Cost) -> None:
        self.clock = self.clock + self._costs.snapshot(self._size)
        self._wait_until(self.clock.max() + self._count(cost).seconds)
        self.clock = self.clock + self._costs.snapshot(self._size)

    def _count(self, cost: Cost) -> Cost:
        self.exchanges += 1
        self.sent += cost.sent
        return cost

    def _wait_until(self, time: Times | float) -> None:
        later = np.maximum(self.clock, time)
        self.waited += later - self.clock
        self.clock = later

    def _contend(self, start: Times, wire: float) -> float:
        return 0.0 if self._flight is None else self._flight.contend(float(start.max()), wire)


def _share(wire: torch.dtype | None) -> float:
    """Of the bytes of float32."""
    return 1.0 if wire is None else wire.itemsize / torch.float32.itemsize
