"""The vectorised pieces of gossip are those of the real ones."""

import numpy as np
import pytest

from loosestep.sim.predict.gossip import Paces, partners_of
from loosestep.topology.graphs import GRAPHS, GossipGraph


def settle(cost: float, *, cores: float = 1.0) -> tuple[float, float]:
    """Exchanges a step, and their share of a core, where as many are answered as begun; 50 steps a
    second.
    """
    paces = Paces(1, rate=1.0, slowdown=0.1, cores=cores)
    used = 0.0
    begun = []
    for step in range(3000):
        (due,) = paces.due(np.array([0]), np.array([step / 50]), np.array([used]))
        begun.append(int(due))
        used += 2 * due * cost
    tail = begun[1500:]
    return sum(tail) / len(tail), 2 * cost * sum(tail) / (len(tail) / 50)


def test_cheap_exchanges_keep_the_full_rate() -> None:
    assert settle(1e-4)[0] == 1.0


@pytest.mark.parametrize("cost", [0.003, 0.02, 0.1])
def test_dear_exchanges_take_what_they_may(cost: float) -> None:
    rate, share = settle(cost)
    assert 0 < rate < 1
    assert 0.07 <= share <= 0.1


def test_a_core_that_is_idle_costs_nothing() -> None:
    assert settle(0.009, cores=2.0)[0] == 1.0


@pytest.mark.parametrize("name", GRAPHS)
def test_everybody_has_a_partner_that_is_somebody_else(name: str) -> None:
    graph = GossipGraph(name, range(9), seed=3)
    for number in range(20):
        partners = partners_of(graph, number)
        assert ((partners >= 0) & (partners < 9) & (partners != np.arange(9))).all()


@pytest.mark.parametrize("name", ["ring", "random-ring", "exponential"])
def test_rings_are_those_of_the_real_learners(name: str) -> None:
    graph = GossipGraph(name, range(7), seed=5)
    for number in range(10):
        real = [graph.partner(rank, number, set(range(7))) for rank in range(7)]
        assert partners_of(graph, number).tolist() == [
            partner[0] for partner in real if partner is not None
        ]


def test_partners_of_a_matrix_are_neighbours_in_proportion_to_their_weight() -> None:
    matrix = [[0.3, 0.6, 0.1], [0.6, 0.2, 0.2], [0.1, 0.2, 0.7]]
    drawn = np.array([partners_of(GossipGraph(matrix, range(3)), number) for number in range(3000)])
    assert (drawn[:, 0] == 1).mean() == pytest.approx(0.6, abs=0.03)
    assert (drawn[:, 2] == 1).mean() == pytest.approx(0.2, abs=0.03)
    assert (drawn[:, 2] == -1).mean() == pytest.approx(0.7, abs=0.03)  # it rests
    assert not (drawn == np.arange(3)).any()


def test_partners_of_a_graph_never_rest() -> None:
    drawn = np.array(
        [partners_of(GossipGraph({0: [1, 2]}, range(3)), number) for number in range(300)]
    )
    assert (drawn[:, 1:] == 0).all()
    assert set(drawn[:, 0]) == {1, 2}


def test_a_learner_alone_has_no_partner() -> None:
    assert partners_of(GossipGraph("ring", range(1)), 0).tolist() == [-1]
