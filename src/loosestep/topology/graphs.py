"""Who gossips with whom: rings, pairs, exponential graphs, any graph, and how fast they agree.

A mixing matrix T is doubly stochastic, so it keeps the mean; the squared disagreement shrinks per
round by its *contraction*, the second eigenvalue of E[T^T T]:

    fixed ring, n >= 5      ((1 + 2 cos(2 pi / n)) / 3)^2
    randomized ring         d - (1 - d)/(n - 1),   d = 1/3

Every function takes the ranks that are alive, so a ring closes over the gap a dead rank leaves. A
random choice follows from (seed, round) alone: everybody knows the ring of a round without any
traffic.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Graph = Mapping[int, Sequence[int]]

TOLERANCE = 1e-6  # of what a matrix in single precision sums to
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
            part = _reachable(matrix, min(left))
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


def ring_weight(n: int) -> float:
    return 0.5 if n == 2 else 1.0 / 3.0


def ring_matrix(n: int) -> Matrix:
    """1/3 self, 1/3 left, 1/3 right; n = 2: 1/2, 1/2."""
    matrix = np.eye(n)
    if n == 2:
        return np.full((2, 2), 0.5)
    if n > 2:
        matrix = (matrix + np.roll(np.eye(n), 1, axis=1) + np.roll(np.eye(n), -1, axis=1)) / 3.0
    return matrix


def pair_matrix(n: int, pairs: Sequence[tuple[int, int]]) -> Matrix:
    matrix = np.eye(n)
    for i, j in pairs:
        matrix[[i, i, j, j], [i, j, i, j]] = 0.5
    return matrix


def exponential_matrix(n: int, number: int) -> Matrix:
    """1/3 self, 1/3 each to the ranks 2^k hops before and after, k in turn: symmetric, so
    exchanges stay pairwise.
    """
    hops = [2**k for k in range(n) if 2**k < n] or [0]
    hop = hops[number % len(hops)]
    if 2 * hop % n == 0:
        return (np.eye(n) + np.roll(np.eye(n), hop, axis=1)) / 2.0
    return np.asarray(
        (np.eye(n) + np.roll(np.eye(n), hop, axis=1) + np.roll(np.eye(n), -hop, axis=1)) / 3.0
    )


def metropolis(graph: Graph, ranks: Sequence[int]) -> Matrix:
    """Doubly stochastic weights for any connected graph: T_ij = 1/(1 + max(degree_i, degree_j))
    on edges.
    """
    ranks = sorted(ranks)
    known = set(ranks)
    for rank, neighbours in graph.items():
        strangers = ({rank} | set(neighbours)) - known
        if strangers:
            raise ValueError(f"the graph names ranks {sorted(strangers)}; this run has {ranks}")
    edges = {frozenset((i, j)) for i, neighbours in graph.items() for j in neighbours if i != j}
    degree = {rank: sum(rank in edge for edge in edges) for rank in ranks}
    matrix = np.zeros((len(ranks), len(ranks)))
    for i, j in (sorted(edge) for edge in edges):
        a = ranks.index(i)
        b = ranks.index(j)
        matrix[a, b] = matrix[b, a] = 1.0 / (1 + max(degree[i], degree[j]))
    matrix[np.diag_indices(len(ranks))] = 1.0 - matrix.sum(axis=1)
    return check_matrix(matrix, len(ranks))


def check_matrix(given: Any, n: int) -> Matrix:
    """A symmetric, doubly stochastic matrix of a connected graph, or an error that shows where
    it is not.
    """
    matrix: Matrix = np.asarray(given, dtype=np.float64)
    if matrix.shape != (n, n):
        raise ValueError(
            f"the mixing matrix must be {n} x {n}, one row per rank; got "
            f"{' x '.join(map(str, matrix.shape))}"
        )
    for index, row in enumerate(matrix):
        if not np.all(np.isfinite(row)) or np.any(row < 0) or abs(row.sum() - 1) > TOLERANCE:
            raise ValueError(
                f"the mixing matrix is not doubly stochastic: row {index} is {row.tolist()}, sum "
                f"{row.sum():.9g}"
            )
    for index, column in enumerate(matrix.T):
        if abs(column.sum() - 1) > TOLERANCE:
            raise ValueError(
                f"the mixing matrix is not doubly stochastic: column {index} is "
                f"{column.tolist()}, sum {column.sum():.9g}"
            )
    uneven = np.argwhere(np.abs(matrix - matrix.T) > TOLERANCE)
    if len(uneven):
        i, j = map(int, uneven[0])
        raise ValueError(
            f"exchanges are pairwise, so T must be symmetric; T[{i},{j}]={matrix[i, j]:.9g}, "
            f"T[{j},{i}]={matrix[j, i]:.9g}"
        )
    apart = set(range(n)) - _reachable(matrix)
    if apart:
        raise ValueError(
            f"the graph is not connected: rank(s) {sorted(apart)} cannot be reached from rank 0"
        )
    return np.asarray((matrix + matrix.T) / 2)  # exactly symmetric, or the mean would move


def _reachable(matrix: Matrix, start: int = 0) -> set[int]:
    reached = {start}
    border = [start]
    while border:
        for other in np.flatnonzero(matrix[border.pop()]):
            if int(other) not in reached:
                reached.add(int(other))
                border.append(int(other))
    return reached


def contraction(matrices: Sequence[Matrix]) -> float:
    """Per round, the squared disagreement shrinks by this factor: the largest eigenvalue of
    mean(T^T T) off the mean.
    """
    squared = sum(
        (matrix.T @ matrix for matrix in matrices[1:]), start=matrices[0].T @ matrices[0]
    ) / len(matrices)
    n = len(squared)
    off_mean = np.eye(n) - np.full((n, n), 1.0 / n)
    return float(np.linalg.eigvalsh(off_mean @ squared @ off_mean)[-1])


def spectral_gap(matrix: Matrix) -> float:
    """1 - |second eigenvalue| of a mixing matrix."""
    return 1.0 - float(contraction([matrix]) ** 0.5)
