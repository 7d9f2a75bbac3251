"""The harness itself: real processes, peers that misbehave."""

import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.sender import PAYLOAD
from torch import nn

from harness import figures
from harness.block import Watch
from harness.cluster import Block, Cluster, Outcome
from peers import FREE

WORK = {"kind": "layers", "megabytes": 0.1, "seconds": 0.02}
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the harness needs Linux")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, 1, network=False) as made:
        yield made


def run(cluster: Cluster, peer: str, **options: Any) -> Any:
    return cluster.run(
        Block(peer, WORK, **{"window": 0.8, "warmup": 0.2, "deadline": 15.0, **options})
    )


def test_a_slow_peer_is_measured_as_slow(cluster: Cluster) -> None:
    free = run(cluster, FREE)
    slow = run(cluster, "module:fakes.slow")
    assert free.failures == slow.failures == {}
    # 20 ms of compute and 100 ms lost: a sixth, more where sleeps are late
    assert 0.05 < slow.speed / free.speed < 0.6


def test_a_hidden_barrier_is_caught_by_a_slow_rank(cluster: Cluster) -> None:
    free, met = (run(cluster, peer, slow={1: 8.0}) for peer in (FREE, "module:fakes.barrier"))
    shares = [figures.freedom(outcome.paces, free.paces, slow=1) for outcome in (free, met)]
    assert [figures.verdict(share) for share in shares] == [figures.FREE, figures.WAITS]


def test_a_block_that_others_disturbed_is_run_again_and_the_quietest_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Outcome(Block(FREE, WORK), 0, {}, {}, {}, [], stolen=0.3)
    made: list[float] = []

    def outcomes(*stolen: float) -> None:
        planned = iter(stolen)

        def block(*arguments: Any) -> Outcome:
            made.append(next(planned))
            return dataclasses.replace(busy, stolen=made[-1])

        made.clear()
        monkeypatch.setattr(cluster, "_run", block)

    monkeypatch.setattr(cluster, "_tries", 3)
    for stolen, quietest, runs in (
        ((0.3, 0.01, 0.0), 0.01, 2),
        ((0.3, 0.05, 0.1), 0.05, 3),
        ((0.02,), 0.02, 1),
    ):
        outcomes(*stolen)
        assert run(cluster, FREE).stolen == quietest
        assert len(made) == runs


def test_what_others_take_is_a_share_of_all_processors(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter((100.0, 100.0 + (os.cpu_count() or 1) * 1e3))
    monkeypatch.setattr("harness.cluster.stolen_seconds", lambda: next(taken))
    begun = time.monotonic()
    stolen = run(cluster, FREE).stolen
    assert 1e3 / (time.monotonic() - begun) <= stolen < 1e3


def test_a_peer_that_hangs_costs_its_own_block_only(cluster: Cluster) -> None:
    hung = run(cluster, "module:fakes.hang", deadline=2.0)
    assert hung.speed == 0.0
    assert all(len(report["moments"]) == 2 for report in hung.reports.values())
    assert run(cluster, FREE).speed > 0


def test_a_peer_that_cannot_prepare_says_why(cluster: Cluster) -> None:
    failed = run(cluster, "daso:period=0")
    assert set(failed.failures) == {0, 1}
    assert "got 0" in failed.failed


def test_a_peer_that_lost_a_rank_has_no_speed(cluster: Cluster) -> None:
    outcome = run(cluster, "module:fakes.half")
    assert outcome.failures == {1: "RuntimeError: half of it is gone"}
    assert 0 in outcome.reports
    assert math.isnan(outcome.speed)


def test_a_killed_rank_is_seen_by_its_absence(cluster: Cluster) -> None:
    outcome = cluster.run(Block(FREE, WORK, window=1.5, warmup=0.1, deadline=10.0), kill=(1, 0.5))
    assert list(outcome.reports) == [0]
    assert outcome.kill_moment == pytest.approx(0.5, abs=0.4)
    assert outcome.reports[0]["moments"][-1] > outcome.kill_moment


def test_a_window_of_whole_periods_ends_with_one() -> None:
    assert Block("daso:period=4,delay=1", WORK, whole=True).order("")["multiple"] == 4
    assert Block("daso:period=4,delay=1", WORK).order("")["multiple"] == 1
    seen = [0.1] * 6
    order = {"number": 1, "block": {"snapshots": 0.0, "deadline": 5.0, "multiple": 4}}
    watch = Watch(order, time.monotonic(), seen, nn.Linear(2, 2), lambda **_: None, lambda: None)
    threading.Timer(0.05, seen.extend, [[0.2, 0.3]]).start()
    watch._wait(0.0, least=5)
    assert len(seen) == 8


def test_a_rank_that_has_ended_is_told_with_its_last_words() -> None:
    with Cluster(1, 1, network=False) as made:
        made._job.ranks[0].kill()
        made._job.wait(10.0)
        with pytest.raises(RuntimeError, match="rank 0 has ended and takes no more blocks"):
            run(made, FREE)


@needs_root
def test_traffic_counted_in_the_ranks_is_what_the_links_carried() -> None:
    with Cluster(2, 1) as networked:
        # what arrived is counted by the buckets at the switch, the harness reads the nodes'
        networked.lab.limit(0, "800mbit")
        networked.lab.limit(1, "800mbit")
        before = sum(received for _, received in networked.lab.bytes())
        block = Block(
            "module:fakes.sender",
            {**WORK, "seconds": 0.01},
            window=0.5,
            warmup=0.0,
            steps=100,
            deadline=40.0,
        )
        outcome = networked.run(block, bandwidth="800mbit")
        on_links = sum(received for _, received in networked.lab.bytes()) - before
    assert outcome.failures == {}
    assert outcome.bytes_sent == pytest.approx(on_links, rel=0.02)
    # Ethernet, IP and TCP with time stamps
    assert outcome.bytes_sent == pytest.approx(30 * PAYLOAD * 1514 / 1448, rel=0.02)


@pytest.mark.parametrize(
    ("moments", "kept"), [([0.1, 0.2, 0.3], [1, 2]), ([1.06, 2.12], [5, 9]), ([0.25], [1])]
)
def test_a_model_never_counts_for_a_moment_before_it_existed(
    moments: list[float], kept: list[int]
) -> None:
    seen: list[float] = []
    order = {"number": 1, "block": {"snapshots": 0.25}}
    watch = Watch(order, 0.0, seen, nn.Linear(2, 2), lambda **_: None, lambda: None)
    for moment in moments:
        seen.append(moment)
        watch.snapshot()
    assert list(watch.taken) == kept
    assert all(number * 0.25 >= moment for number, moment in zip(kept, moments, strict=False))
