"""What a gossip run tells about its peers: in the log of events, and to the user where it
matters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from loosestep.core.world import World
from loosestep.events import Trace
from loosestep.topology.graphs import GossipGraph

log = logging.getLogger("loosestep")


class PeerNews:
    """Hears the events of a mailbox. `ending`: who goes now goes in order. `size`: the numbers
    in a model.
    """

    def __init__(
        self, graph: GossipGraph, members: Sequence[int], *, world: World, trace: Trace
    ) -> None:
        self.ending = False
        self.size = 0
        self._graph = graph
        self._members = members
        self._topology = world.topology
        self._node = world.topology.node_of(world.rank)
        self._trace = trace
        self._gone = set[int]()
        self._parts = 1
        self._slow = set[int]()  # peers that the user has been told about

    def between_nodes(self, sent: int) -> int:
        """How many of these bytes went to other nodes, if all peers got as much."""
        strangers = [rank for rank in self._members if self._topology.node_of(rank) != self._node]
        return sent * len(strangers) // max(1, len(self._members) - 1)

    def hear(self, kind: str, **fields: Any) -> None:
        """Log an event of the mailbox, from either of its threads, and tell the user once what
        matters.
        """
        if kind == "traffic":
            self._log_traffic(**fields)
            return
        self._trace.emit(kind, **fields)
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
        if kind in ("peer_dead", "peer_left") and not self.ending:
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
            self._trace.emit("sent", bytes=sent, between_nodes=self.between_nodes(sent))
            self._trace.emit("distance", value=distance * self.size**0.5)

    def _check_graph(self, gone: int) -> None:
        """Say so when learners are left that no longer hear of each other."""
        self._gone.add(gone)
        parts = self._graph.parts(
            {index for index, rank in enumerate(self._members) if rank not in self._gone}
        )
        if len(parts) > self._parts:
            named = [[self._members[index] for index in part] for part in parts]
            self._trace.emit("graph_apart", parts=named)
            log.warning(
                "without rank %s the graph has fallen apart: the ranks %s average among "
                "themselves only, until the end of the run",
                gone,
                " and ".join(map(str, named)),
            )
        self._parts = len(parts)
