"""The mailbox, several ranks in one process: exchanges, the end of a run, deaths, strangers, keys."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zmq
from torch.distributed import HashStore

from loosestep.comm.address import bind_host, port_range
from loosestep.comm.courier import Timing
from loosestep.comm.mailbox import CHUNK_BYTES, Mailbox, in_flight
from loosestep.comm.pace import Pace
from loosestep.comm.transport import Transport
from loosestep.comm.wire import HEADER_BYTES, Header, Kind, Topic, Wire

KEY = "0123456789abcdef" * 2
QUICK = {"beat": 0.05, "suspend": 0.3, "retry": 0.1}


def wait_until(condition, seconds=10.0):
    """Polls: for states that another thread reaches and tells nobody about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Cluster:
    """`n` mailboxes in this process, on one store."""

    def __init__(self, n, *, size=1000, dtype=torch.float64, **options):
        self.n = n
        self.params = [[_vector(rank, size, dtype)] for rank in range(n)]
        self.start = self.sum()
        self.events = [[] for _ in range(n)]
        self.boxes = [None] * n
        self.pool = ThreadPoolExecutor(n)
        self.store = HashStore()
        self.options = {"timing": Timing(**QUICK), "deadline": 20.0} | options
        self.all(self._open)

    def _open(self, rank):
        options = {k: v(rank) if k in ("lose", "timing") and callable(v) else v for k, v in self.options.items()}
        events = self.events[rank]
        self.boxes[rank] = Mailbox(
            self.store,
            rank,
            world=range(self.n),
            params=self.params[rank],
            layout=b"layout",
            emit=lambda kind, **fields: events.append((kind, fields)),
            **options,
        )

    def all(self, work, ranks=None):
        return list(self.pool.map(work, range(self.n) if ranks is None else ranks))

    def sum(self):
        return sum(params[0].double() for params in self.params)

    def finish(self, ranks=None, timeout=15):
        self.all(lambda rank: self.boxes[rank].finish(self.params[rank], timeout), ranks)

    def exchange(self, rank, peer, weight=0.5):
        pending = self.boxes[rank].exchange(peer, weight)
        assert pending.wait(10)
        return pending.outcome

    def flat(self, rank):
        return self.boxes[rank]._shadow.flat()

    def said(self, rank, kind):
        return [fields for name, fields in self.events[rank] if name == kind]


def _vector(rank, size, dtype):
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(rank))


@contextmanager
def cluster(n, **options):
    made = Cluster(n, **options)
    try:
        yield made
    finally:
        made.all(lambda rank: made.boxes[rank].close())
        made.pool.shutdown()


def die_at(victim, matches, count=1):
    """A hook that ends the victim's communication thread without a goodbye, as kill -9 would, before a certain frame."""
    left = [count]

    def of(rank):
        def lose(header):
            if rank == victim and matches(header):
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError("killed here")
            return False

        return lose

    return of


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
        assert sum(box.counters["lost"] for box in c.boxes) > 20
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
        with_it, without = c.start / 4, (c.start - _vector(0, 4 * CHUNK_BYTES // 8, torch.float64)) / 3
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
        assert abs(drift) <= event["bound"] * 1000**0.5 + 1e-9
        assert c.exchange(0, 2) == "skipped"
        assert c.exchange(0, 1) == "exchanged"


def test_what_was_applied_but_not_confirmed_is_told_exactly():
    with cluster(2, lose=die_at(1, lambda h: h.kind == Kind.ACK)) as c:
        c.boxes[1].exchange(0).wait(10)
        wait_until(lambda: c.said(0, "peer_dead"))
        (event,) = c.said(0, "peer_dead")
        assert event["unconfirmed"] == [(0, 1)]
        assert event["moved"] == pytest.approx(c.flat(0).sum() - _vector(0, 1000, torch.float64).sum().item())


def test_goodbye_is_not_a_death():
    with cluster(2) as c:
        c.boxes[1].close()
        wait_until(lambda: c.boxes[0].left() == {1})
        assert c.said(0, "peer_left")
        assert not c.said(0, "peer_dead")


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


# ---- strangers


def frames_to(c, frames, **changes):
    """Send raw frames to rank 0, as a socket that is no member."""
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect("tcp://{}:{}".format(*c.boxes[0]._courier.transport.address))
    for frame in frames:
        push.send_multipart(frame) if isinstance(frame, list) else push.send(frame)
    push.close(linger=2000)
    context.term()


def forged(**changes):
    """A frame from rank 1 to rank 0 that differs from a right one by `changes`."""
    wire_options = {k: changes.pop(k) for k in ("run_id", "layout", "generation", "key", "session") if k in changes}
    wire = Wire(1, [0, 1], **({"run_id": "run", "layout": b"layout", "largest_body": 1 << 21} | wire_options))
    body = np.full(changes.pop("numbers", 1000), 1e6).tobytes()
    frame = bytearray(HEADER_BYTES) + body
    header = {"kind": Kind.REQUEST, "source": 1, "dest": 0, "tag": 1, "una": 1, "weight": 0.5, "dtype": 2} | changes
    wire.seal(Header(**header), frame)
    return bytes(frame)


STRANGERS = {
    "magic": b"x" * 500,
    "truncated": b"hello",
    "run": forged(run_id="another"),
    "layout": forged(layout=b"another"),
    "generation": forged(generation=7),
    "size": forged(numbers=17),
    "dtype": forged(dtype=1, numbers=500),
    "weight": forged(weight=7.0),
    "checksum": forged()[:-1] + b"?",
}


def test_strangers_are_refused_by_name_and_the_run_goes_on():
    with cluster(2) as c:
        before = c.flat(0)
        frames_to(c, list(STRANGERS.values()))
        wait_until(lambda: set(c.boxes[0].counters["rejected"]) >= STRANGERS.keys())
        np.testing.assert_array_equal(c.flat(0), before)
        assert {event["reason"] for event in c.said(0, "frame_refused")} == STRANGERS.keys()
        assert c.exchange(0, 1) == "exchanged"


def test_a_thousand_bad_frames_are_one_line_in_the_log():
    with cluster(2) as c:
        frames_to(c, [b"x" * 500] * 1000)
        wait_until(lambda: c.boxes[0].counters["rejected"].get("magic") == 1000)
        assert len(c.said(0, "frame_refused")) == 1


@pytest.mark.parametrize("key", [None, "another key of 32 bytes or more!!"])
def test_without_the_run_key_nothing_is_accepted(key):
    with cluster(2, key=KEY) as c:
        before = c.flat(0)
        frames_to(c, [forged(key=key.encode() if key else None)] * 3)
        wait_until(lambda: c.boxes[0].counters["rejected"].get("key") == 3)
        np.testing.assert_array_equal(c.flat(0), before)


def test_a_replayed_frame_is_refused():
    copied = []
    with cluster(2, key=KEY) as c:
        transport = c.boxes[1]._courier.transport
        send = transport.send
        transport.send = lambda peer, frame: copied.append(bytes(frame)) or send(peer, frame)
        c.exchange(1, 0)
        before, received = c.flat(0), c.boxes[0].counters["frames_received"]
        assert received
        request = next(frame for frame in copied if frame[5] == Kind.REQUEST)
        frames_to(c, [request] * 5)
        wait_until(lambda: c.boxes[0].counters["rejected"].get("replay") == 5)
        np.testing.assert_array_equal(c.flat(0), before)


def test_a_stranger_without_the_key_cannot_even_connect_to_an_encrypted_mailbox():
    with cluster(2, key=KEY, encrypt=True) as c:
        frames_to(c, [])
        with socket.create_connection(c.boxes[0]._courier.transport.address) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            wait_until(lambda: c.boxes[0].counters["rejected"].get("handshake", 0) >= 1)
        assert c.exchange(0, 1) == "exchanged"


def test_http_multipart_and_silent_connections_do_no_harm():
    with cluster(2) as c:
        address = c.boxes[0]._courier.transport.address
        with socket.create_connection(address) as http, socket.create_connection(address):
            http.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1000))
            frames_to(c, [[b"a", b"b", b"c"]])
            wait_until(lambda: c.boxes[0].counters["rejected"])
            assert c.exchange(0, 1) == "exchanged"


# ---- starting


def test_different_models_are_refused_at_the_start():
    store = HashStore()

    def open_one(rank):
        Mailbox(store, rank, world=[0, 1], params=[torch.zeros(4)], layout=bytes([rank]), deadline=5)

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(open_one, rank) for rank in (0, 1)]:
            with pytest.raises(ValueError, match="trains another model"):
                outcome.result()


@pytest.mark.parametrize(("keys", "message"), [((KEY, KEY[::-1]), "wrong run key"), ((KEY, None), "run key")])
def test_a_wrong_key_is_refused_at_the_start(keys, message):
    store = HashStore()

    def open_one(rank):
        Mailbox(store, rank, world=[0, 1], params=[torch.zeros(4)], layout=b"", key=keys[rank], deadline=5)

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(open_one, rank) for rank in (0, 1)]:
            with pytest.raises(ConnectionError, match=message):
                outcome.result()


def test_a_peer_that_never_starts_is_named():
    with pytest.raises(TimeoutError, match="rank 1 has not published"):
        Mailbox(HashStore(), 0, world=[0, 1], params=[torch.zeros(4)], layout=b"", deadline=0.2)


def test_a_key_is_required_off_loopback(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setattr("loosestep.comm.mailbox.bind_host", lambda: "192.0.2.7")
    monkeypatch.delenv("LOOSESTEP_KEY", raising=False)
    with pytest.raises(ValueError, match=r"192.0.2.7 is not a loopback address.*LOOSESTEP_KEY"):
        Mailbox(HashStore(), 0, world=[0, 1], params=[torch.zeros(4)], layout=b"")


def test_encryption_needs_a_key(monkeypatch):
    monkeypatch.delenv("LOOSESTEP_KEY", raising=False)
    with pytest.raises(ValueError, match="needs a run key"):
        Mailbox(HashStore(), 0, world=[0], params=[torch.zeros(4)], layout=b"", encrypt=True)


def test_a_port_in_use_is_a_clear_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("LOOSESTEP_PORT", str(taken.getsockname()[1]))
        with pytest.raises(OSError, match="port in use"):
            Mailbox(HashStore(), 0, world=[0], params=[torch.zeros(4)], layout=b"")


@pytest.mark.parametrize("text", ["abc", "70000", "5-3", "0"])
def test_a_bad_port_range_is_named(monkeypatch, text):
    monkeypatch.setenv("LOOSESTEP_PORT", text)
    with pytest.raises(ValueError, match="LOOSESTEP_PORT"):
        port_range()


def test_a_port_range_gives_each_mailbox_its_own():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    made = [Transport("127.0.0.1", range(first, first + 10), largest=100, queue=4) for _ in range(2)]
    assert made[0].address != made[1].address
    for transport in made:
        transport.close()


def test_a_loopback_run_binds_loopback(monkeypatch):
    for name in ("localhost", "127.0.0.1"):
        monkeypatch.setenv("MASTER_ADDR", name)
        assert bind_host() == "127.0.0.1"


def test_an_unknown_interface_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ValueError, match=r"nosuch0.*lo"):
        bind_host()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="rank 3 must be in world"):
        Mailbox(HashStore(), 3, world=[0, 1], params=[torch.zeros(4)], layout=b"")
    with cluster(2) as c:
        with pytest.raises(ValueError, match="rank 5 is not a peer"):
            c.boxes[0].exchange(5)
        with pytest.raises(ValueError, match="at most 1/2"):
            c.boxes[0].exchange(1, 0.9)


@pytest.mark.parametrize("model", [1 << 10, 1 << 20, 20 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("peers", [1, 7, 127])
def test_values_in_flight_fit_into_two_models(model, peers):
    chunk, window = in_flight(model, peers)
    assert 4 * window * peers * chunk <= max(2 * model, 32 << 20)
    assert chunk <= CHUNK_BYTES


# ---- pace


def settle(cost_per_exchange, *, steps_per_second=50, share=0.1, cores=1.0):
    """A learner whose peers keep the same pace: every exchange begun is matched by one answered."""
    pace, used, begun = Pace(1.0, share=share, cores=cores), 0.0, []
    for step in range(60 * steps_per_second):
        exchanges = pace.due(step / steps_per_second, used)
        begun.append(exchanges)
        used += 2 * exchanges * cost_per_exchange
    tail = begun[len(begun) // 2 :]
    return sum(tail) / len(tail), 2 * cost_per_exchange * sum(tail) / (len(tail) / steps_per_second)


def test_cheap_exchanges_keep_the_full_rate():
    assert settle(1e-4)[0] == 1.0


@pytest.mark.parametrize("cost", [0.003, 0.02, 0.1])
def test_expensive_exchanges_are_slowed_to_their_share(cost):
    rate, share = settle(cost)
    assert 0 < rate < 1
    assert 0.07 <= share <= 0.13


def test_bad_pace_is_refused():
    with pytest.raises(ValueError, match="rate must be above 0"):
        Pace(0)
    with pytest.raises(ValueError, match="share"):
        Pace(1, share=2)
