"""Who gossips with whom: matrices keep the mean, contract as the theory says, and close over
gaps.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.topology.graphs import GRAPHS, GossipGraph
from loosestep.topology.mixing_matrix import (
    check_matrix,
    contraction,
    metropolis,
    ring_matrix,
    spectral_gap,
)


@given(st.sampled_from(GRAPHS), st.integers(1, 17), st.integers(0, 50), st.integers(0, 3))
def test_every_round_is_doubly_stochastic_and_symmetric(topology, n, number, seed):
    matrix = GossipGraph(topology, range(n), seed=seed).matrix(number)
    np.testing.assert_allclose(matrix.sum(axis=0), 1)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    np.testing.assert_allclose(matrix, matrix.T)
    assert np.all(matrix >= 0)


@pytest.mark.parametrize(
    ("n", "fixed", "randomized"), [(8, 0.648, 0.238), (16, 0.901, 0.289), (32, 0.975, 0.312)]
)
def test_contraction_is_the_published_one(n, fixed, randomized):
    assert contraction([ring_matrix(n)]) == pytest.approx(
        ((1 + 2 * math.cos(2 * math.pi / n)) / 3) ** 2
    )
    assert contraction([ring_matrix(n)]) == pytest.approx(fixed, abs=1e-3)
    gossip = GossipGraph("random-ring", range(n), seed=1)
    rng = np.random.default_rng(0)
    ratios = []
    for number in range(400):
        x = rng.standard_normal((n, 50))
        x -= x.mean(axis=0)
        ratios.append(np.sum((gossip.matrix(number) @ x) ** 2) / np.sum(x**2))
    assert np.mean(ratios) == pytest.approx(randomized, rel=0.02)
    assert randomized == pytest.approx(1 / 3 - (2 / 3) / (n - 1), abs=1e-3)


def test_fixed_and_randomized_rings_are_the_same_at_four_ranks():
    assert contraction([ring_matrix(4)]) == pytest.approx(1 / 9)
    assert contraction(
        [GossipGraph("random-ring", range(4)).matrix(k) for k in range(20)]
    ) == pytest.approx(1 / 9)


def test_two_ranks_average_half_and_half():
    for topology in GRAPHS:
        np.testing.assert_allclose(GossipGraph(topology, [0, 1]).matrix(0), 0.5)
    assert GossipGraph("random-ring", [0, 1]).partner(0, 3, {1}) == (1, 0.5)
    assert "equals pairs" in GossipGraph("random-ring", [0, 1]).note()


def test_one_rank_has_nobody_to_talk_to():
    for topology in GRAPHS:
        assert GossipGraph(topology, [0]).partner(0, 0, set()) is None
        assert GossipGraph(topology, [0]).round(0, 0, set()) == {}


def test_a_ring_closes_over_the_gap():
    gossip = GossipGraph("ring", range(5))
    assert gossip.partner(1, 0, {0, 2, 3, 4}) == (2, pytest.approx(1 / 3))
    assert gossip.partner(1, 0, {0, 3, 4}) == (3, pytest.approx(1 / 3))
    assert gossip.partner(4, 0, {1, 3}) == (1, pytest.approx(1 / 3))
    assert gossip.partner(4, 0, {3}) == (3, 0.5)


@given(st.sampled_from(GRAPHS), st.sets(st.integers(0, 15), min_size=2), st.integers(0, 40))
def test_the_rows_of_all_survivors_are_one_matrix(topology, alive, number):
    gossip = GossipGraph(topology, range(16), seed=5)
    members = sorted(alive)
    matrix = np.zeros((len(members), len(members)))
    for i, rank in enumerate(members):
        for other, weight in gossip.round(rank, number, alive - {rank}).items():
            matrix[i, members.index(other)] = weight
    np.testing.assert_allclose(matrix, matrix.T)
    assert np.all(matrix.sum(axis=1) <= 1 + 1e-12)


@given(st.sampled_from(GRAPHS), st.integers(0, 100), st.sets(st.integers(0, 7), min_size=2))
def test_a_partner_is_alive_and_somebody_else(topology, number, alive):
    rank = min(alive)
    partner, weight = GossipGraph(topology, range(8)).partner(rank, number, alive - {rank})
    assert partner in alive - {rank}
    assert 0 < weight <= 0.5


def test_the_exponential_graph_reaches_everybody():
    gossip = GossipGraph("exponential", range(8))
    assert {gossip.partner(0, number, set(range(1, 8)))[0] for number in range(10)} == {1, 2, 4}
    assert contraction([gossip.matrix(0)]) > contraction(
        [gossip.matrix(2) @ gossip.matrix(1) @ gossip.matrix(0)]
    )


def test_a_graph_becomes_a_doubly_stochastic_matrix():
    star = GossipGraph({0: [1, 2, 3]}, range(4))
    np.testing.assert_allclose(star.matrix(0).sum(axis=0), 1)
    assert star.partner(2, 0, {0, 1, 3}) == (0, 0.5)
    assert {star.partner(0, k, {1, 2, 3})[0] for k in range(30)} == {1, 2, 3}
    assert star.partner(2, 0, {1, 3}) is None


def test_the_diagonal_of_a_matrix_says_how_often_a_rank_rests():
    lazy = GossipGraph([[0.9, 0.1], [0.1, 0.9]], [0, 1])
    partners = [lazy.partner(0, number, {1}) for number in range(1000)]
    assert set(partners) == {None, (1, 0.5)}
    assert partners.count(None) == pytest.approx(900, abs=40)


def test_a_graph_that_falls_apart_says_into_what():
    path = GossipGraph({0: [1], 1: [2], 2: [3], 3: [4]}, range(5))
    assert path.parts({0, 1, 2, 3, 4}) == [[0, 1, 2, 3, 4]]
    assert path.parts({0, 1, 3, 4}) == [[0, 1], [3, 4]]
    assert path.parts({0, 2, 4}) == [[0], [2], [4]]
    assert GossipGraph("ring", range(5)).parts({0, 2, 4}) == [[0, 2, 4]]


def test_a_shrunk_matrix_stays_doubly_stochastic():
    matrix = GossipGraph(ring_matrix(6), range(6)).matrix(0, [0, 1, 2, 4, 5])
    np.testing.assert_allclose(matrix.sum(axis=0), 1)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)


def test_an_unknown_graph_lists_the_valid_ones():
    with pytest.raises(
        ValueError, match=r"unknown graph 'torus'.*ring, random-ring, pairs, exponential"
    ):
        GossipGraph("torus", range(4))


def test_a_graph_that_is_not_connected_names_who_is_apart():
    with pytest.raises(ValueError, match=r"not connected: rank\(s\) \[2, 3\]"):
        GossipGraph({0: [1], 2: [3]}, range(4))


def test_a_graph_with_strangers_is_refused():
    with pytest.raises(ValueError, match=r"names ranks \[9\]"):
        metropolis({0: [9]}, range(4))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, 0.6], [0.5, 0.4]], r"row 0 is \[0.5, 0.6\], sum 1.1"),
        ([[0.5, 0.5], [0.2, 0.8]], r"column 0 is"),
        ([[0.5, 0.50001], [0.50001, 0.5]], r"sum 1.00001"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"row 0 is"),
        ([[1.0]], r"must be 2 x 2"),
        ([[1.0, 0.0], [0.0, 1.0]], r"not connected"),
        ([[float("nan"), 1.0], [1.0, 0.0]], r"row 0"),
    ],
)
def test_a_bad_matrix_is_shown(matrix, message):
    with pytest.raises(ValueError, match=message):
        GossipGraph(matrix, range(2))


@given(n=st.integers(2, 8), seed=st.integers(0, 100))
def test_a_matrix_in_single_precision_is_accepted_and_made_exactly_symmetric(n, seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(n))
    rotations = [np.roll(np.eye(n), hop, axis=1) for hop in range(n)]
    single = sum(
        w / 2 * (turned + turned.T) for w, turned in zip(weights, rotations, strict=True)
    ).astype(np.float32)
    single[0, 1] = np.nextafter(single[0, 1], 1, dtype=np.float32)
    matrix = GossipGraph(single, range(n)).matrix(0)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix, single, atol=1e-6)


def test_a_directed_matrix_is_refused_because_exchanges_are_pairwise():
    shift = np.roll(np.eye(3), 1, axis=1)
    with pytest.raises(ValueError, match="must be symmetric"):
        check_matrix((np.eye(3) + shift) / 2, 3)


def test_the_spectral_gap_of_a_complete_graph_is_one():
    assert spectral_gap(np.full((4, 4), 0.25)) == pytest.approx(1)
