"""The groups that one communication thread works on: the world, a node, a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from loosestep.core.collectives.gloo import Channel
from loosestep.core.collectives.rows import read_rows, room_for, write_rows
from loosestep.core.collectives.surroundings import Surroundings
from loosestep.topology import Topology


class Channels:
    """The groups of one thread: the world, the ranks of this node, and this rank's lane (None
    beyond the last lane).

    `near_node`, `near_lane`: the same ranks, for values on their devices; None where those travel
    over the host.
    """

    def __init__(
        self,
        name: str,
        *,
        world: Surroundings,
        nodes: Topology,
        lanes: int,
        near_node: bool = False,
        near_lane: bool = False,
    ) -> None:
        rank = world.rank
        channel = world.channels(name)
        mates = nodes.mates(rank)
        index = nodes.local_index(rank)
        self.lanes = lanes
        self.world = channel(range(nodes.world))
        self.node = self.world if len(nodes.nodes) == 1 else channel(mates)
        self.lane: Channel | None = None
        if index < lanes:
            lane = nodes.lane(index)
            self.lane = self.world if lane == self.world.ranks else channel(lane)
        self.near_node = world.near_channel(name, mates) if near_node else None
        self.near_lane = (
            world.near_channel(name, self.lane.ranks)
            if near_lane and self.lane is not None
            else None
        )
        everything = (self.near_node, self.near_lane, self.world, self.node, self.lane)
        self._distinct = {id(c): c for c in everything if c is not None}.values()
        self._reported = (0, 0)
        self._crosses = len(nodes.nodes) > 1
        self.sums_between_nodes = len(nodes.nodes) == 2
        order = [mate for node in nodes.nodes for mate in node]
        # of every rank among the rows of all nodes
        self._places = [order.index(mate) for mate in range(nodes.world)]
        self._even = len(nodes.nodes) == 1 or set(nodes.weights) == {lanes}

    def carries_rows(self, dtype: torch.dtype) -> bool:
        """Whether numbers can ride on sums of such a type along the lanes: between nodes of equal
        size, by the backend's own sum.
        """
        crossing = self._crosses and self._even
        return crossing and self.lane is not None and self.lane.sums(dtype)

    def room(self, numbers: int) -> int:
        """The elements that so many numbers of every rank need at the end of a lane's vector."""
        return room_for(len(self._places), numbers)

    def sum_lane(
        self, memory: torch.Tensor, mates: Sequence[Sequence[float]]
    ) -> Callable[[], torch.Tensor]:
        """Begin to add `memory` up along the lane; at its end is the room for the rows of all ranks,
        of which this node knows those of its own. What is returned waits for everybody's rows, in
        rank order.
        """
        lane = have(self.lane)
        rows = torch.tensor(mates, dtype=torch.float64)
        room = memory[memory.numel() - self.room(rows.shape[1]) :]
        write_rows(room, rows, place=lane.index, places=lane.size)
        summed = lane.begin_sum(memory)

        def told() -> torch.Tensor:
            summed()
            return read_rows(room, rows.shape[1])[self._places]

        return told

    def rely_on_ring(self) -> None:
        """The backend adds up as is known of it: use its own sums between nodes."""
        self.sums_between_nodes = self._crosses
        if self.lane is not None:
            self.lane.rely_on_ring()

    def tell(self, *numbers: float) -> torch.Tensor:
        """Everybody's few numbers, row r from rank r. A node's rows meet in its memory and then
        travel along each lane: fewer hops than a ring of all ranks, which is left for nodes of
        unequal size.
        """
        if not self._even:
            return self.world.gather(torch.tensor(numbers, dtype=torch.float64))
        rows = torch.tensor(self.node.tell(*numbers), dtype=torch.float64)
        if self.node is self.world:
            return rows
        return have(self.lane).gather(rows).flatten(0, 1)[self._places]

    def traffic(self) -> tuple[int, int]:
        """Bytes sent since the last call: in all, and to other nodes."""
        total = (
            sum(c.bytes_sent for c in self._distinct),
            sum(c.bytes_between_nodes for c in self._distinct),
        )
        new = (total[0] - self._reported[0], total[1] - self._reported[1])
        self._reported = total
        return new

    def close(self) -> None:
        for channel in self._distinct:
            channel.close()

    def abandon(self) -> None:
        for channel in self._distinct:
            channel.abandon()


def have(lane: Channel | None) -> Channel:
    """Sharded nodes are equally large: every rank has a lane."""
    assert lane is not None
    return lane
