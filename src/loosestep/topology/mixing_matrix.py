"""Mixing matrices: made for rings, pairs and graphs, checked, and how fast they agree.

A mixing matrix T is doubly stochastic, so it keeps the mean; the squared disagreement shrinks per
round by its *contraction*, the second eigenvalue of E[T^T T]:

    fixed ring, n >= 5      ((1 + 2 cos(2 pi / n)) / 3)^2
    randomized ring         d - (1 - d)/(n - 1),   d = 1/3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Graph = Mapping[int, Sequence[int]]

TOLERANCE = 1e-6  # of what a matrix in single precision sums to


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
    apart = set(range(n)) - reachable(matrix)
    if apart:
        raise ValueError(
            f"the graph is not connected: rank(s) {sorted(apart)} cannot be reached from rank 0"
        )
    return np.asarray((matrix + matrix.T) / 2)  # exactly symmetric, or the mean would move


def reachable(matrix: Matrix, start: int = 0) -> set[int]:
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
