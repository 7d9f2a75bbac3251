"""The mailbox, several ranks in one process: exchanges, the end of a run, deaths."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from mailboxes import KEY, QUICK, cluster, die_at, start_vector, wait_until

from loosestep.comm.courier import Timing
from loosestep.comm.mailbox import CHUNK_BYTES
from loosestep.comm.shadow import Shadow
from loosestep.comm.wire import Kind, Topic

# ---- exchanging


def test_an_exchange_averages_both_shadows():
    with cluster(2) as c:
        a, b = c.flat(0), c.flat(1)
        assert c.exchange(0, 1, 1 / 3) == "exchanged"
        np.testing.assert_allclose(c.flat(0), a + (b - a) / 3)
        np.testing.assert_allclose(c.flat(1), b + (a - b) / 3)
        fold = c.boxes[1].boundary(c.params[1], force=True)
        np.testing.assert_allclose(c.params[1][0], b + (a - b) / 3)
        assert fold.chunks == 1


def test_a_model_of_many_chunks_is_exchanged_whole():
    with cluster(2, size=3 * CHUNK_BYTES // 8 + 5) as c:
        assert c.boxes[0]._shadow.chunks == 4
        mean = (c.flat(0) + c.flat(1)) / 2
        c.exchange(0, 1)
        np.testing.assert_allclose(c.flat(0), mean)
        np.testing.assert_allclose(c.flat(1), mean)


@pytest.mark.parametrize("options", [{}, {"key": KEY}, {"key": KEY, "encrypt": True}], ids=["clear", "key", "curve"])
def test_the_mean_is_untouched_by_exchanges_with_steps_and_losses(options):
    def loser(rank):
        draw = np.random.default_rng(rank)
        return lambda header: bool(header.kind != Kind.BEAT and draw.random() < 0.1)

    with cluster(4, lose=loser, **options) as c:

        def work(rank):
            for k in range(25):
                peer = (rank + 1 + k % 3) % 4
                if k % 2:
                    c.boxes[rank].exchange(peer).wait(10)
                else:
                    c.boxes[rank].exchange(peer)
                c.params[rank][0] += 0.125
                c.boxes[rank].boundary(c.params[rank])

        c.all(work)
        c.finish()
        expected = (c.start + 4 * 25 * 0.125) / 4
        for params in c.params:
            torch.testing.assert_close(params[0], expected, rtol=0, atol=1e-12)
            assert torch.equal(params[0], c.params[0][0])
        assert sum(box.counters["lost"] for box in c.boxes) > 10
        assert all(not c.said(rank, "peer_dead") for rank in range(4))


def test_exchange_never_blocks_and_returns_the_one_in_flight():
    with cluster(2, lose=lambda rank: lambda header: header.kind == Kind.REPLY) as c:
        first = c.boxes[0].exchange(1)
        assert c.boxes[0].exchange(1) is first
        assert not first.done()


def test_a_peer_answers_while_its_compute_is_busy():
    with cluster(2) as c:
        before = time.perf_counter()
        for _ in range(20):  # rank 1 never calls anything
            assert c.exchange(0, 1) == "exchanged"
        assert time.perf_counter() - before < 5


def test_global_steps_count_everybody_and_keep_the_dead():
    with cluster(3) as c:
        for rank in range(3):
            for _ in range(10 * (rank + 1)):
                c.boxes[rank].boundary(c.params[rank])
        wait_until(lambda: c.boxes[0].global_steps == 60)
        c.boxes[2].close()
        wait_until(lambda: c.boxes[0].left() == {2})
        assert c.boxes[0].global_steps == 60


def test_a_step_may_stand_for_several_gradients():
    with cluster(2, gradients=3) as c:
        for rank in range(2):
            for _ in range(5):
                c.boxes[rank].boundary(c.params[rank])
        wait_until(lambda: c.boxes[0].global_steps == c.boxes[1].global_steps == 30)


def test_a_learner_that_makes_no_progress_is_named_once():
    with cluster(2, timing=Timing(**QUICK, stall=0.2)) as c:
        wait_until(lambda: c.said(0, "peer_no_progress"))
        c.boxes[1].boundary(c.params[1])
        assert [event["peer"] for event in c.said(0, "peer_no_progress")] == [1]


def test_consensus_is_the_mean_and_changes_nothing():
    with cluster(3) as c:
        before = c.flat(0)
        np.testing.assert_allclose(c.boxes[1].consensus(), c.start / 3)
        np.testing.assert_array_equal(c.flat(0), before)


def test_a_peer_that_falls_silent_during_a_consensus_is_left_out():
    silent = threading.Event()

    def mute(rank):
        return lambda header: rank == 1 and silent.is_set()

    with cluster(3, lose=mute) as c:
        expected = (c.flat(0) + c.flat(2)) / 2
        silent.set()
        assert c.boxes[0].alive() == {1, 2}  # not known yet
        np.testing.assert_allclose(c.boxes[0].consensus(timeout=5), expected)
        assert c.boxes[0].dead() == set()
        silent.clear()


def test_the_consensus_distance_forgets_the_dead():
    with cluster(3, lose=die_at(2, lambda h: h.kind == Kind.ACK, count=2)) as c:
        c.exchange(0, 1)
        c.exchange(1, 0)
        near = c.boxes[0].consensus_distance
        c.params[2][0] += 100.0
        c.boxes[2].boundary(c.params[2], force=True)
        c.exchange(2, 0)
        assert c.boxes[0].consensus_distance > 10
        c.boxes[2].exchange(0)
        wait_until(lambda: c.boxes[0].dead() == {2})
        assert c.boxes[0].consensus_distance == pytest.approx(near, rel=0.5)


def test_traffic_is_told_now_and_then_and_adds_up(monkeypatch):
    monkeypatch.setattr("loosestep.comm.mailbox.TELL", 0.0)
    with cluster(2) as c:
        for _ in range(3):
            c.exchange(0, 1)
            c.boxes[0].boundary(c.params[0])
        assert len(c.said(0, "traffic")) == 3
        distance = c.said(0, "traffic")[0]["distance"]
    assert sum(event["sent"] for event in c.said(0, "traffic")) == c.boxes[0].counters["bytes_sent"]
    assert distance == pytest.approx(0.7, rel=0.2)  # two unit normal vectors: 1/sqrt(2) from their mean


def test_folding_counts_processor_time_apart_from_the_clock():
    with cluster(2, size=200_000) as c:
        begun = time.thread_time()
        for _ in range(5):
            c.boxes[0].boundary(c.params[0], force=True)
        counters = c.boxes[0].counters
        assert 0 < counters["fold_cpu_seconds"] <= time.thread_time() - begun
        assert counters["fold_cpu_seconds"] <= c.boxes[0].cpu_seconds()


def test_world_size_one_works():
    with cluster(1) as c:
        c.boxes[0].boundary(c.params[0])
        np.testing.assert_allclose(c.boxes[0].consensus(), c.start)
        c.finish()
        torch.testing.assert_close(c.params[0][0], c.start)


def test_lockstep_rounds_use_the_values_of_the_start_of_the_round():
    with cluster(3) as c:
        start = np.stack([c.flat(rank) for rank in range(3)])
        weights = np.full((3, 3), 0.25) + np.eye(3) / 4
        for number in range(5):
            c.all(lambda r, k=number: c.boxes[r].lockstep_round(k, {j: 0.25 for j in range(3) if j != r}))
        expected = np.linalg.matrix_power(weights, 5) @ start
        for rank in range(3):
            np.testing.assert_allclose(c.flat(rank), expected[rank])


def test_a_round_in_lockstep_that_a_neighbour_never_reaches_says_what_it_needs():
    with (
        cluster(2) as c,
        pytest.raises(TimeoutError, match=r"round 3 with ranks \[1\] \(all must make as many steps\)"),
    ):
        c.boxes[0].lockstep_round(3, {1: 0.5}, timeout=0.1)


# ---- the end, and deaths


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
    """Lost ACKs fill the cache, so rank 0 must wait with its chunks; when it ends, they must not follow later."""
    deaf = threading.Event()
    deaf.set()

    def lose(rank):
        return lambda header: rank == 1 and header.kind == Kind.ACK and deaf.is_set()

    with cluster(2, size=20 * CHUNK_BYTES // 8, lose=lose) as c:
        link = c.boxes[0]._courier.links[1]
        c.boxes[1].exchange(0)
        wait_until(lambda: link.edge.cached == 2 * link.edge.window)
        waiting = c.boxes[0].exchange(1)
        ended = c.pool.submit(c.boxes[0].finish, c.params[0], 15)
        wait_until(lambda: c.boxes[0]._courier.ending.drained)
        assert link.transfer is None
        assert waiting.wait(5)
        deaf.clear()
        c.boxes[1].finish(c.params[1], 15)
        ended.result()
        torch.testing.assert_close(c.params[0][0], c.start / 2, rtol=0, atol=1e-13)


POINTS = {
    "before it collects": lambda h: h.kind == Kind.ASK and h.topic == Topic.FINAL,
    "while it collects": lambda h: h.kind == Kind.ASK and h.topic == Topic.FINAL and h.chunk == 2,
    "before it gives the first chunk": lambda h: h.kind == Kind.VALUE and h.topic == Topic.RESULT,
    "while it gives the result": lambda h: h.kind == Kind.VALUE and h.topic == Topic.RESULT and h.chunk == 2,
    "when one other may have all": lambda h: h.kind == Kind.VALUE and h.topic == Topic.RESULT and h.chunk == 3,
    "at its first word": lambda h: h.kind == Kind.BEAT and h.flags & 8,
    "when it leaves": lambda h: h.kind == Kind.BYE,
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
        with_it, without = c.start / 4, (c.start - start_vector(0, 4 * CHUNK_BYTES // 8, torch.float64)) / 3
        assert torch.allclose(survivors[0], with_it) or torch.allclose(survivors[0], without)
        assert all(len(c.said(rank, "peer_dead")) <= 1 for rank in (1, 2, 3))


def test_a_death_is_told_once_within_half_a_second_with_the_delta_in_doubt():
    patient = Timing(**(QUICK | {"retry": 5.0}))
    with cluster(3, lose=die_at(2, lambda h: h.kind == Kind.REPLY, count=3), timing=patient) as c:
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
    with cluster(2, lose=die_at(1, lambda h: h.kind == Kind.ACK)) as c:
        c.boxes[1].exchange(0).wait(10)
        wait_until(lambda: c.said(0, "peer_dead"))
        (event,) = c.said(0, "peer_dead")
        assert event["unconfirmed"] == [(0, 1)]
        assert event["moved"] == pytest.approx(c.flat(0).sum() - start_vector(0, 1000, torch.float64).sum().item())


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
        assert [(event["peer"], event["finished"]) for event in c.said(0, "peer_left")] == [(2, False), (1, True)]


def test_a_mailbox_whose_thread_is_just_failing_is_closed_all_the_same():
    failed, told = threading.Event(), threading.Event()

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
    monkeypatch.setattr("loosestep.comm.mailbox.LOOK", 0.02)
    with cluster(2) as c:
        box = c.boxes[0]
        check = box._check

        def last_check():
            check()
            box._check = check
            box._tell_courier(lambda: 1 / 0)  # it ends, and the next command comes too late
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
        wait_until(lambda: c.boxes[1].suspended() == {0})  # told that it is not heard: both ends give the edge up
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

    with cluster(2, lose=mute, timing=lambda rank: Timing(**QUICK, deadline=1.0 if rank == 0 else 30.0)) as c:
        silent.set()
        wait_until(lambda: c.boxes[0].dead() == {1})
        assert len(c.said(0, "peer_dead")) == 1
        silent.clear()
        wait_until(lambda: c.boxes[1].dead() == {0})
        with pytest.raises(ConnectionError, match=r"evicted by ranks \[0\]"):
            c.boxes[1].finish(c.params[1], 10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_peer_that_sends_nan_is_quarantined_and_the_others_stay_finite(bad):
    with cluster(3) as c:
        c.params[2][0][5] = bad
        c.boxes[2].boundary(c.params[2], force=True)
        assert c.exchange(0, 2) == "dropped"
        c.boxes[2].exchange(1)
        wait_until(lambda: c.boxes[1].dead() == {2})
        assert "quarantined" in c.said(0, "peer_dead")[0]["why"]
        assert c.exchange(0, 1) == "exchanged"
        assert np.isfinite(c.flat(0)).all()
        assert np.isfinite(c.flat(1)).all()
        wait_until(lambda: c.boxes[2].dead() == {0, 1})
        with pytest.raises(ConnectionError, match=r"rank 2 sent NaN or Inf and was evicted by ranks \[0, 1\]"):
            c.boxes[2].finish(c.params[2], 10)


@pytest.mark.parametrize(("share", "skipped"), [(1e9, False), (1e-9, True)])
def test_a_boundary_is_skipped_while_folding_has_used_up_its_share(share, skipped):
    with cluster(2, fold_share=share) as c:
        c.boxes[0].boundary(c.params[0])
        assert c.boxes[0].boundary(c.params[0]).skipped is skipped


def test_staleness_counts_the_steps_whose_fold_was_skipped():
    with cluster(2, fold_share=1e-9) as c:
        c.boxes[0].boundary(c.params[0])
        c.exchange(0, 1)
        assert all(c.boxes[0].boundary(c.params[0]).skipped for _ in range(3))
        assert c.boxes[0].boundary(c.params[0], force=True).staleness_max == 4


def test_folding_is_put_off_longer_while_nothing_has_landed():
    with cluster(2) as c:
        box = c.boxes[0]
        box.boundary(c.params[0])
        box._fold_share, box._fold_cost, box._folded_at = (
            1.0,
            10.0,
            time.monotonic() - 20,
        )  # ten seconds would be enough
        assert box.boundary(c.params[0]).skipped
        c.exchange(1, 0)
        assert not box.boundary(c.params[0]).skipped


def test_a_peer_meets_the_parameters_of_the_step_at_which_the_exchange_begins():
    with cluster(2, fold_share=1e-9) as c:
        c.boxes[0].boundary(c.params[0])
        c.params[0][0] += 8
        assert c.boxes[0].boundary(c.params[0]).skipped
        assert not c.boxes[0].publish(c.params[0]).skipped
        assert c.boxes[0].publish(c.params[0]).skipped  # they are there
        c.exchange(0, 1)
        np.testing.assert_allclose(c.flat(0), c.flat(1))
        np.testing.assert_allclose(c.flat(0) + c.flat(1), c.start.numpy() + 8)


def test_an_exchange_begins_when_the_parameters_have_come_from_their_accelerator(monkeypatch):
    monkeypatch.setattr("loosestep.comm.mailbox.Shadow", lambda *args, **kw: Shadow(*args, **{**kw, "relayed": True}))
    with cluster(2, fold_share=1e9) as c:
        arrived, staging = threading.Event(), c.boxes[0]._shadow.relay._staging
        send = staging.send
        monkeypatch.setattr(staging, "send", lambda *pairs, **after: (arrived.wait(10), send(*pairs, **after))[1])
        c.params[0][0] += 8
        c.boxes[0].boundary(c.params[0])
        pending = c.boxes[0].exchange(1)
        assert not pending.wait(0.2)
        arrived.set()
        assert pending.wait(10)
        np.testing.assert_allclose(c.flat(0), c.flat(1))
        np.testing.assert_allclose(c.flat(0) + c.flat(1), c.start.numpy() + 8)


def test_a_snapshot_is_as_old_as_the_parameters_it_was_taken_of():
    with cluster(2, fold_share=1e-9) as c:
        c.boxes[0].boundary(c.params[0])
        for _ in range(3):
            assert c.boxes[0].boundary(c.params[0]).skipped
        c.exchange(1, 0)  # it meets the parameters of three steps ago
        assert c.boxes[0].boundary(c.params[0], force=True).staleness_max == 4


def test_nothing_that_has_landed_gets_older_than_the_bound():
    with cluster(2, fold_share=1e-9) as c:
        c.boxes[0].boundary(c.params[0])
        c.exchange(0, 1)
        folds = [c.boxes[0].boundary(c.params[0], within=3) for _ in range(6)]
        assert [fold.skipped for fold in folds] == [True, True, False, True, True, False]
        assert folds[2].staleness_max == 3


def test_nothing_lands_on_parameters_older_than_the_bound():
    with cluster(2, fold_share=1e-9) as c:
        for _ in range(7):
            c.boxes[0].boundary(c.params[0], within=2)
        c.exchange(1, 0)
        wait_until(lambda: c.boxes[0]._shadow.waiting)
        folds = [c.boxes[0].boundary(c.params[0], within=2) for _ in range(2)]
        assert max(fold.staleness_max for fold in folds if fold.chunks) <= 2


def test_a_silent_peer_with_an_unfinished_exchange_costs_no_turns():
    silent = threading.Event()
    with cluster(2, lose=lambda rank: lambda header: rank == 1 and silent.is_set()) as c:
        silent.set()
        c.boxes[0].exchange(1, 0.5)
        wait_until(lambda: c.boxes[0].suspended() == {1})
        transport, turns = c.boxes[0]._courier.transport, []
        wait = transport.wait
        transport.wait = lambda seconds: turns.append(seconds) or wait(seconds)
        time.sleep(1.5)  # longer than the longest pause before a repetition
        assert 0 < len(turns) < 200  # a beat every 50 ms; one that spins makes 500 and more


@pytest.mark.parametrize("ending", [True, False])
def test_nan_that_nobody_has_met_does_not_get_into_a_mean(ending):
    with cluster(3) as c:
        c.params[2][0][5] = float("nan")
        c.boxes[2].boundary(c.params[2], force=True)
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
    with cluster(2, lose=die_at(0, lambda h: h.kind == Kind.REQUEST)) as c:
        c.boxes[0].exchange(1).wait(5)
        wait_until(lambda: not c.boxes[0]._thread.is_alive())
        with pytest.raises(ConnectionError, match="has failed"):
            c.boxes[0].boundary(c.params[0])
