"""What collective operations take on a cluster, in seconds and in bytes between nodes.

An average over P members of a lane is a sum around a ring and back, so a member sends
`2 (P - 1) / P` of its vector in as many trips as `2 (P - 1)`; codes go in an all-to-all of 1/P parts
and a ring that gathers the means. What ranks are at rides on the sum where nodes are equally large; what leaves a node shares its uplink, and all nodes
the backbone. The ranks of a node average through memory they share: each writes its own vector and
reads the others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from loosestep.codecs import Codec
from loosestep.core.collectives.coded import UNIT
from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.machine import Machine
from loosestep.topology import Topology

Times = NDArray[np.float64]

NUMBER = 4  # bytes: parameters are float32
CODED_PASSES = 8  # over memory: the codes themselves are made in the cache
SLOT = 4 << 20  # bytes that the ranks of a node show each other at a time


@dataclass(frozen=True)
class Cost:
    """Seconds of an operation once everybody is there, of which `wire` on the link; bytes that
    leave nodes, of all.
    """

    seconds: float
    wire: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.wire + other.wire, self.sent + other.sent)


class Nodes:
    """Which ranks share a machine: maxima over nodes of figures by rank."""

    def __init__(self, topology: Topology) -> None:
        counts = [len(node) for node in topology.nodes]
        self._order = np.concatenate([np.asarray(node) for node in topology.nodes])
        self._starts = np.cumsum([0, *counts[:-1]])
        self.of_rank = np.empty(topology.world, dtype=np.int64)
        self.of_rank[self._order] = np.repeat(np.arange(len(counts)), counts)

    def greatest(self, figures: Times) -> Times:
        """By node."""
        greatest: Times = np.maximum.reduceat(figures[self._order], self._starts)
        return greatest

    def latest(self, times: Times) -> Times:
        """By rank: when the last rank of its node is there."""
        return self.greatest(times)[self.of_rank]


class Costs:
    """The prices of one topology on one cluster. `single`: every rank is a replica, not the
    nodes.
    """

    def __init__(
        self, topology: Topology, cluster: Cluster, machine: Machine, *, single: bool
    ) -> None:
        self._topology = topology
        self._cluster = cluster
        self._machine = machine
        self._single = single
        self.members = len(topology.nodes)
        self.lanes = topology.lanes
        self.mates = max(len(node) for node in topology.nodes)
        self._even = self.mates == self.lanes
        payload = machine.payload * (machine.crowd if self.members > 2 else 1.0)
        self._rate = cluster.bytes_per_second * payload
        self._backbone = cluster.backbone_bytes_per_second * payload
        self._swapped, self._passed = self._shares()

    def _shares(self) -> tuple[Times, Times]:
        """What leaves each node per byte of a lane's vector: in an all-to-all of parts, and in a
        ring that gathers them.
        """
        nodes = Nodes(self._topology).of_rank
        swapped = np.zeros(len(self._topology.nodes))
        passed = np.zeros(len(self._topology.nodes))
        for index in range(self.lanes):
            lane = nodes[np.asarray(self._topology.lane(index))]
            strangers = self.members - np.bincount(lane, minlength=len(swapped))[lane]
            np.add.at(swapped, lane, strangers / self.members)
            crossing = lane != np.roll(lane, -1)
            np.add.at(passed, lane, crossing * (self.members - 1) / self.members)
        return swapped, passed

    def snapshot(self, size: float) -> float:
        """Seconds to copy the parameters into a flat vector, or to fold one into them."""
        return self._machine.work(size, passes=1.25)

    @property
    def rides(self) -> bool:
        """Whether what ranks are at rides on the sums between nodes, which it does not on codes."""
        return self._even and self.members > 1

    def header(self, *, rides: bool = False) -> Cost:
        """A few numbers of every rank to every rank: in the nodes, then along the lanes, unless
        they ride on a sum there; among all ranks at once where nodes are of unequal size.
        """
        hop = self._cluster.latency_seconds + self._machine.message
        if not self._even:
            return Cost(hop + self._machine.work(operations=1))
        inside = self.node_header() if self.mates > 1 else Cost(0.0)
        if self.members == 1 or rides:
            return inside
        return inside + Cost(hop + self._machine.work(operations=1))

    def node_header(self) -> Cost:
        """The same inside a node: the numbers ride on a meeting."""
        return Cost(self._from_mates(0, 1) + self._machine.work(operations=1))

    def node_average(self, size: float) -> Cost:
        """The ranks of a node average a vector: gather it into shared memory, meet, read
        everybody's.
        """
        work = self._machine.work(size, passes=2 + self.mates, operations=1)
        return Cost(work + self._from_mates((self.mates - 1) * size, size))

    def lanes_average(self, size: float, codec: Codec | None = None) -> Cost:
        """All lanes average their shard of a vector at the same time; or, in pieces, one after the
        other, in codes, which are written and read on both ways.
        """
        if self.members == 1:
            return Cost(0.0)
        shard = size / self.lanes
        wire = sent = 0.0
        coded = 1.0 if codec is None else codec.bytes_per_value / NUMBER
        for shares in (self._passed if codec is None else self._swapped, self._passed):
            leaving = shares * shard * coded
            wire += max(leaving.max() / self._rate, leaving.sum() / self._backbone)
            sent += float(leaving.sum())
        passes = 4 if codec is None else CODED_PASSES
        pieces = 1 if codec is None else ceil(shard / (UNIT * NUMBER))
        trips = 2 * (self.members - 1) if codec is None else pieces * self.members
        hops = trips * (self._cluster.latency_seconds + self._machine.message)
        return Cost(
            wire + hops + self._machine.work(shard, passes=passes, operations=pieces), wire, sent
        )

    def world_average(self, size: float, codec: Codec | None = None) -> Cost:
        """Gradients: gather them, sum inside the node, means across nodes, share inside the
        node, scatter them.
        """
        return Cost(self._machine.work(size, passes=5, operations=1)) + self._average_by_node(
            size, codec
        )

    def exchange(self, size: float, *, lane: int | None = None, codec: Codec | None = None) -> Cost:
        """Everybody says what it is at, lanes average, the node shares the result; how far it was
        everybody tells with the next one, if all of them know.
        """
        around = self.header(rides=self.rides and lane is None and codec is None)
        if codec is not None or not (self._single or self.mates == 1):
            around = around + self.header()
        around = around + Cost(self._machine.work(size))
        # all of it on one lane, then to the others of the node
        if lane is not None and self.lanes > 1:
            more = self._machine.work((1 - 1 / self.lanes) * size, passes=4, operations=1)
            spread = size / self._cluster.node_bytes_per_second + self._machine.message
            return around + self.lanes_average(size) + Cost(more + spread)
        if self._single and self.mates > 1:  # each piece is copied first
            return around + Cost(self._machine.work(size)) + self._average_by_node(size, codec)
        return (
            around
            + self.lanes_average(size, codec)
            + (self._share(size) if self.mates > 1 else Cost(0.0))
        )

    def _average_by_node(self, size: float, codec: Codec | None) -> Cost:
        """Sums inside the node, means across nodes, shared inside the node."""
        if self.mates == 1:
            return self.lanes_average(size, codec)
        others = (self.mates - 1) * size / self.lanes
        summed = Cost(
            self._machine.work(size, passes=3, operations=1) + self._from_mates(others, size)
        )
        return summed + self.lanes_average(size, codec) + self._share(size)

    def gather_shards(self, size: float) -> Cost:
        """The ranks of a node meet and put the model together from the shard that each of them
        owns.
        """
        if self.mates == 1:
            return Cost(2 * self.snapshot(size))
        headers = (
            3 * (self._cluster.node_latency_seconds + self._machine.message) * (self.mates - 1)
        )
        return self._share(size) + Cost(
            headers + 2 * self.snapshot(size) + self._machine.work(size, operations=3)
        )

    def _share(self, size: float) -> Cost:
        """Every rank of a node has a shard and gets the others'."""
        others = (1 - 1 / self.lanes) * size
        work = self._machine.work(size, passes=2, operations=1)
        return Cost(work + self._from_mates(others, size / self.lanes))

    def _from_mates(self, others: float, slot: float) -> float:
        """Meet, as often as the slots need, and read what the others have written."""
        meetings = ceil(slot / SLOT) * (self._machine.meeting + self._cluster.node_latency_seconds)
        return meetings + others / self._cluster.node_bytes_per_second
