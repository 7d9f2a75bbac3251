"""How long messages take: latency plus bytes over bandwidth, one after another on a node's uplink.

    a message     leaves when the sender's uplink is free, arrives when the receiver's has taken it,
                  plus the latency
    a collective  every uplink carries its share of the bytes after what it carries already; the
                  last one ends it

An uplink carries as much in each direction at the same time. Messages inside a node do not touch
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loosestep.sim.cluster import Cluster
from loosestep.topology import Topology

Pattern = Literal["ring", "swap", "sum", "tree", "memory"]


@dataclass(frozen=True)
class Flow:
    """A collective among some ranks, for every byte that a rank contributes."""

    out: dict[int, float]  # bytes through each node's uplink, one way
    inside: float  # bytes that the busiest rank sends inside its node
    hops: float  # latencies in a row between nodes
    node_hops: float  # and inside a node


class Links:
    """The links of a cluster, and until when each is busy."""

    def __init__(self, cluster: Cluster, topology: Topology) -> None:
        self._cluster = cluster
        self._node = [topology.node_of(rank) for rank in range(topology.world)]
        self._out = [0.0] * len(topology.nodes)
        self._in = [0.0] * len(topology.nodes)
        self._backbone = 0.0
        # bytes of messages; collectives are counted by who takes part
        self.sent = self.sent_between_nodes = 0

    def send(self, now: float, source: int, dest: int, size: int) -> float:
        """When a message of `size` bytes arrives."""
        cluster = self._cluster
        a = self._node[source]
        b = self._node[dest]
        self.sent += size
        if a == b:
            return now + cluster.node_latency_seconds + size / cluster.node_bytes_per_second
        self.sent_between_nodes += size
        takes = size / cluster.bytes_per_second
        left = self._out[a] = max(now, self._out[a]) + takes
        if cluster.backbone is not None:
            self._backbone = max(left, self._backbone + size / cluster.backbone_bytes_per_second)
            left = self._backbone
        taken = self._in[b] = max(left, self._in[b] + takes)
        return taken + cluster.latency_seconds

    def collective(self, now: float, flow: Flow, size: float) -> float:
        """When a collective to which every rank contributes `size` bytes is complete."""
        cluster = self._cluster
        end = now + flow.inside * size / cluster.node_bytes_per_second
        for node, share in flow.out.items():
            takes = share * size / cluster.bytes_per_second
            self._out[node] = max(now, self._out[node]) + takes
            self._in[node] = max(now, self._in[node]) + takes
            end = max(end, self._out[node], self._in[node])
        if cluster.backbone is not None and flow.out:
            takes = sum(flow.out.values()) * size / cluster.backbone_bytes_per_second
            self._backbone = max(now, self._backbone) + takes
            end = max(end, self._backbone)
        return (
            end
            + flow.hops * cluster.latency_seconds
            + flow.node_hops * cluster.node_latency_seconds
        )

    def flow(self, ranks: Sequence[int], pattern: Pattern) -> Flow:
        """How the bytes of a collective travel; see `flow_among`."""
        return flow_among([self._node[rank] for rank in ranks], pattern)


def flow_among(nodes: Sequence[int], pattern: Pattern) -> Flow:
    """Among ranks on these nodes: "ring" hands every rank's bytes around all others, "swap" sends
    an equal part of them to each other rank, "sum" adds them up around a ring, to all, "tree" is
    one rank's bytes to all, "memory" shows them to the node.
    """
    n = len(nodes)
    spread = len(set(nodes)) > 1
    if n == 1:
        return Flow({}, 0.0, 0.0, 0.0)
    if pattern == "memory":
        return Flow({}, 1.0, 0.0, 1.0)
    if pattern == "tree":
        rounds = (n - 1).bit_length()
        out = dict.fromkeys(set(nodes), float(rounds)) if spread else {}
        return Flow(out, 0.0 if spread else float(rounds), rounds * spread, rounds * (not spread))
    per_node = Counter(nodes)
    if pattern == "swap":
        out = {node: count * (n - count) / n for node, count in per_node.items() if spread}
        inside = (max(per_node.values()) - 1) / n
        return Flow(out, inside, float(spread), float(not spread))
    steps = n - 1 if pattern == "ring" else 2 * (n - 1) / n
    leaving = Counter(
        node for node, right in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if node != right
    )
    out = {node: float(steps * count) for node, count in leaving.items()}
    inside = float(steps) if len(set(nodes)) < n else 0.0
    hops = n - 1 if pattern == "ring" else 2 * (n - 1)
    return Flow(out, inside, hops * spread, hops * (not spread))
