"""The mailbox among strangers, and its start: forged frames, keys, ports, other models."""

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zmq
from mailboxes import KEY, cluster, wait_until
from torch.distributed import HashStore

from loosestep.core.gossip.loop import KNOCKS
from loosestep.core.gossip.mailbox import CHUNK_BYTES, Mailbox, in_flight
from loosestep.core.messages.address import bind_host, port_range
from loosestep.core.messages.frames import HEADER_BYTES, KIND, FrameKind, Header, Wire
from loosestep.core.messages.sockets import Transport

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
    wire_options = {
        k: changes.pop(k)
        for k in ("run_id", "layout", "generation", "key", "session")
        if k in changes
    }
    wire = Wire(
        1,
        [0, 1],
        **({"run_id": "run", "layout": b"layout", "largest_body": 1 << 21} | wire_options),
    )
    wire.meet(0, "")
    body = np.full(changes.pop("numbers", 1000), 1e6).tobytes()
    frame = bytearray(HEADER_BYTES) + body
    header = {
        "kind": FrameKind.REQUEST,
        "source": 1,
        "dest": 0,
        "tag": 1,
        "una": 1,
        "weight": 0.5,
        "dtype": 2,
    } | changes
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
        transport.send = lambda peer, letter: (
            copied.append(bytes(letter.frame)) or send(peer, letter)
        )
        c.exchange(1, 0)
        before = c.flat(0)
        received = c.boxes[0].counters["frames_received"]
        assert received
        request = next(frame for frame in copied if frame[KIND] == FrameKind.REQUEST)
        frames_to(c, [request] * 5)
        wait_until(lambda: c.boxes[0].counters["rejected"].get("replay") == 5)
        np.testing.assert_array_equal(c.flat(0), before)


# ZMTP 3.0 without encryption: signature, version, mechanism, not a server, padding
PLAIN_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_a_stranger_without_the_key_cannot_even_connect_to_an_encrypted_mailbox():
    with cluster(2, key=KEY, encrypt=True) as c:
        address = c.boxes[0]._courier.transport.address
        with (
            socket.create_connection(address) as http,
            socket.create_connection(address) as plain,
        ):
            http.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            # By hand, and left open: a socket of ZeroMQ may hang up first, which is told otherwise.
            plain.sendall(PLAIN_GREETING)
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


def test_connections_that_hang_up_without_a_word_are_told_only_when_there_are_many():
    """A peer whose connection has broken makes such ones, to see whether this process lives."""
    with cluster(2) as c:
        address = c.boxes[0]._courier.transport.address
        for _ in range(KNOCKS):
            socket.create_connection(address).close()
        wait_until(lambda: c.boxes[0].counters["rejected"] == {"hang-up": KNOCKS})
        assert not c.said(0, "frame_refused")
        socket.create_connection(address).close()
        wait_until(lambda: c.said(0, "frame_refused"))
        assert c.exchange(0, 1) == "exchanged"


# ---- starting


def test_different_models_are_refused_at_the_start():
    store = HashStore()

    def open_one(rank):
        Mailbox(
            store, rank, world=[0, 1], params=[torch.zeros(4)], layout=bytes([rank]), deadline=5
        )

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(open_one, rank) for rank in (0, 1)]:
            with pytest.raises(ValueError, match="trains another model"):
                outcome.result()


@pytest.mark.parametrize(
    ("keys", "message"), [((KEY, KEY[::-1]), "wrong run key"), ((KEY, None), "run key")]
)
def test_a_wrong_key_is_refused_at_the_start(keys, message):
    store = HashStore()

    def open_one(rank):
        Mailbox(
            store,
            rank,
            world=[0, 1],
            params=[torch.zeros(4)],
            layout=b"",
            key=keys[rank],
            deadline=5,
        )

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(open_one, rank) for rank in (0, 1)]:
            with pytest.raises(ConnectionError, match=message):
                outcome.result()


def test_a_peer_that_never_starts_is_named():
    with pytest.raises(TimeoutError, match="rank 1 has not published"):
        Mailbox(HashStore(), 0, world=[0, 1], params=[torch.zeros(4)], layout=b"", deadline=0.2)


def test_a_key_is_required_off_loopback(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setattr("loosestep.core.gossip.mailbox.bind_host", lambda: "192.0.2.7")
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
    made = [
        Transport("127.0.0.1", range(first, first + 10), largest=100, queue=4) for _ in range(2)
    ]
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


def memory():
    """Resident bytes of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PASSWORD = "what ranks of the run alone know"


def test_without_the_password_nobody_can_fill_the_memory_with_a_message_that_does_not_end():
    with cluster(2, password=PASSWORD) as c:
        address = c.boxes[0]._courier.transport.address
        before = memory()
        with socket.create_connection(address) as endless:
            # ZMTP 3.0 without a mechanism, then parts of a message, each of which says: more.
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
            ready = b"\x05READY\x0bSocket-Type\0\0\0\x04PUSH"
            endless.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            part = b"\x03" + (1 << 19).to_bytes(8, "big") + bytes(1 << 19)
            with contextlib.suppress(OSError):  # it was closed: that is the point
                for _ in range(600):
                    endless.sendall(part)
        wait_until(lambda: c.boxes[0].counters["rejected"].get("handshake", 0) >= 1)
        assert memory() - before < 100 << 20
        assert c.exchange(0, 1) == "exchanged"


def test_a_wrong_password_is_not_let_in():
    with cluster(2, password=PASSWORD) as c, zmq.Context() as context:
        with context.socket(zmq.PUSH) as stranger:
            stranger.linger = 0
            stranger.plain_username = b"rank"
            stranger.plain_password = b"a guess"
            stranger.connect("tcp://{}:{}".format(*c.boxes[0]._courier.transport.address))
            stranger.send(b"x" * 500)
            wait_until(lambda: c.boxes[0].counters["rejected"].get("handshake", 0) >= 1)
        assert "magic" not in c.boxes[0].counters["rejected"]
        assert c.exchange(0, 1) == "exchanged"


def test_connections_that_say_nothing_are_bounded_and_end():
    with cluster(2, password=PASSWORD) as c:
        address = c.boxes[0]._courier.transport.address
        before = len(os.listdir("/proc/self/fd"))
        idle = []
        for _ in range(400):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection(address, timeout=1))
        wait_until(lambda: c.boxes[0].counters["rejected"].get("handshake", 0) >= 50)
        ours = len(os.listdir("/proc/self/fd")) - before - len(idle)
        assert ours < 330
        assert c.exchange(0, 1) == "exchanged"
        for each in idle:
            each.close()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) < before + 10)
        assert c.exchange(1, 0) == "exchanged"
