"""Clocks of all learners under gossip: every learner at its own pace, exchanges in the background.

Learners that reach a step boundary within the time of the shortest step do so together: one call of
the strategy moves all of them, and they use the same ring. A link is a queue: an exchange is done
when both learners' uplinks have carried what was before it, and its own bytes, one model each way.
An exchange takes `4 * bytes * gossip` seconds of processor, half of it on either side, and none is
begun while a learner's account is overdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from loosestep.core.gossip.budget import AIM, FOLDING, IDLE
from loosestep.core.gossip.mailbox import in_flight
from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.costs import NUMBER, Costs, Nodes, Times
from loosestep.sim.predict.lockstep import Gradients
from loosestep.sim.predict.machine import Machine
from loosestep.strategies.base import GossipPlan
from loosestep.topology import Topology
from loosestep.topology.graphs import GossipGraph, permutation

Indices = NDArray[np.int64]


class Paces:
    """The pace of many learners at once, where it has settled: as many exchanges as asked for, and
    no more than steps bear. Cores beyond the first of a rank are free for communication; of the
    first it may take what `slowdown` allows.
    """

    def __init__(self, learners: int, *, rate: float, slowdown: float, cores: float) -> None:
        self._rate = rate
        self._allowance = AIM * slowdown * min(1.0, cores) + max(0.0, cores - 1.0)
        self._account = np.zeros(learners)
        self._credit = np.zeros(learners)
        self._now = np.full(learners, np.nan)
        self._before = np.zeros(learners)

    def due(self, who: Indices, now: Times, used: Times) -> Indices:
        """The exchanges to begin at this step, by learner in `who`."""
        first = np.isnan(self._now[who])
        elapsed = np.where(first, 0.0, now - self._now[who])
        cost = np.where(first, 0.0, used - self._before[who])
        self._now[who] = now
        self._before[who] = used
        account = np.minimum(self._account[who] + self._allowance * elapsed - cost, self._allowance)
        credit = np.minimum(self._credit[who] + self._rate, max(1.0, self._rate))
        begun = np.where(account >= 0, np.floor(credit), 0.0)
        self._account[who] = account
        self._credit[who] = credit - begun
        return begun.astype(np.int64)


class Flights:
    """Exchanges in the air."""

    def __init__(self) -> None:
        self.learner = self.peer = self.step = np.empty(0, dtype=np.int64)
        self.done: Times = np.empty(0)

    def forget(self, now: float) -> Indices:
        """Those that have landed; the learners they have landed at."""
        still = self.done > now
        landed = np.concatenate([self.learner[~still], self.peer[~still]])
        if landed.size:
            self.learner = self.learner[still]
            self.peer = self.peer[still]
            self.step = self.step[still]
            self.done = self.done[still]
        return landed

    def add(self, learner: Indices, peer: Indices, step: Indices, done: Times) -> None:
        """More."""
        self.learner = np.concatenate([self.learner, learner])
        self.peer = np.concatenate([self.peer, peer])
        self.step = np.concatenate([self.step, step])
        self.done = np.concatenate([self.done, done])


class GossipClocks:
    """Drives a strategy that gossips on clocks; is its `Gossiping` for all learners that are at a boundary."""

    def __init__(
        self,
        strategy: GossipPlan,
        topology: Topology,
        cluster: Cluster,
        machine: Machine,
        *,
        costs: Costs,
        sizes: Sequence[int],
        durations: Times,
    ) -> None:
        nodes = Nodes(topology)
        as_nodes = strategy.replica == "node"
        if as_nodes and strategy.lockstep:
            raise ValueError("lockstep=True is for tests with replica='rank'; got replica='node'")
        learners = len(topology.nodes) if as_nodes else topology.world
        self._strategy = strategy
        self._cluster = cluster
        self._machine = machine
        self._graph = strategy.graph_of(learners)
        self._learner_of_rank = nodes.of_rank if as_nodes else np.arange(learners)
        self._node = np.arange(learners) if as_nodes else nodes.of_rank
        self._durations = node_steps(sizes, durations, nodes, costs) if as_nodes else durations
        self._inner_waits = (self._durations[self._learner_of_rank] - durations).mean(axis=1)
        self._size = sum(sizes)
        codec = strategy.moves_in
        # what a pair sends of it, each way
        self._coded = self._size * (1.0 if codec is None else codec.bytes_per_value / NUMBER)
        self._shard = sum(sizes) / (costs.lanes if as_nodes else 1)
        chunk, window = in_flight(round(self._shard), learners - 1)
        turns = ceil(self._shard / chunk / window)
        self._delay = 2 * turns * (cluster.latency_seconds + machine.message)
        self._rate = cluster.bytes_per_second * machine.payload
        self._backbone_rate = cluster.backbone_bytes_per_second * machine.payload
        self._paces = Paces(
            learners, rate=strategy.rate, slowdown=strategy.slowdown, cores=machine.cores
        )
        self._fold_cost = machine.work(self._shard, passes=2)
        self._flights = Flights()
        # when they have carried everything
        self._uplink = np.zeros(len(topology.nodes))
        self._backbone = 0.0
        # when it is idle; its seconds of processor
        self._courier = np.zeros(learners)
        self._used = np.zeros(learners)
        self._folded = np.full(learners, -np.inf)
        # the step whose parameters peers meet
        self._published: Indices = np.full(learners, -1, dtype=np.int64)
        self._waiting = np.zeros(learners, dtype=bool)  # something has landed since the last fold
        self._at: Indices = np.arange(learners)  # the learners at a boundary
        self._due: Indices = np.zeros(learners, dtype=np.int64)  # their exchanges to begin
        self._made: Indices = np.zeros(learners, dtype=np.int64)
        self._time = np.zeros(learners)
        self._waits = np.zeros(learners)
        self.sent = 0.0
        self.exchanges = 0

    def run(self, steps: int) -> None:
        """Until there are as many gradients as if every learner had made so many steps.
        Durations repeat.
        """
        state = self._strategy.begin()
        together = self._strategy.lockstep
        length = self._durations.shape[1]
        shortest = float(self._durations.min())
        ready = self._durations[:, 0].copy()
        left = steps * ready.size
        while left > 0:
            now = float(ready.min())
            self._at = (
                np.arange(ready.size)
                if together
                else np.flatnonzero(ready <= now + shortest * (1 - 1e-9))
            )
            self._waiting[self._flights.forget(now)] = True
            self._time[self._at] = ready[self._at] + self._machine.step / min(
                1.0, self._machine.cores
            )
            self._strategy.boundary(state, self)
            self._made[self._at] += 1
            ready[self._at] = (
                self._time[self._at] + self._durations[self._at, self._made[self._at] % length]
            )
            left -= self._at.size

    @property
    def clock(self) -> Times:
        """When each rank made its last step."""
        return self._time[self._learner_of_rank]

    @property
    def steps(self) -> Indices:
        """How many steps each rank made."""
        return self._made[self._learner_of_rank]

    @property
    def waited(self) -> Times:
        """Seconds each rank waited, for its node or for old exchanges."""
        return np.asarray(self._waits[self._learner_of_rank] + self._inner_waits * self.steps)

    # The strategy's side (`Gossiping`) ------------------------------------------------------------

    def fold(self) -> None:
        """As often as its share of the time allows, which is less while nothing has landed."""
        most = min(1.0, FOLDING * self._strategy.slowdown)
        share = np.where(self._waiting[self._at], most, IDLE * most)
        rested = self._time[self._at] - self._folded[self._at] >= self._fold_cost / share
        self._land(self._at[rested] if self._strategy.replica == "rank" else self._at)

    def _land(self, learners: Indices) -> None:
        """Two passes over the model."""
        self._folded[learners] = self._time[learners]
        self._published[learners] = self._made[learners]
        self._waiting[learners] = False
        self._time[learners] += self._fold_cost
        self._used[learners] += self._fold_cost

    def due(self) -> float:
        """The most that any learner here is to begin; `exchange` knows whose turn it is."""
        self._due = self._paces.due(self._at, self._time[self._at], self._used[self._at])
        return float(self._due.max(initial=0))

    def exchange(self, round_number: int, share: float = 1.0) -> None:
        """Learners for which one is due and whose partner of this round is not busy with them."""
        begins = self._at[self._due > 0]
        self._due = self._due - 1
        partners = partners_of(self._graph, round_number)[begins]
        learners = self._made.size
        free = ~np.isin(
            begins * learners + partners, self._flights.learner * learners + self._flights.peer
        )
        free &= partners >= 0
        begins = begins[free]
        partners = partners[free]
        if not begins.size:
            return
        self._land(begins[self._published[begins] != self._made[begins]])
        done = (
            np.maximum(self._carry(begins, partners), self._handle(begins, partners)) + self._delay
        )
        self._flights.add(begins, partners, self._made[begins], done)
        self.exchanges += begins.size

    def _carry(self, begins: Indices, partners: Indices) -> Times:
        """When the uplinks have carried the models of these pairs, both ways at the same time."""
        start = float(self._time[begins].min())
        mine = self._node[begins]
        theirs = self._node[partners]
        between = mine != theirs
        crossing = int(between.sum())
        models = np.bincount(mine[between], minlength=self._uplink.size)
        models = models + np.bincount(theirs[between], minlength=self._uplink.size)
        busy = models > 0
        self._uplink[busy] = (
            np.maximum(self._uplink[busy], start) + models[busy] * self._coded / self._rate
        )
        self._backbone = (
            max(self._backbone, start) + 2 * crossing * self._coded / self._backbone_rate
        )
        self.sent += 2 * crossing * self._coded
        carried = np.maximum(np.maximum(self._uplink[mine], self._uplink[theirs]), self._backbone)
        inside = self._time[begins] + self._size / self._cluster.node_bytes_per_second
        return np.where(between, np.maximum(carried, inside), inside)

    def _handle(self, begins: Indices, partners: Indices) -> Times:
        """When the communication threads of both sides have done their work."""
        each = 2 * self._shard * self._machine.gossip
        work = np.bincount(np.concatenate([begins, partners]), minlength=self._used.size) * each
        busy = work > 0
        self._used += work
        start = float(self._time[begins].min())
        self._courier[busy] = np.maximum(self._courier[busy], start) + work[busy]
        return np.maximum(self._courier[begins], self._courier[partners])

    def mix(self, round_number: int) -> None:
        """Wait for the neighbours of the round, fetch their models, fold."""
        self.fold()
        matrix = self._graph.matrix(round_number)
        neighbours = (matrix > 0) & ~np.eye(len(matrix), dtype=bool)
        between = (neighbours & (self._node[:, None] != self._node[None, :])).sum(axis=1)
        uplink = (
            np.bincount(self._node, weights=between.astype(np.float64))[self._node]
            * self._size
            / self._rate
        )
        start = np.where(neighbours, self._time[None, :], 0.0).max(axis=1)
        inside = neighbours.sum(axis=1) * self._size / self._cluster.node_bytes_per_second
        arrived = np.maximum(start, self._time) + np.maximum(uplink, inside) + self._delay
        self._waits += arrived - self._time
        self._time = arrived + self._machine.work(self._size, passes=2)
        self.sent += float(between.sum()) * self._size
        self.exchanges += int(neighbours.sum()) // 2

    def wait_for(self, age: int) -> None:
        """Wait for own exchanges that are as many steps old."""
        flights = self._flights
        old = np.isin(flights.learner, self._at) & (
            self._made[flights.learner] - flights.step >= age
        )
        before = self._time.copy()
        np.maximum.at(self._time, flights.learner[old], flights.done[old])
        self._waits += self._time - before


def node_steps(sizes: Sequence[int], durations: Times, nodes: Nodes, costs: Costs) -> Times:
    """Seconds of a node's steps: gradients are averaged among its ranks, then they share their
    shards of the model.
    """
    gradients = Gradients(sizes, nodes, costs)
    start = np.zeros(len(durations))
    shared = costs.gather_shards(sum(sizes)).seconds

    def ends(seconds: Times) -> Times:
        if costs.mates == 1:
            return seconds
        return gradients.average(start, seconds, scope="node", contend=lambda *_: 0.0)[0]

    return np.stack([nodes.greatest(ends(seconds)) + shared for seconds in durations.T], axis=1)


def partners_of(graph: GossipGraph, number: int) -> Indices:
    """Whom each learner contacts in its round `number`; -1 for nobody. Draws differ from the
    real ones, not their odds.
    """
    learners = len(graph.ranks)
    index = np.arange(learners)
    if learners < 2:
        return np.full(learners, -1)
    if graph.name == "random-ring":
        ring = np.asarray(permutation(graph.ranks, graph.seed, number))
        partners = np.empty(learners, dtype=np.int64)
        partners[ring] = np.roll(ring, -1)
        return partners
    if graph.name == "ring":
        return np.asarray((index + 1) % learners)
    if graph.name == "exponential":
        hops = [2**k for k in range(learners) if 2**k < learners]
        return np.asarray((index + hops[number % len(hops)]) % learners)
    draw = np.random.default_rng([graph.seed, number])
    if graph.name == "pairs":
        return np.asarray((index + draw.integers(1, learners, learners)) % learners)
    weights = graph.matrix(number)
    if not graph.rests:
        np.fill_diagonal(weights, 0.0)
    edges = weights.cumsum(axis=1)
    drawn: Indices = (draw.random(learners)[:, None] * edges[:, -1:] >= edges).sum(axis=1)
    return np.where(drawn == index, -1, drawn)
