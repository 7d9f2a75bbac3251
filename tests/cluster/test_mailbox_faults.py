"""Real signals: a peer that is killed or stopped costs its own edges only."""

import signal
import time

import numpy as np
from mailbox_gang import gang, said

STEP = {"size": 20_000, "step": 0.005}


def steps_of(seconds):
    """Let the run go on for a while: there is nothing to wait for but time."""
    time.sleep(seconds)


def test_a_killed_rank_is_dropped_in_half_a_second_and_nobody_pauses(tmp_path):
    with gang("free", 4, tmp_path, **STEP) as run:
        steps_of(1.0)
        killed = time.monotonic()
        run.signal(2, signal.SIGKILL)
        steps_of(1.5)
        run.stop()
        reports = run.join([0, 1, 3])
        for rank in (1, 3):
            np.testing.assert_array_equal(run.params(rank), run.params(0))
    detected = [said(reports[rank], "peer_dead")[0]["at"] - killed for rank in (0, 1, 3)]
    gap = max(reports[rank]["worst_gap"] for rank in (0, 1, 3))
    print("detected after", max(detected), "worst gap", gap)
    assert max(detected) < 0.5
    assert gap < 1.0
    assert all(len(said(reports[rank], "peer_dead")) == 1 for rank in (0, 1, 3))
    assert all(reports[rank]["dead"] == [2] for rank in (0, 1, 3))


def test_the_rendezvous_and_half_of_the_ranks_may_die(tmp_path):
    with gang("free", 6, tmp_path, **STEP) as run:
        run.kill_store()
        steps_of(0.5)
        for rank in (0, 1, 4):
            run.signal(rank, signal.SIGKILL)
        steps_of(1.5)
        run.stop()
        reports = run.join([2, 3, 5])
        for rank in (3, 5):
            np.testing.assert_array_equal(run.params(rank), run.params(2))
    assert all(sorted(event["peer"] for event in said(report, "peer_dead")) == [0, 1, 4] for report in reports.values())
    assert max(report["worst_gap"] for report in reports.values()) < 1.0


def test_a_rank_stopped_for_two_seconds_is_suspended_and_comes_back(tmp_path):
    with gang("free", 4, tmp_path, **STEP) as run:
        steps_of(0.7)
        run.signal(1, signal.SIGSTOP)
        steps_of(2.0)
        run.signal(1, signal.SIGCONT)
        steps_of(1.0)
        run.stop()
        reports = run.join()
        for rank in (1, 2, 3):
            np.testing.assert_array_equal(run.params(rank), run.params(0))
    for rank in (0, 2, 3):
        assert [event["peer"] for event in said(reports[rank], "peer_suspended")] == [1]
        assert [event["peer"] for event in said(reports[rank], "peer_resumed")] == [1]
    assert not any(said(report, "peer_dead") for report in reports.values())
    assert not any(
        "silent" in event["why"] for event in said(reports[1], "peer_suspended")
    )  # it was itself that stood still
    assert max(reports[rank]["worst_gap"] for rank in (0, 2, 3)) < 1.0


def test_a_rank_stopped_past_the_deadline_is_evicted_and_told(tmp_path):
    with gang("free", 3, tmp_path, **STEP, deadline=2.0) as run:
        steps_of(0.7)
        run.signal(1, signal.SIGSTOP)
        steps_of(4.0)
        run.signal(1, signal.SIGCONT)
        steps_of(0.5)
        run.stop()
        reports = run.join([0, 2])
        np.testing.assert_array_equal(run.params(0), run.params(2))
        assert run.exit_code(1) == 1  # it says that it is not part of the result
    assert all("evicted" in said(report, "peer_dead")[0]["why"] for report in reports.values())


def test_a_kill_in_the_middle_of_a_large_transfer_tears_no_chunk(tmp_path):
    """The victim dies before its sixth value leaves: every chunk of the other is either averaged whole or not at all."""
    options = {"size": 12 << 17, "exchanges": 1, "victim": 1, "kill_at": 6, "kill_anywhere": True}
    with gang("free", 2, tmp_path, **options) as run:
        assert run.exit_code(1) == -signal.SIGKILL
        # alone, rank 0 has nobody left to complete an exchange with: its shadow is in its file
        deadline = time.monotonic() + 10
        before, after = None, run.shadow(0)
        while time.monotonic() < deadline and (before is None or not np.array_equal(before, after)):
            steps_of(0.3)
            before, after = after, run.shadow(0)
        base = np.asarray(np.memmap(tmp_path / "0.part0", dtype=np.float64, mode="r"))
        moved = (after != base).reshape(12, -1).mean(axis=1)
    assert set(np.round(moved, 3)) <= {0.0, 1.0}
    assert 0 < moved.sum() < 12
