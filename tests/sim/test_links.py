"""How long messages and collectives take."""

import pytest

from loosestep.sim.cluster import Cluster
from loosestep.sim.links import Links, flow_among
from loosestep.topology import Topology

MB = 1_000_000
# 1 and 10 MB/s
CLUSTER = Cluster(bandwidth="8mbit", latency="10ms", node_bandwidth="80mbit", node_latency="1ms")


def links(**changes: object) -> Links:
    base = {
        name: getattr(CLUSTER, name)
        for name in ("bandwidth", "latency", "node_bandwidth", "node_latency")
    }
    return Links(Cluster(**{**base, **changes}), Topology.grid(4, 2))  # type: ignore[arg-type]


def test_a_message_takes_latency_and_bytes_over_bandwidth() -> None:
    assert links().send(5.0, 0, 2, MB) == pytest.approx(6.01)
    assert links().send(5.0, 0, 1, MB) == pytest.approx(5.101)


def test_the_ranks_of_a_node_share_its_uplink_each_way() -> None:
    cable = links()
    assert cable.send(0.0, 0, 2, MB) == pytest.approx(1.01)
    assert cable.send(0.0, 1, 4, MB) == pytest.approx(2.01)  # after the first, on the same uplink
    assert cable.send(0.0, 2, 0, MB) == pytest.approx(1.01)  # the other way
    assert cable.send(0.0, 6, 4, MB) == pytest.approx(3.01)  # into a node that is receiving


def test_all_nodes_share_the_backbone() -> None:
    cable = links(backbone="8mbit")
    assert cable.send(0.0, 0, 2, MB) == pytest.approx(1.01)
    assert cable.send(0.0, 4, 6, MB) == pytest.approx(2.01)


def test_an_all_to_all_and_a_ring_move_the_bytes_of_an_all_reduce() -> None:
    lane = [0, 2, 4, 6]  # one rank on each of four nodes
    cable = links()
    end = cable.collective(0.0, cable.flow(lane, "swap"), MB)
    end = cable.collective(end, cable.flow(lane, "ring"), MB / 4)
    assert end == pytest.approx(2 * 0.75 + 0.01 + 3 * 0.01)


def test_two_lanes_on_the_same_uplinks_take_twice_as_long() -> None:
    cable = links()
    first = cable.collective(0.0, cable.flow([0, 2, 4, 6], "swap"), MB)
    second = cable.collective(0.0, cable.flow([1, 3, 5, 7], "swap"), MB)
    assert second - 0.01 == pytest.approx(2 * (first - 0.01))


def test_inside_a_node_nothing_touches_the_uplink() -> None:
    for pattern in ("memory", "ring", "swap", "tree", "sum"):
        assert flow_among([0, 0], pattern).out == {}  # type: ignore[arg-type]
    assert flow_among([0], "ring").hops == 0
