"""The mailbox, several ranks in one process: the end of a run, silence, deaths, a communication
thread that fails.
"""

import os
import threading
import time

import numpy as np
import pytest
import torch
from mailboxes import QUICK, cluster, die_at, start_vector, step, wait_until

from loosestep.core.gossip.mailbox import CHUNK_BYTES
from loosestep.core.gossip.peer import Timing
from loosestep.core.messages.frames import FrameKind, Topic


def test_finish_waits_for_the_slow_and_answers_them_meanwhile():
    with cluster(2) as c:
        ended = c.pool.submit(c.boxes[0].finish, c.params[0], 15)
        for _ in range(5):
            assert c.exchange(1, 0) == "exchanged"
        assert not ended.done()
        c.boxes[1].finish(c.params[1], 15)
        ended.result()
        assert torch.equal(c.params[0][0], c.params[1][0])
        torch.testing.assert_close(c.params[0][0], c.start / 2)


def test_a_rank_that_says_drained_begins_no_chunk_that_was_still_waiting():
    """Lost ACKs fill the cache, so rank 0 must wait with its chunks; when it ends, they must not
    follow later.
    """
    deaf = threading.Event()
    deaf.set()

    def lose(rank):
        return lambda header: rank == 1 and header.kind == FrameKind.ACK and deaf.is_set()

    with cluster(2, size=20 * CHUNK_BYTES // 8, lose=lose) as c:
        link = c.boxes[0]._courier.links[1]
        c.boxes[1].exchange(0)
        wait_until(lambda: link.edge.cached == 2 * link.edge.window)
        waiting = c.boxes[0].exchange(1)
        ended = c.pool.submit(c.boxes[0].finish, c.params[0], 15)
        wait_until(lambda: c.boxes[0]._courier.ending.drained)
        assert link.transfer is None
        assert waiting.wait(5)
        assert (waiting.outcome, c.boxes[0].counters["exchanges"]) == ("dropped", 0)
        deaf.clear()
        c.boxes[1].finish(c.params[1], 15)
        ended.result()
        torch.testing.assert_close(c.params[0][0], c.start / 2, rtol=0, atol=1e-13)


POINTS = {
    "before it collects": lambda h: h.kind == FrameKind.ASK and h.topic == Topic.FINAL,
    "while it collects": lambda h: (
        h.kind == FrameKind.ASK and h.topic == Topic.FINAL and h.chunk == 2
    ),
    "before it gives the first chunk": lambda h: (
        h.kind == FrameKind.VALUE and h.topic == Topic.RESULT
    ),
    "while it gives the result": lambda h: (
        h.kind == FrameKind.VALUE and h.topic == Topic.RESULT and h.chunk == 2
    ),
    "when one other may have all": lambda h: (
        h.kind == FrameKind.VALUE and h.topic == Topic.RESULT and h.chunk == 3
    ),
    "at its first word": lambda h: h.kind == FrameKind.BEAT and h.flags & 8,
    "when it leaves": lambda h: h.kind == FrameKind.BYE,
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_survivors_end_identical_wherever_the_coordinator_dies(point, count):
    with cluster(4, size=4 * CHUNK_BYTES // 8, lose=die_at(0, POINTS[point], count)) as c:

        def end(rank):
            try:
                c.boxes[rank].finish(c.params[rank], 15)
            except ConnectionError:
                assert rank == 0

        c.all(end)
        survivors = [params[0] for params in c.params[1:]]
        assert all(torch.equal(survivors[0], other) for other in survivors)
        with_it = c.start / 4
        without = (c.start - start_vector(0, 4 * CHUNK_BYTES // 8, torch.float64)) / 3
        assert torch.allclose(survivors[0], with_it) or torch.allclose(survivors[0], without)
        assert all(len(c.said(rank, "peer_dead")) <= 1 for rank in (1, 2, 3))


def test_a_death_is_told_once_within_half_a_second_with_the_delta_in_doubt():
    patient = Timing(**(QUICK | {"retry": 5.0}))
    with cluster(
        3, lose=die_at(2, lambda h: h.kind == FrameKind.REPLY, count=3), timing=patient
    ) as c:
        c.exchange(0, 2)
        c.exchange(0, 2)
        before = time.perf_counter()
        assert c.exchange(0, 2) == "dropped"  # answered there, but the answer was never sent
        assert time.perf_counter() - before < 0.5
        wait_until(lambda: c.boxes[1].dead() == {2})
        (event,) = c.said(0, "peer_dead")
        assert (event["peer"], event["unanswered"], event["unconfirmed"]) == (2, [(0, 3)], [])
        drift = (c.flat(0) + c.flat(1) + c.flat(2) - c.start.numpy()).sum()
        assert abs(drift) <= event["estimate"] * 1000**0.5 + 1e-9
        assert c.exchange(0, 2) == "skipped"
        assert c.exchange(0, 1) == "exchanged"


def test_what_was_applied_but_not_confirmed_is_told_exactly():
    with cluster(2, lose=die_at(1, lambda h: h.kind == FrameKind.ACK)) as c:
        c.boxes[1].exchange(0).wait(10)
        wait_until(lambda: c.said(0, "peer_dead"))
        (event,) = c.said(0, "peer_dead")
        assert event["unconfirmed"] == [(0, 1)]
        assert event["moved"] == pytest.approx(
            c.flat(0).sum() - start_vector(0, 1000, torch.float64).sum().item()
        )


def test_goodbye_is_not_a_death():
    with cluster(2) as c:
        c.boxes[1].close()
        wait_until(lambda: c.boxes[0].left() == {1})
        assert c.said(0, "peer_left")
        assert not c.said(0, "peer_dead")


def test_a_goodbye_says_whether_its_rank_holds_the_result():
    with cluster(3) as c:
        c.boxes[2].close()
        wait_until(lambda: c.boxes[0].left() == c.boxes[1].left() == {2})
        c.finish([0, 1])
        c.boxes[1].close()
        wait_until(lambda: c.boxes[0].left() == {1, 2})
        assert [(event["peer"], event["finished"]) for event in c.said(0, "peer_left")] == [
            (2, False),
            (1, True),
        ]


def test_a_mailbox_whose_thread_is_just_failing_is_closed_all_the_same():
    failed = threading.Event()
    told = threading.Event()

    def linger(kind, **_):
        failed.set()
        assert told.wait(5)

    with cluster(2) as c:
        courier = c.boxes[0]._courier
        courier._emit = linger
        courier.commands.append(lambda: 1 / 0)
        courier.transport.wake()
        assert failed.wait(5)
        courier.transport.wake = told.set
        c.boxes[0].close()
        assert not c.boxes[0]._thread.is_alive()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("timeout", [None, 100.0])
def test_who_waits_for_a_thread_that_is_gone_is_told_why_it_failed(timeout, monkeypatch):
    monkeypatch.setattr("loosestep.core.gossip.mailbox.LOOK", 0.02)
    with cluster(2) as c:
        box = c.boxes[0]
        check = box._check

        def last_check():
            check()
            box._check = check
            box._courier.tell(lambda: 1 / 0)  # it ends, and the next command comes too late
            box._thread.join()

        box._check = last_check
        with pytest.raises(ConnectionError, match="has failed") as raised:
            box.consensus(timeout)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_silent_peer_is_suspended_resumed_and_keeps_its_exchange():
    silent = threading.Event()

    def mute(rank):
        return lambda header: rank == 1 and silent.is_set()

    with cluster(2, lose=mute) as c:
        silent.set()
        pending = c.boxes[0].exchange(1)
        wait_until(lambda: c.boxes[0].suspended() == {1})
        # told that it is not heard: both ends give the edge up
        wait_until(lambda: c.boxes[1].suspended() == {0})
        assert c.exchange(1, 0) == "skipped"
        silent.clear()
        assert pending.wait(10)
        wait_until(lambda: c.boxes[0].alive() == {1} and c.boxes[1].alive() == {0})
        assert not c.said(0, "peer_dead")
        np.testing.assert_allclose(c.flat(0) + c.flat(1), c.start)


def test_a_peer_that_stays_silent_is_evicted_and_told():
    silent = threading.Event()

    def mute(rank):
        return lambda header: rank == 1 and silent.is_set()

    with cluster(
        2, lose=mute, timing=lambda rank: Timing(**QUICK, deadline=1.0 if rank == 0 else 30.0)
    ) as c:
        silent.set()
        wait_until(lambda: c.boxes[0].dead() == {1})
        assert len(c.said(0, "peer_dead")) == 1
        silent.clear()
        wait_until(lambda: c.boxes[1].dead() == {0})
        with pytest.raises(ConnectionError, match=r"evicted by ranks \[0\]"):
            c.boxes[1].finish(c.params[1], 10)


def test_a_peer_that_is_not_heard_again_is_told_that_it_was_evicted():
    def mute(rank):
        return lambda header: rank == 1

    with cluster(
        2, lose=mute, timing=lambda rank: Timing(**QUICK, deadline=0.5 if rank == 0 else 30.0)
    ) as c:
        wait_until(lambda: c.boxes[1].dead() == {0})
        with pytest.raises(ConnectionError, match=r"evicted by ranks \[0\]"):
            c.boxes[1].finish(c.params[1], 10)


def test_a_rank_that_one_peer_evicted_ends_with_the_others_when_these_have_left_already():
    def cut(rank):
        return lambda header: (rank, header.dest) == (0, 2)

    with cluster(
        3, lose=cut, timing=lambda rank: Timing(**QUICK, deadline=0.5 if rank == 2 else 30.0)
    ) as c:
        wait_until(lambda: c.boxes[0].dead() == {2})
        c.boxes[2].close()
        ending = c.boxes[0]._courier
        c.boxes[0]._do(ending.finish)
        c.boxes[1].finish(c.params[1], 10)
        assert ending.ended.wait(10)
        c.boxes[1].close()
        wait_until(lambda: c.boxes[0].left() == {1})
        c.boxes[0].finish(c.params[0], 10)
        assert torch.equal(c.params[0][0], c.params[1][0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_peer_that_sends_nan_is_quarantined_and_the_others_stay_finite(bad):
    with cluster(3) as c:
        c.params[2][0][5] = bad
        step(c.boxes[2], c.params[2], "whole")
        assert c.exchange(0, 2) == "dropped"
        c.boxes[2].exchange(1)
        wait_until(lambda: c.boxes[1].dead() == {2})
        assert "quarantined" in c.said(0, "peer_dead")[0]["why"]
        assert c.exchange(0, 1) == "exchanged"
        assert np.isfinite(c.flat(0)).all()
        assert np.isfinite(c.flat(1)).all()
        wait_until(lambda: c.boxes[2].dead() == {0, 1})
        with pytest.raises(
            ConnectionError, match=r"rank 2 sent NaN or Inf and was evicted by ranks \[0, 1\]"
        ):
            c.boxes[2].finish(c.params[2], 10)


def test_a_silent_peer_with_an_unfinished_exchange_costs_no_turns():
    silent = threading.Event()
    with cluster(2, lose=lambda rank: lambda header: rank == 1 and silent.is_set()) as c:
        silent.set()
        c.boxes[0].exchange(1, 0.5)
        wait_until(lambda: c.boxes[0].suspended() == {1})
        transport = c.boxes[0]._courier.transport
        turns = []
        wait = transport.wait
        transport.wait = lambda seconds: turns.append(seconds) or wait(seconds)
        time.sleep(1.5)  # longer than the longest pause before a repetition
        assert 0 < len(turns) < 200  # a beat every 50 ms; one that spins makes 500 and more


@pytest.mark.parametrize("ending", [True, False])
def test_nan_that_nobody_has_met_does_not_get_into_a_mean(ending):
    with cluster(3) as c:
        c.params[2][0][5] = float("nan")
        step(c.boxes[2], c.params[2], "whole")
        mean = (c.flat(0) + c.flat(1)) / 2
        if ending:
            c.finish()
            np.testing.assert_allclose(c.params[0][0], mean)
            np.testing.assert_allclose(c.params[1][0], mean)
        else:
            np.testing.assert_allclose(c.boxes[0].consensus(10), mean)
            assert c.boxes[0].dead() == {2}


def test_nothing_is_left_after_close():
    def counts():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with cluster(2):
        pass
    before = counts()
    for _ in range(3):
        with cluster(3) as c:
            c.exchange(0, 1)
            c.finish()
    wait_until(lambda: counts() <= before)


def test_a_failed_communication_thread_is_reported_at_the_next_call():
    with cluster(2, lose=die_at(0, lambda h: h.kind == FrameKind.REQUEST)) as c:
        c.boxes[0].exchange(1).wait(5)
        wait_until(lambda: not c.boxes[0]._thread.is_alive())
        with pytest.raises(ConnectionError, match="has failed"):
            step(c.boxes[0], c.params[0])
