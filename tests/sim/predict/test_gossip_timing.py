"""The vectorised pieces of gossip are those of the real ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.core.gossip.budget import Pace
from loosestep.sim.predict.gossip import Paces, partners_of
from loosestep.topology.graphs import GRAPHS, GossipGraph


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0.05, 4.0),
    share=st.floats(0.01, 1.0),
    flows=st.lists(
        st.tuples(st.floats(0.001, 2.0), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.booleans()),
        min_size=1,
        max_size=40,
    ),
)
def test_many_paces_are_many_times_pace(
    rate: float, share: float, flows: list[tuple[float, float, float, bool]]
) -> None:
    singles = [Pace(rate, share=share, cores=0.5) for _ in range(2)]
    together = Paces(2, rate=rate, share=share, cores=0.5)
    now = 0.0
    used = np.zeros(2)
    for elapsed, first, second, both in flows:
        now = now + elapsed
        used = used + np.array([first, second])
        who = np.array([0, 1]) if both else np.array([1])
        expected = [singles[index].due(now, used[index]) for index in who]
        assert together.due(who, np.full(who.size, now), used[who]).tolist() == expected


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
