"""What a cluster's description means, and what a wrong one is told."""

from typing import Any

import numpy as np
import pytest

from loosestep.sim.cluster import Cluster
from loosestep.topology import Topology


def test_rates_and_durations_are_read_as_in_the_lab() -> None:
    cluster = Cluster(bandwidth="10gbit", latency="50us", failures={1: "2min"}, joins={2: "5s"})
    assert cluster.bytes_per_second == 1.25e9
    assert cluster.latency_seconds == pytest.approx(5e-5)
    assert (cluster.deaths, cluster.arrivals) == ({1: 120.0}, {2: 5.0})


def test_a_slow_rank_takes_a_multiple_of_every_step() -> None:
    cluster = Cluster(compute="120ms", slow={3: 10})
    assert cluster.durations(3, 4) == pytest.approx(np.full(4, 1.2))
    assert cluster.durations(0, 4) == pytest.approx(np.full(4, 0.12))


def test_a_trace_is_repeated_and_may_differ_by_rank() -> None:
    cluster = Cluster(compute=[0.1, 0.2], traces={1: [0.5]})
    assert cluster.durations(0, 5).tolist() == [0.1, 0.2, 0.1, 0.2, 0.1]
    assert cluster.durations(1, 2).tolist() == [0.5, 0.5]


def test_jitter_has_the_asked_mean_and_spread_and_follows_from_the_seed() -> None:
    cluster = Cluster(compute="100ms", jitter=0.2, seed=1)
    times = cluster.durations(0, 20_000)
    assert times.mean() == pytest.approx(0.1, rel=0.01)
    assert times.std() == pytest.approx(0.02, rel=0.03)
    assert times.min() > 0
    assert (times == Cluster(compute="100ms", jitter=0.2, seed=1).durations(0, 20_000)).all()
    assert not np.allclose(times[:100], cluster.durations(1, 100))
    assert not np.allclose(
        times[:100], Cluster(compute="100ms", jitter=0.2, seed=2).durations(0, 100)
    )
    assert cluster.step_seconds(0, 300) == times[300]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bandwidth": "10"}, "500mbit"),
        ({"bandwidth": 10}, "must be text"),
        ({"latency": "50"}, "20ms"),
        ({"compute": "fast"}, "20ms"),
        ({"compute": []}, "120ms"),
        ({"compute": [0.1, -1.0]}, "120ms"),
        ({"traces": {0: [float("nan")]}}, "traces[0]"),
        ({"slow": {3: 0}}, "positive factor"),
        ({"slow": {-1: 2}}, "keys are ranks"),
        ({"slow": [3]}, "keys are ranks"),
        ({"jitter": -0.1}, "jitter must be at least 0"),
        ({"failures": {0: 20}}, "must be text"),
        ({"joins": {0: "soon"}}, "joins[0]"),
        ({"backbone": "much"}, "backbone"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_a_wrong_description_is_refused_at_construction(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Cluster(**arguments)
    assert told in str(caught.value)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="slow names rank 8, but there are only ranks 0 to 7"):
        Cluster(slow={8: 2}).check(Topology.grid(2, 4))
