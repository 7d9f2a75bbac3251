"""The fault matrix for ADPSGD: real processes, real signals, real namespaces; row numbers in the
names.
"""

import json
import os
import signal
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import ledger
import numpy as np
import pytest
import torch
import zmq

from loosestep import launch
from loosestep.core.messages.frames import HEADER_BYTES, FrameKind, Header, Wire

pytestmark = pytest.mark.usefixtures("warm_ranks")
SCRIPT = str(Path(__file__).parent / "gossiper.py")


def start(
    *arguments: object, nodes: int = 8, ranks: int = 1, env: dict[str, str] | None = None
) -> launch.Job:
    command = [sys.executable, "-W", "error", SCRIPT, *map(str, arguments)]
    return launch.start(command, nodes=nodes, ranks_per_node=ranks, env=env)


def ready(ranks: list[launch.Rank]) -> None:
    for rank in ranks:
        rank.expect('"ready"', timeout=90)


def said(rank: launch.Rank, key: str):
    lines = [json.loads(line) for line in list(rank.output) if line.startswith("{")]
    return next((line for line in reversed(lines) if key in line), None)


def pace(rank: launch.Rank, since: float, until: float) -> float:
    """Steps per second in a span of time, from the rank's own reports; the median, for `gaps`
    finds the outliers.
    """
    beats = [json.loads(line) for line in list(rank.output) if '"at"' in line]
    inside = [beat for beat in beats if since <= beat["at"] <= until]
    return median(
        (after["step"] - before["step"]) / (after["at"] - before["at"])
        for before, after in pairwise(inside)
    )


def survivors(job: launch.Job, *gone: int) -> list[launch.Rank]:
    return [rank for index, rank in enumerate(job.ranks) if index not in gone]


def end(job: launch.Job, *gone: int, timeout: float = 60) -> list[dict]:
    """Ask everybody left to finish; what they say at the end."""
    for rank in survivors(job, *gone):
        rank.kill(signal.SIGUSR1)
    job.wait(timeout=timeout)
    reports = [said(rank, "done") for rank in survivors(job, *gone)]
    assert all(reports), [rank.output[-3:] for rank in survivors(job, *gone)]
    assert len({report["digest"] for report in reports}) == 1
    assert all(report["finite"] for report in reports)
    assert all(report["threads"] == [] for report in reports)
    assert all(rank.returncode == 0 for rank in survivors(job, *gone))
    return reports


def events(report: dict, kind: str) -> list[dict]:
    return [event for event in report["events"] if event["event"] == kind]


def peers(report: dict, kind: str) -> list[int]:
    return sorted(event["peer"] for event in events(report, kind))


def gaps(job: launch.Job, *gone: int) -> float:
    return max(said(rank, "stopping")["gap"] for rank in survivors(job, *gone))


def sum_of_starts(ranks: int, size: int) -> np.ndarray:
    """What --still learners start from."""
    draws = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    return sum(torch.randn(size, generator=draw, dtype=torch.float64) for draw in draws).numpy()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.timeout(240)
def test_rows_1_and_5_rank_0_dies_and_the_store_with_it_which_costs_its_own_edges_only(
    record_property,
):
    """The ranks meet in a store that rank 0 serves, as they do without a launcher."""
    port = free_port()
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    spec = ("adpsgd:graph=random-ring,slowdown=1.0", "--size", 1000, "--compute", 0.02)
    with start(*spec, env=env) as job:
        ready(job.ranks)
        socket.create_connection(("127.0.0.1", port)).close()  # it is there
        before = [said(rank, "at") for rank in job.ranks]
        killed = time.monotonic()
        job.ranks[0].kill(signal.SIGKILL)
        for rank in survivors(job, 0):
            rank.expect("peer_dead", timeout=60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        time.sleep(1.0)  # they go on
        reports = end(job, 0)
        dropped = [events(report, "peer_dead")[0]["when"] - killed for report in reports]
        worst = gaps(job, 0)
        record_property("worst gap of a survivor, seconds", worst)
        print(
            f"edges dropped {max(dropped) * 1000:.0f} ms after kill -9; worst gap of a survivor "
            f"{worst * 1000:.0f} ms"
        )
        assert max(dropped) < 0.5
        assert worst < 1.0
        for report, rank in zip(reports, survivors(job, 0), strict=True):
            assert peers(report, "peer_dead") == [0]  # said once
            assert sum("rank 0 is gone" in line for line in rank.output) == 1
            for what in ("step", "exchanges"):
                assert said(rank, "at")[what] - before[rank.number][what] > 10


@pytest.mark.timeout(240)
def test_row_2_a_kill_in_the_middle_of_a_transfer_of_100_mb_tears_nothing_and_is_logged_pair_by_pair(
    tmp_path,
):
    """Before its 40th value of 1 MB leaves. Every number is accounted for. Three ranks: eight of
    these would take minutes.
    """
    # float64
    size = 12_500_000
    chunk_size = 1 << 17
    victim = 2
    spec = "adpsgd:graph=pairs,slowdown=1.0"
    options = ("--size", size, "--compute", 0.5, "--folder", tmp_path, "--die", f"{victim}:40")
    with start(spec, "--still", *options, nodes=3, env={"LOOSESTEP_KEY": ""}) as job:
        assert job.ranks[victim].wait(60) == -signal.SIGKILL
        for rank in survivors(job, victim):
            rank.expect("peer_dead", timeout=60)
        reports = end(job, victim, timeout=120)
    drift = (
        2 * np.load(tmp_path / "end.npy")
        + ledger.last_snapshot(tmp_path, victim)
        - sum_of_starts(3, size)
    )
    doubtful = 0
    halves = set()
    for rank, report in enumerate(reports):
        (dead,) = events(report, "peer_dead")
        logged = {(chunk, q) for chunk, q in dead["unanswered"] + dead["unconfirmed"]}
        for (chunk, q), moved in ledger.one_sided(tmp_path, victim, rank).items():
            assert (chunk, q) in logged
            drift[chunk * chunk_size : (chunk + 1) * chunk_size] -= moved
            halves.add((rank, chunk, q))
        assert len(logged) < 30  # of the 100 chunks most are beyond doubt
        doubtful += len(logged)
    print(
        "pairs that one side alone has applied:",
        sorted(halves),
        "; the rest of the drift",
        np.abs(drift).max(),
    )
    assert doubtful > 0  # a transfer was in flight
    assert np.abs(drift).max() < 1e-12


@pytest.mark.timeout(300)
def test_row_4_half_of_the_ranks_may_die_and_the_rest_keep_their_pace():
    with start("adpsgd", "--compute", "0.05") as job:
        ready(job.ranks)
        time.sleep(2.0)
        before = time.monotonic()
        for victim in (2, 3):
            job.ranks[victim].kill(signal.SIGKILL)
        time.sleep(1.0)
        for victim in (5, 6):
            job.ranks[victim].kill(signal.SIGKILL)
        time.sleep(3.0)
        after = time.monotonic()
        end(job, 2, 3, 5, 6)
        for rank in survivors(job, 2, 3, 5, 6):
            assert pace(rank, before, after) >= 0.9 * pace(rank, before - 2.0, before)
            assert said(rank, "stopping")["lost"] == [2, 3, 5, 6]
        assert gaps(job, 2, 3, 5, 6) < 1.0


@pytest.mark.timeout(240)
def test_row_8_a_rank_stopped_for_two_seconds_is_suspended_by_all_comes_back_and_delays_nobody():
    with start("adpsgd", "--compute", "0.05") as job:
        ready(job.ranks)
        time.sleep(2.0)
        before = time.monotonic()
        job.ranks[1].kill(signal.SIGSTOP)
        time.sleep(2.0)
        job.ranks[1].kill(signal.SIGCONT)
        after = time.monotonic()
        for rank in survivors(job, 1):
            rank.expect("peer_resumed", timeout=60)
        reports = end(job)
        for rank, report in zip(job.ranks, reports, strict=True):
            assert said(rank, "stopping")["lost"] == peers(report, "peer_dead") == []
            if rank.number == 1:  # it knows that it was itself who stood still
                assert not any(
                    "silent" in event["why"] for event in events(report, "peer_suspended")
                )
            else:
                assert peers(report, "peer_suspended") == peers(report, "peer_resumed") == [1]
                assert pace(rank, before, after) >= 0.9 * pace(rank, before - 2.0, before)


@pytest.mark.timeout(240)
def test_a_rank_that_dies_takes_its_node_with_it_and_the_other_nodes_go_on():
    """`replica="node"`: ranks 2 and 3 are one learner, which cannot go on with half of its
    model.
    """
    with start("adpsgd:replica=node", "--deadline", "6", nodes=3, ranks=2) as job:
        ready(job.ranks)
        job.ranks[3].kill(signal.SIGKILL)
        assert job.ranks[2].wait(20) == 1
        assert "rank 3 is lost" in "".join(job.ranks[2].output)
        time.sleep(0.5)
        reports = end(job, 2, 3)
        assert gaps(job, 2, 3) < 1.0
        for rank, report in zip(survivors(job, 2, 3), reports, strict=True):
            gone = [
                event["peer"]
                for event in report["events"]
                if event["event"] in ("peer_dead", "peer_left")
            ]
            assert gone[0] == {0: 2, 1: 3}[rank.number % 2]  # of its own lane


@pytest.mark.timeout(240)
def test_one_slow_communicator_stalls_nobody():
    """Rank 1 looks at its messages five times in two seconds; nobody waits for it, and the
    others go on averaging.
    """
    options = ("--size", "1000", "--compute", "0.02", "--seconds", "2", "--hesitate", "1:0.4")
    with start("adpsgd:graph=random-ring,slowdown=1.0", *options, nodes=4) as job:
        job.wait(timeout=90)
        assert gaps(job) < 0.4
        for rank in survivors(job, 1):
            # as many as a chain could make behind it: five
            assert said(rank, "stopping")["exchanges"] > 25
            assert peers(said(rank, "done"), "peer_suspended") == []
        assert len({said(rank, "done")["digest"] for rank in job.ranks}) == 1


@pytest.mark.timeout(240)
def test_a_learner_ten_times_slower_delays_nobody():
    with start(
        "adpsgd:graph=random-ring",
        "--compute",
        "0.02",
        "--slow",
        "3:10",
        "--seconds",
        "3",
        nodes=4,
    ) as job:
        job.wait(timeout=90)
        steps = [said(rank, "stopping")["steps"] for rank in job.ranks]
        assert min(steps[:3]) > 5 * steps[3]
        assert len({said(rank, "done")["digest"] for rank in job.ranks}) == 1


@pytest.mark.timeout(240)
def test_passive_ranks_do_not_spin():
    """A learner that waits in its own compute uses no CPU to speak of, however much it is asked."""
    with start("adpsgd", "--compute", "0.25", "--seconds", "4", nodes=4) as job:
        job.wait(timeout=90)
        for rank in job.ranks:
            assert said(rank, "done")["stats"]["communication_cpu_seconds"] < 0.4


KEY = "a run key of at least 16 bytes"


def strangers(card: dict, key: str | None) -> dict[str, list[bytes]]:
    """Frames from outside that say they are rank 1's, full of numbers that would show, by the
    reason to refuse them.
    """

    def frame(key: str | None = key, **identity: object) -> bytes:
        identity = {"run_id": card["run_id"], "layout": bytes.fromhex(card["layout"])} | identity
        wire = Wire(
            1, [0, 1, 2], **identity, largest_body=1 << 21, key=key.encode() if key else None
        )
        wire.meet(0, "")
        made = bytearray(HEADER_BYTES) + np.full(1000, 1e6).tobytes()
        wire.seal(
            Header(kind=FrameKind.REQUEST, source=1, dest=0, tag=1, una=1, weight=0.5, dtype=2),
            made,
        )
        return bytes(made)

    another = frame("another key of 32 bytes or more!!")
    by_reason = {
        "magic": [b"x" * 500],
        "truncated": [b"hello"],
        "run": [frame(run_id="another")],
        "layout": [frame(layout=b"another")],
    }
    if key is None:
        return by_reason | {"checksum": [another]}
    return by_reason | {"key": [another, frame(None), frame(session="an earlier life")]}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("key", [KEY, None], ids=["key", "no key"])
def test_rows_20_and_22_what_does_not_belong_is_refused_with_a_reason_by_a_run_that_goes_on(
    key, tmp_path
):
    """The mean of learners without gradients shows the smallest number that was applied and
    should not have been.
    """
    options = ("--still", "--size", "1000", "--folder", tmp_path)
    with start("adpsgd:graph=pairs", *options, nodes=3, env={"LOOSESTEP_KEY": key or ""}) as job:
        ready(job.ranks)
        # a rank of this run, in its session: a wrong size and a wrong dtype
        job.ranks[1].kill(signal.SIGUSR2)
        replay = bytes.fromhex(json.loads(job.ranks[1].expect('"request"'))["request"])
        card = said(job.ranks[0], "ready")
        bad = strangers(card, key)
        expected = {reason: len(frames) for reason, frames in bad.items()} | {"size": 1, "dtype": 1}
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        # without it nothing would arrive at all
        push.plain_username = b"rank"
        push.plain_password = bytes.fromhex(card["password"])
        push.connect("tcp://{}:{}".format(*card["address"]))
        for frame in (replay, *(frame for frames in bad.values() for frame in frames)):
            push.send(frame)
        push.close(linger=5000)
        context.term()
        if key:  # without one the edge's sequence numbers alone make a repeated frame do nothing
            expected["replay"] = 1
        for reason in expected:
            job.ranks[0].expect(f'"reason": "{reason}"', timeout=60)
        reports = end(job)
        assert reports[0]["stats"]["rejected"] == expected
        assert all(said(rank, "stopping")["lost"] == [] for rank in job.ranks)
    np.testing.assert_allclose(
        np.load(tmp_path / "end.npy"), sum_of_starts(3, 1000) / 3, rtol=0, atol=1e-12
    )


needs_lab = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux"
)


@needs_lab
@pytest.mark.timeout(240)
def test_row_13_a_link_that_drops_everything_for_three_seconds_resumes_without_eviction(tmp_path):
    pytest.importorskip("pyroute2")
    from loosestep.lab import Lab

    with Lab(nodes=4, ranks_per_node=2, bandwidth="1gbit") as lab:
        job = lab.start(
            [SCRIPT, "adpsgd", "--still", "--compute", "0.05", "--folder", str(tmp_path)]
        )
        ready(job.ranks)
        lab.drop(0, 1)
        lab.drop(1, 0)
        time.sleep(3.0)
        lab.heal()
        across = {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}
        # TCP itself waits longer and longer before it tries again
        for rank, others in across.items():
            for other in others:
                job.ranks[rank].expect(f'"event": "peer_resumed", "peer": {other},', timeout=60)
        reports = end(job)
        for rank, report in enumerate(reports):
            # Once, or again while one direction is back and the other is not; and every time it
            # came back.
            assert peers(report, "peer_suspended") == peers(report, "peer_resumed")
            assert sorted(set(peers(report, "peer_resumed"))) == across.get(rank, [])
            assert peers(report, "peer_dead") == []
        assert gaps(job) < 1.0
    np.testing.assert_allclose(
        np.load(tmp_path / "end.npy"), sum_of_starts(8, 10_000) / 8, rtol=0, atol=1e-12
    )


@needs_lab
@pytest.mark.timeout(240)
def test_row_19_flipped_bytes_are_refused_and_not_one_wrong_number_is_applied(tmp_path):
    pytest.importorskip("pyroute2")
    from loosestep.lab import Lab

    size = 100_000
    with Lab(nodes=4, ranks_per_node=2, bandwidth="500mbit", wire=True) as lab:
        spec = "adpsgd:graph=random-ring,slowdown=0.5"
        command = [
            SCRIPT,
            spec,
            "--still",
            "--compute",
            "0.05",
            "--size",
            size,
            "--folder",
            tmp_path,
        ]
        job = lab.start([*map(str, command)])
        ready(job.ranks)
        lab.flip_bytes("5%")
        for rank in job.ranks:
            rank.expect('"reason": "key"')
        lab.flip_bytes("0%")
        reports = end(job)
        print("frames refused", [report["stats"]["rejected"] for report in reports])
        assert all(said(rank, "stopping")["lost"] == [] for rank in job.ranks)
    np.testing.assert_allclose(
        np.load(tmp_path / "end.npy"), sum_of_starts(8, size) / 8, rtol=0, atol=1e-12
    )
