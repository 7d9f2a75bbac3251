"""Who is on which node, and which ranks form a lane.

A *node* is a machine, a *lane* the ranks of equal local index across nodes. Ranks learn their node
from what started them (torchrun, Slurm, Open MPI) or from an explicit `Topology`. When replicas are
nodes, a replica counts as its number of ranks in every average, so that each rank's data weighs the
same on uneven nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """Ranks by node: `Topology([[0, 1], [2, 3]])` is two nodes of two ranks."""

    nodes: tuple[tuple[int, ...], ...]

    def __init__(self, nodes: Sequence[Sequence[int]]) -> None:
        ranks = [rank for node in nodes for rank in node]
        if not ranks or any(len(node) == 0 for node in nodes):
            raise ValueError(
                f"a topology needs at least one node and one rank on every node, got {list(nodes)}"
            )
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"a topology must name every rank from 0 to {len(ranks) - 1} exactly once, got "
                f"{sorted(ranks)}"
            )
        ordered = sorted((tuple(sorted(node)) for node in nodes), key=lambda node: node[0])
        object.__setattr__(self, "nodes", tuple(ordered))

    @classmethod
    def grid(cls, nodes: int, ranks_per_node: int) -> Topology:
        """`nodes` equal nodes, ranks numbered node by node."""
        return cls([range(n * ranks_per_node, (n + 1) * ranks_per_node) for n in range(nodes)])

    @classmethod
    def from_names(cls, names: Sequence[str]) -> Topology:
        """Group ranks whose node name is the same; `names[r]` is the node of rank r."""
        groups: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            groups.setdefault(name, []).append(rank)
        return cls(list(groups.values()))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def lanes(self) -> int:
        """How many lanes cross every node: the size of the smallest node."""
        return min(len(node) for node in self.nodes)

    @property
    def multiple(self) -> int:
        """What the length of an averaged vector must divide by: into shards of lanes, these into
        chunks of nodes.
        """
        return self.lanes * len(self.nodes)

    @property
    def weights(self) -> tuple[int, ...]:
        """What each node counts in an average: its number of ranks."""
        return tuple(len(node) for node in self.nodes)

    def node_of(self, rank: int) -> int:
        """The index of the node that holds `rank`."""
        return self._homes[rank]

    @cached_property
    def _homes(self) -> dict[int, int]:
        return {rank: index for index, node in enumerate(self.nodes) for rank in node}

    def mates(self, rank: int) -> tuple[int, ...]:
        """The ranks on the node of `rank`, itself included."""
        return self.nodes[self.node_of(rank)]

    def local_index(self, rank: int) -> int:
        """The position of `rank` on its node."""
        return self.mates(rank).index(rank)

    def lane(self, index: int) -> tuple[int, ...]:
        """The ranks of local index `index`, one per node."""
        return tuple(node[index] for node in self.nodes)

    def flat(self) -> Topology:
        """The same ranks, each a node of its own: for strategies whose replica is the rank."""
        return Topology([[rank] for rank in range(self.world)])
