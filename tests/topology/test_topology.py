"""Who is on which node."""

import pytest

from loosestep import Topology


def test_grid_numbers_ranks_node_by_node():
    assert Topology.grid(2, 2).nodes == ((0, 1), (2, 3))


def test_lanes_are_the_ranks_of_equal_local_index():
    topology = Topology.grid(3, 2)
    assert topology.lane(0) == (0, 2, 4)
    assert topology.lane(1) == (1, 3, 5)


def test_uneven_nodes_have_as_many_lanes_as_the_smallest_and_count_by_their_ranks():
    topology = Topology([[0, 1, 2], [3]])
    assert topology.lanes == 1
    assert topology.weights == (3, 1)


def test_flat_makes_every_rank_a_node():
    assert Topology([[0, 2], [1]]).flat().nodes == ((0,), (1,), (2,))


def test_ranks_with_the_same_node_name_share_a_node():
    assert Topology.from_names(["a", "b", "a"]).nodes == ((0, 2), (1,))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "at least one node"),
        ([[0], []], "at least one node"),
        ([[0, 2]], "exactly once"),
        ([[0, 0]], "exactly once"),
    ],
)
def test_a_topology_that_makes_no_sense_is_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        Topology(nodes)
