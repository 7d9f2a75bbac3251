"""The mailbox, several ranks in one process: exchanges and folds."""

import threading
import time

import numpy as np
import pytest
import torch
from mailboxes import KEY, QUICK, cluster, cut, die_at, step, wait_until

from loosestep.codecs import codec
from loosestep.core.gossip import opening
from loosestep.core.gossip.mailbox import CHUNK_BYTES
from loosestep.core.gossip.peer import Timing
from loosestep.core.gossip.shadow import Shadow
from loosestep.core.messages.frames import FrameKind, Header

# ---- exchanging


def test_an_exchange_averages_both_shadows():
    with cluster(2) as c:
        a = c.flat(0)
        b = c.flat(1)
        assert c.exchange(0, 1, 1 / 3) == "exchanged"
        np.testing.assert_allclose(c.flat(0), a + (b - a) / 3)
        np.testing.assert_allclose(c.flat(1), b + (a - b) / 3)
        fold = step(c.boxes[1], c.params[1], "whole")
        np.testing.assert_allclose(c.params[1][0], b + (a - b) / 3)
        assert fold.chunks == 1


def test_a_model_of_many_chunks_is_exchanged_whole():
    with cluster(2, size=3 * CHUNK_BYTES // 8 + 5) as c:
        assert c.boxes[0]._shadow.chunks == 4
        mean = (c.flat(0) + c.flat(1)) / 2
        c.exchange(0, 1)
        np.testing.assert_allclose(c.flat(0), mean)
        np.testing.assert_allclose(c.flat(1), mean)


@pytest.mark.parametrize(
    "options", [{}, {"key": KEY}, {"key": KEY, "encrypt": True}], ids=["clear", "key", "curve"]
)
def test_the_mean_is_untouched_by_exchanges_with_steps_and_losses(options):
    def loser(rank):
        draw = np.random.default_rng(rank)
        return lambda header: bool(header.kind != FrameKind.BEAT and draw.random() < 0.1)

    with cluster(4, lose=loser, **options) as c:

        def work(rank):
            for k in range(25):
                peer = (rank + 1 + k % 3) % 4
                if k % 2:
                    c.boxes[rank].exchange(peer).wait(10)
                else:
                    c.boxes[rank].exchange(peer)
                c.params[rank][0] += 0.125
                step(c.boxes[rank], c.params[rank])

        c.all(work)
        c.finish()
        expected = (c.start + 4 * 25 * 0.125) / 4
        for params in c.params:
            torch.testing.assert_close(params[0], expected, rtol=0, atol=1e-12)
            assert torch.equal(params[0], c.params[0][0])
        assert sum(box.counters["lost"] for box in c.boxes) > 10
        assert all(not c.said(rank, "peer_dead") for rank in range(4))


def test_a_full_queue_loses_nothing_and_nothing_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "QUEUE", 1)  # every second frame has to wait for its socket
    timing = Timing(beat=0.05, suspend=5.0, retry=2.0)
    with cluster(2, size=1 << 20, timing=timing, shared=False) as c:
        for _ in range(10):
            pending = [c.boxes[0].exchange(1), c.boxes[1].exchange(0)]
            assert all(each.wait(10) for each in pending)
        assert sum(box.counters["repeated"] for box in c.boxes) == 0
        assert sum(box.counters["queue_full"] for box in c.boxes) > 0


def test_a_share_of_the_model_travels_in_turn_and_counts_as_its_share() -> None:
    with cluster(2, size=4 * CHUNK_BYTES // 8) as c:
        a = c.flat(0)
        b = c.flat(1)
        quarter = len(a) // 4
        mean = (a + b) / 2
        for turn in range(4):
            assert c.boxes[0].exchange(1, 0.5, share=0.25).wait(10)
            done = (turn + 1) * quarter
            for rank, start in ((0, a), (1, b)):
                np.testing.assert_allclose(c.flat(rank)[:done], mean[:done])
                np.testing.assert_array_equal(c.flat(rank)[done:], start[done:])
            assert c.boxes[0].counters["exchanges"] == (turn + 1) / 4
        assert c.boxes[1].exchange(0, 0.5, share=0.75).wait(10)  # on this edge it has its own turn
        assert c.boxes[1].counters["exchanges"] == 0.75


def test_a_share_must_be_one() -> None:
    with cluster(2) as c:
        for share in (0.0, 1.5):
            with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
                c.boxes[0].exchange(1, 0.5, share=share)


def test_the_mean_is_untouched_by_shares_with_steps_and_losses() -> None:
    def loser(rank):
        draw = np.random.default_rng(rank)
        return lambda header: bool(header.kind != FrameKind.BEAT and draw.random() < 0.1)

    with cluster(3, size=5 * CHUNK_BYTES // 8 + 3, lose=loser) as c:

        def work(rank):
            for k in range(20):
                peer = (rank + 1 + k % 2) % 3
                c.boxes[rank].cross(c.params[rank], "publish", peer=peer, share=0.3)
                pending = c.boxes[rank].exchange(peer, share=0.3)
                if k % 3:
                    pending.wait(10)
                c.params[rank][0] += 0.125
                step(c.boxes[rank], c.params[rank])

        c.all(work)
        c.finish()
        expected = (c.start + 3 * 20 * 0.125) / 3
        for params in c.params:
            torch.testing.assert_close(params[0], expected, rtol=0, atol=1e-12)


def test_only_the_chunks_that_an_exchange_will_carry_are_published() -> None:
    with cluster(2, size=4 * CHUNK_BYTES // 8, fold_share=1e-9) as c:
        before = c.flat(0)
        quarter = len(before) // 4
        c.params[0][0] += 8
        c.boxes[0].step()
        assert not c.boxes[0].cross(c.params[0], "publish", peer=1, share=0.25).skipped
        # they are there
        assert c.boxes[0].cross(c.params[0], "publish", peer=1, share=0.25).skipped
        np.testing.assert_array_equal(c.flat(0)[:quarter], before[:quarter] + 8)
        np.testing.assert_array_equal(c.flat(0)[quarter:], before[quarter:])
        c.boxes[0].exchange(1, share=0.25).wait(10)
        assert step(c.boxes[0], c.params[0], "whole").staleness_max == 1
        np.testing.assert_array_equal(c.flat(0)[quarter:], before[quarter:] + 8)


@pytest.mark.parametrize("options", [{}, {"key": KEY}], ids=["clear", "key"])
def test_values_for_peers_of_this_host_stay_in_memory(options) -> None:
    with cluster(3, size=3 * CHUNK_BYTES // 8, **options) as c:
        wait_until(lambda: all(link.edge.slots.ready for box in c.boxes for link in links(box)))
        total = c.flat(0) + c.flat(1) + c.flat(2)
        for rank in range(3):
            assert c.exchange(rank, (rank + 1) % 3) == "exchanged"
        np.testing.assert_allclose(c.flat(0) + c.flat(1) + c.flat(2), total, rtol=0, atol=1e-12)
        values = 2 * 3 * CHUNK_BYTES  # one begun, one answered
        for box in c.boxes:
            wait_until(lambda box=box: box.counters["bytes_in_memory"] >= values)
            counters = box.counters  # a busy machine may have had some repeated
            assert 0 < counters["bytes_sent"] - counters["bytes_in_memory"] < 100_000


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_codec_half_the_bytes_travel_and_the_mean_stays(shared) -> None:
    with cluster(2, size=4 * CHUNK_BYTES // 8 + 3, shared=shared, codec=codec("bf16")) as c:
        if shared:
            wait_until(lambda: all(link.edge.slots.ready for box in c.boxes for link in links(box)))
        total = c.flat(0) + c.flat(1)
        before = c.boxes[0].counters["bytes_sent"]
        c.exchange(0, 1)
        sent = c.boxes[0].counters["bytes_sent"] - before
        assert sent == pytest.approx(2 * len(total), rel=0.01)  # float64: a quarter
        np.testing.assert_allclose(c.flat(0), c.flat(1), rtol=0, atol=0.05)
        assert np.abs(c.flat(0) - c.flat(1)).max() > 0
        np.testing.assert_allclose(c.flat(0) + c.flat(1), total, rtol=0, atol=1e-12)
        np.testing.assert_allclose(c.boxes[0].consensus(), total / 2, rtol=0, atol=1e-12)
        c.finish()
        torch.testing.assert_close(c.params[0][0], c.start / 2, rtol=0, atol=1e-12)


def test_slots_are_used_again_and_again() -> None:
    with cluster(2, size=3 * CHUNK_BYTES // 8) as c:
        wait_until(lambda: all(link.edge.slots.ready for box in c.boxes for link in links(box)))
        for _ in range(50):
            pending = [c.boxes[0].exchange(1), c.boxes[1].exchange(0)]
            assert all(each.wait(10) for each in pending)
        wait_until(
            lambda: (
                not any(
                    box._courier.links[1 - rank].edge.cached for rank, box in enumerate(c.boxes)
                )
            )
        )
        for box in c.boxes:
            assert box.counters["bytes_in_memory"] >= 50 * 3 * CHUNK_BYTES
            assert sum(len(link.edge.slots._free) for link in links(box)) == box._courier._own.count
            assert not box.counters["rejected"]


def test_a_peer_whose_memory_cannot_be_reached_gets_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "reach", lambda card: None)
    with cluster(2, size=3 * CHUNK_BYTES // 8) as c:
        mean = (c.flat(0) + c.flat(1)) / 2
        assert c.exchange(0, 1) == "exchanged"
        np.testing.assert_allclose(c.flat(1), mean)
        assert c.boxes[0].counters["bytes_in_memory"] == 0


def links(box):
    return box._courier.links.values()


def test_exchange_never_blocks_and_returns_the_one_in_flight():
    with cluster(2, lose=lambda rank: lambda header: header.kind == FrameKind.REPLY) as c:
        first = c.boxes[0].exchange(1)
        assert c.boxes[0].exchange(1) is first
        assert not first.done()


def test_an_exchange_outlives_the_connections_on_which_it_began() -> None:
    losing = threading.Event()
    lost = threading.Event()

    def lose(header: Header) -> bool:
        if header.kind != FrameKind.REPLY or not losing.is_set():
            return False
        lost.set()
        return True

    with cluster(2, lose=lambda rank: lose) as c:
        c.exchange(0, 1)  # both connections are there
        c.params[0][0] += 8
        step(c.boxes[0], c.params[0], "whole")
        mean = (c.flat(0) + c.flat(1)) / 2
        losing.set()
        pending = c.boxes[0].exchange(1)
        assert lost.wait(10)
        assert cut([box._courier.transport.address for box in c.boxes]) >= 2
        losing.clear()
        assert pending.wait(5)
        assert pending.outcome == "exchanged"
        for rank in (0, 1):
            np.testing.assert_allclose(c.flat(rank), mean)
            assert not c.said(rank, "peer_dead")


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
                step(c.boxes[rank], c.params[rank])
        wait_until(lambda: c.boxes[0].global_steps == 60)
        c.boxes[2].close()
        wait_until(lambda: c.boxes[0].left() == {2})
        assert c.boxes[0].global_steps == 60


def test_a_step_may_stand_for_several_gradients():
    with cluster(2, gradients={0: 3, 1: 3}) as c:
        for rank in range(2):
            for _ in range(5):
                step(c.boxes[rank], c.params[rank])
        wait_until(lambda: c.boxes[0].global_steps == c.boxes[1].global_steps == 30)


def test_a_learner_that_makes_no_progress_is_named_once():
    with cluster(2, timing=Timing(**QUICK, stall=0.2)) as c:
        wait_until(lambda: c.said(0, "peer_no_progress"))
        step(c.boxes[1], c.params[1])
        assert [event["peer"] for event in c.said(0, "peer_no_progress")] == [1]


def test_a_learner_that_waits_for_the_end_is_not_said_to_make_no_progress() -> None:
    with cluster(2) as c:
        courier = c.boxes[0]._courier
        heard = c.boxes[1]._courier.counters
        ending = c.pool.submit(c.boxes[0].finish, c.params[0], 15)
        wait_until(lambda: courier.ending.done)
        courier.shadow.stepped -= 1000.0
        before = heard["frames_received"]
        wait_until(lambda: heard["frames_received"] >= before + 5)
        c.boxes[1].finish(c.params[1], 15)
        ending.result()
        assert not c.said(1, "peer_no_progress")


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
    with cluster(3, lose=die_at(2, lambda h: h.kind == FrameKind.ACK, count=2)) as c:
        c.exchange(0, 1)
        c.exchange(1, 0)
        near = c.boxes[0].consensus_distance
        c.params[2][0] += 100.0
        step(c.boxes[2], c.params[2], "whole")
        c.exchange(2, 0)
        assert c.boxes[0].consensus_distance > 10
        c.boxes[2].exchange(0)
        wait_until(lambda: c.boxes[0].dead() == {2})
        assert c.boxes[0].consensus_distance == pytest.approx(near, rel=0.5)


def test_traffic_is_told_now_and_then_and_adds_up(monkeypatch):
    monkeypatch.setattr("loosestep.core.gossip.mailbox.TELL", 0.0)
    with cluster(2) as c:
        for _ in range(3):
            c.exchange(0, 1)
            step(c.boxes[0], c.params[0])
        assert len(c.said(0, "traffic")) == 3
        distance = c.said(0, "traffic")[0]["distance"]
    assert sum(event["sent"] for event in c.said(0, "traffic")) == c.boxes[0].counters["bytes_sent"]
    # two unit normal vectors: 1/sqrt(2) from their mean
    assert distance == pytest.approx(0.7, rel=0.2)


def test_folding_counts_processor_time_apart_from_the_clock():
    with cluster(2, size=200_000) as c:
        begun = time.thread_time()
        for _ in range(5):
            step(c.boxes[0], c.params[0], "whole")
        counters = c.boxes[0].counters
        assert 0 < counters["fold_cpu_seconds"] <= time.thread_time() - begun
        assert counters["fold_cpu_seconds"] <= c.boxes[0].cpu_seconds()


def test_world_size_one_works():
    with cluster(1) as c:
        step(c.boxes[0], c.params[0])
        np.testing.assert_allclose(c.boxes[0].consensus(), c.start)
        c.finish()
        torch.testing.assert_close(c.params[0][0], c.start)


def test_lockstep_rounds_use_the_values_of_the_start_of_the_round():
    with cluster(3) as c:
        start = np.stack([c.flat(rank) for rank in range(3)])
        weights = np.full((3, 3), 0.25) + np.eye(3) / 4
        for number in range(5):
            c.all(
                lambda r, k=number: c.boxes[r].lockstep_round(
                    k, {j: 0.25 for j in range(3) if j != r}
                )
            )
        expected = np.linalg.matrix_power(weights, 5) @ start
        for rank in range(3):
            np.testing.assert_allclose(c.flat(rank), expected[rank])


def test_a_round_in_lockstep_that_a_neighbour_never_reaches_says_what_it_needs():
    with (
        cluster(2) as c,
        pytest.raises(
            TimeoutError, match=r"round 3 with ranks \[1\] \(all must make as many steps\)"
        ),
    ):
        c.boxes[0].lockstep_round(3, {1: 0.5}, timeout=0.1)


# ---- folding


@pytest.mark.parametrize(("share", "skipped"), [(1e9, False), (1e-9, True)])
def test_a_boundary_is_skipped_while_folding_has_used_up_its_share(share, skipped):
    with cluster(2, fold_share=share) as c:
        step(c.boxes[0], c.params[0])
        assert step(c.boxes[0], c.params[0]).skipped is skipped


def test_staleness_counts_the_steps_whose_fold_was_skipped():
    with cluster(2, fold_share=1e-9) as c:
        step(c.boxes[0], c.params[0])
        c.exchange(0, 1)
        assert all(step(c.boxes[0], c.params[0]).skipped for _ in range(3))
        assert step(c.boxes[0], c.params[0], "whole").staleness_max == 4


def test_folding_is_put_off_longer_while_nothing_has_landed():
    with cluster(2) as c:
        box = c.boxes[0]
        step(box, c.params[0])
        # ten seconds would be enough
        box._fold_share = 1.0
        box._fold_cost = 10.0
        box._fold_spent = 10.0
        box._folded_at = time.monotonic() - 20
        box._whole_at = box._folded_at
        assert step(box, c.params[0]).skipped
        c.exchange(1, 0)
        assert not step(box, c.params[0]).skipped


def test_a_peer_meets_the_parameters_of_the_step_at_which_the_exchange_begins():
    with cluster(2, fold_share=1e-9) as c:
        step(c.boxes[0], c.params[0])
        c.params[0][0] += 8
        assert step(c.boxes[0], c.params[0]).skipped
        assert not c.boxes[0].cross(c.params[0], "publish").skipped
        assert c.boxes[0].cross(c.params[0], "publish").skipped  # they are there
        c.exchange(0, 1)
        np.testing.assert_allclose(c.flat(0), c.flat(1))
        np.testing.assert_allclose(c.flat(0) + c.flat(1), c.start.numpy() + 8)


def test_an_exchange_begins_when_the_parameters_have_come_from_their_accelerator(monkeypatch):
    monkeypatch.setattr(
        "loosestep.core.gossip.mailbox.Shadow",
        lambda *args, **kw: Shadow(*args, **{**kw, "relayed": True}),
    )
    with cluster(2, fold_share=1e9) as c:
        arrived = threading.Event()
        staging = c.boxes[0]._shadow.relay._staging
        send = staging.send
        monkeypatch.setattr(
            staging, "send", lambda *pairs, **after: (arrived.wait(10), send(*pairs, **after))[1]
        )
        c.params[0][0] += 8
        step(c.boxes[0], c.params[0])
        pending = c.boxes[0].exchange(1)
        assert not pending.wait(0.2)
        arrived.set()
        assert pending.wait(10)
        np.testing.assert_allclose(c.flat(0), c.flat(1))
        np.testing.assert_allclose(c.flat(0) + c.flat(1), c.start.numpy() + 8)


def test_a_snapshot_is_as_old_as_the_parameters_it_was_taken_of():
    with cluster(2, fold_share=1e-9) as c:
        step(c.boxes[0], c.params[0])
        for _ in range(3):
            assert step(c.boxes[0], c.params[0]).skipped
        c.exchange(1, 0)  # it meets the parameters of three steps ago
        assert step(c.boxes[0], c.params[0], "whole").staleness_max == 4


def test_nothing_that_has_landed_gets_older_than_the_bound():
    with cluster(2, fold_share=1e-9) as c:
        step(c.boxes[0], c.params[0])
        c.exchange(0, 1)
        folds = [step(c.boxes[0], c.params[0], within=3) for _ in range(6)]
        assert [fold.skipped for fold in folds] == [True, True, False, True, True, False]
        assert folds[2].staleness_max == 3


def test_nothing_lands_on_parameters_older_than_the_bound():
    with cluster(2, fold_share=1e-9) as c:
        for _ in range(7):
            step(c.boxes[0], c.params[0], within=2)
        c.exchange(1, 0)
        wait_until(lambda: c.boxes[0]._shadow.waiting)
        folds = [step(c.boxes[0], c.params[0], within=2) for _ in range(2)]
        assert max(fold.staleness_max for fold in folds if fold.chunks) <= 2
