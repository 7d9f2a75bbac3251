"""Who gossips with whom: rings, pairs, exponential graphs, or any graph.

Every function takes the ranks that are alive, so a ring closes over the gap a dead rank leaves. A
random choice follows from (seed, round) alone: everybody knows the ring of a round without any
traffic.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from loosestep.topology.mixing_matrix import (
    Graph,
    Matrix,
    check_matrix,
    exponential_matrix,
    metropolis,
    pair_matrix,
    reachable,
    ring_matrix,
    ring_weight,
)

GRAPHS = ("ring", "random-ring", "pairs", "exponential")


class GossipGraph:
    """The peers of a run. `graph`: one of GRAPHS, a graph {rank: neighbours} or a mixing
    matrix over `ranks`.
    """

    def __init__(
        self,
        graph: str | Graph | Sequence[Sequence[float]] | Matrix,
        ranks: Sequence[int],
        *,
        seed: int = 0,
    ) -> None:
        self.ranks = sorted(ranks)
        self.seed = seed
        self.name = graph if isinstance(graph, str) else "explicit"
        self._matrix: Matrix | None = None
        # a matrix says how often a rank keeps to itself
        self.rests = not isinstance(graph, str | Mapping)
        if isinstance(graph, str):
            if graph not in GRAPHS:
                raise ValueError(
                    f"unknown graph {graph!r}; valid ones: {', '.join(GRAPHS)}, {{rank: "
                    "neighbours}} or a mixing matrix"
                )
        elif isinstance(graph, Mapping):
            self._matrix = metropolis(graph, self.ranks)
        else:
            self._matrix = check_matrix(graph, len(self.ranks))

    def partner(self, rank: int, number: int, alive: set[int]) -> tuple[int, float] | None:
        """Whom `rank` contacts in its round `number`, and with which weight; None when nobody is
        left, or a matrix has it rest. Free-running: the ring of a round is the initiator's view,
        and it contacts its successor only.
        """
        members = self._members(rank, alive)
        if len(members) < 2:
            return None
        draw = random.Random(f"{self.seed}/{number}/{rank}")
        if self._matrix is not None:
            return self._weighted(rank, members, draw)
        if self.name == "pairs":
            return draw.choice([other for other in members if other != rank]), 0.5
        if self.name == "exponential":
            hops = [2**k for k in range(len(members)) if 2**k < len(members)]
            return members[(members.index(rank) + hops[number % len(hops)]) % len(members)], 0.5
        ring = permutation(members, self.seed, number) if self.name == "random-ring" else members
        return ring[(ring.index(rank) + 1) % len(ring)], ring_weight(len(ring))

    def round(self, rank: int, number: int, alive: set[int]) -> dict[int, float]:
        """{neighbour: weight} of `rank` in lockstep round `number`: its row of the round's
        matrix.
        """
        members = self._members(rank, alive)
        row = self.matrix(number, members)[members.index(rank)]
        return {
            other: float(w)
            for other, w in zip(members, row, strict=True)
            if other != rank and w > 0
        }

    def matrix(self, number: int, alive: Sequence[int] | None = None) -> Matrix:
        """The mixing matrix of a lockstep round over the live ranks in ascending order."""
        members = self.ranks if alive is None else sorted(alive)
        n = len(members)
        if self._matrix is not None:
            return self._shrunk(members)
        if self.name == "ring":
            return ring_matrix(n)
        if self.name == "random-ring":
            order = np.array(
                [members.index(rank) for rank in permutation(members, self.seed, number)]
            )
            mixed = np.empty((n, n))
            mixed[np.ix_(order, order)] = ring_matrix(n)
            return mixed
        if self.name == "pairs":
            drawn = [members.index(rank) for rank in permutation(members, self.seed, number)]
            return pair_matrix(n, [(drawn[k], drawn[k + 1]) for k in range(0, n - 1, 2)])
        return exponential_matrix(n, number)

    def _members(self, rank: int, alive: set[int]) -> list[int]:
        return [other for other in self.ranks if other in alive or other == rank]

    def _weighted(
        self, rank: int, members: list[int], draw: random.Random
    ) -> tuple[int, float] | None:
        """A neighbour with probability in proportion to its weight, averaged half and half; with
        that of the diagonal of a given matrix nobody.
        """
        row = self._shrunk(members)[members.index(rank)]
        drawn = [
            (other, w)
            for other, w in zip(members, row, strict=True)
            if w > 0 and (self.rests or other != rank)
        ]
        if not drawn:
            return None
        (chosen,) = draw.choices([other for other, _ in drawn], [w for _, w in drawn])
        return None if chosen == rank else (chosen, 0.5)

    def parts(self, alive: set[int]) -> list[list[int]]:
        """The live ranks, as groups that hear of each other; several when a graph has fallen
        apart.
        """
        members = sorted(alive)
        if self._matrix is None or not members:
            return [members]
        matrix = self._shrunk(members)
        left = set(range(len(members)))
        parts = []
        while left:
            part = reachable(matrix, min(left))
            left -= part
            parts.append([members[index] for index in sorted(part)])
        return parts

    def _shrunk(self, members: list[int]) -> Matrix:
        """The matrix over the survivors: what a dead rank would have got stays with its
        neighbours' own value.
        """
        assert self._matrix is not None
        kept = [self.ranks.index(rank) for rank in members]
        matrix: Matrix = self._matrix[np.ix_(kept, kept)].copy()
        matrix[np.diag_indices(len(kept))] += 1.0 - matrix.sum(axis=1)
        return matrix

    def note(self) -> str:
        """What a user should know about this choice; empty when there is nothing."""
        if self.name == "random-ring" and len(self.ranks) == 2:
            return "random-ring with 2 ranks equals pairs"
        return ""


def permutation(members: Sequence[int], seed: int, number: int) -> list[int]:
    """The order of a round, the same on every rank."""
    order = sorted(members)
    random.Random(f"{seed}/{number}").shuffle(order)
    return order
