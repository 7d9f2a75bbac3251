"""The sockets of a mailbox, behind one small class so that they can be changed.

Every rank binds one PULL socket and connects one PUSH socket to every peer, so a stranger can
neither take a peer's route nor fill its queue. A frame is one message; sending copies it once into
ZeroMQ (measured: zero-copy sends cost the same, and need another Python thread), receiving does not
copy. No frame is dropped here: one that a full queue does not take is kept until it does, and
whoever sends sees it. When a connection closes, the peer's port is tried: refused three times in a
row means the process is gone.

Who connects has to know the run's password before it may send anything: ZeroMQ keeps the parts of a
message until the last has come, however many there are. It goes over the wire as it is and is no
proof of anything: frames prove themselves. Of those who have not said it some hundred may be
connected at a time, for a few seconds.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

_PROBE_EVERY = 0.04
_REFUSALS = 3
_CURVE_OVERHEAD = 256  # an encrypted message is a little larger than its frame
_PEER_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
_GUESTS = zmq.Event.ACCEPTED | zmq.Event.CLOSED | zmq.Event.DISCONNECTED
_MOST_GUESTS = 256  # connections, apart from a few of every peer
_OWN_EVENTS = (
    _GUESTS
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True)
class Curve:
    """The CURVE keys of one rank: its own pair, and the public keys of its peers."""

    public: bytes
    secret: bytes
    peers: dict[int, bytes]


@dataclass(slots=True)
class News:
    """What a wait brought, apart from frames."""

    again: set[int] = field(default_factory=set)  # connections that are back
    dead: set[int] = field(default_factory=set)
    strangers: int = 0  # connections that failed their handshake
    # connections that closed before it, as those of peers do that look whether this process lives
    hung_up: int = 0


@dataclass(slots=True, eq=False)
class Letter:
    """Memory that holds a frame. While it is `waiting` for its socket nobody may write to it."""

    frame: bytearray | memoryview
    waiting: bool = False


@dataclass(slots=True)
class _Probe:
    due: float
    refusals: int = 0
    delay: float = _PROBE_EVERY / 2
    socket: socket.socket | None = None


class Transport:
    """Frames in, frames out, and who has gone."""

    def __init__(
        self,
        host: str,
        ports: range | None,
        *,
        largest: int,
        queue: int,
        curve: Curve | None = None,
        password: str = "",
    ) -> None:
        """`password`: what every rank of the run knows; nobody is asked where it is empty."""
        self._password = password.encode()
        self._guests: set[int] = set()  # descriptors of the connections that were accepted
        self._context = zmq.Context()
        self._largest = largest
        self._queue = queue
        self._curve = curve
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._probes: dict[int, _Probe] = {}
        self._kept: dict[int, deque[Letter]] = {}
        self._poller = zmq.Poller()
        self._own_monitor: zmq.Socket[bytes] | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._pull = self._socket(zmq.PULL)
        if curve is not None:
            self._pull.curve_server = True
            self._pull.curve_secretkey = curve.secret
        self._door: zmq.Socket[bytes] | None = None
        if curve is None and password:
            self._door = self._context.socket(zmq.REP)
            self._door.linger = 0
            self._door.bind("inproc://zeromq.zap.01")
            self._poller.register(self._door, zmq.POLLIN)
            self._pull.plain_server = True
            self._pull.zap_domain = b"loosestep"
        self._pull.ipv6 = ":" in host
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.address = (host, self._bind(host, ports))
            undo.pop_all()
        self._own_monitor = self._pull.get_monitor_socket(_OWN_EVENTS)
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._own_monitor, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)
        _open.add(self)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = self._queue
        made.maxmsgsize = self._largest + _CURVE_OVERHEAD
        made.handshake_ivl = 5000
        made.reconnect_ivl = 50
        made.reconnect_ivl_max = 1000
        return made

    def _bind(self, host: str, ports: range | None) -> int:
        name = f"[{host}]" if ":" in host else host
        for port in ports or [0]:
            try:
                self._pull.bind(f"tcp://{name}:{port or '*'}")
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise OSError(error.errno, f"cannot listen on {host}: {error}") from error
            return int(bytes(self._pull.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
        tried = f"{ports[0]}-{ports[-1]}" if ports else "any port"
        raise OSError(
            errno.EADDRINUSE,
            f"port in use: none of {tried} on {host} is free; widen LOOSESTEP_PORT or unset it",
        )

    def connect(self, peer: int, address: tuple[str, int]) -> None:
        push = self._socket(zmq.PUSH)
        host, port = address
        push.ipv6 = ":" in host
        if self._curve is not None:
            push.curve_publickey = self._curve.public
            push.curve_secretkey = self._curve.secret
            push.curve_serverkey = self._curve.peers[peer]
        elif self._password:
            push.plain_username = b"rank"
            push.plain_password = self._password
        monitor = push.get_monitor_socket(_PEER_EVENTS)
        self._monitors[monitor] = peer
        self._poller.register(monitor, zmq.POLLIN)
        self._peers[peer] = push
        self._addresses[peer] = address
        push.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    def send(self, peer: int, letter: Letter) -> bool:
        """Send a frame as soon as the peer's queue takes it; False when the peer was forgotten."""
        if peer not in self._peers:
            return False
        kept = self._kept.get(peer)
        if kept is not None:
            kept.append(letter)
            letter.waiting = True
        elif not self._pass_on(peer, letter):
            letter.waiting = True
            self._kept[peer] = deque([letter])
            self._poller.register(self._peers[peer], zmq.POLLOUT)
        return True

    def _pass_on(self, peer: int, letter: Letter) -> bool:
        try:
            self._peers[peer].send(letter.frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        letter.waiting = False
        return True

    def kept(self, peer: int) -> int:
        """How many frames wait for the peer's queue."""
        return len(self._kept.get(peer, ()))

    def _pass_on_kept(self) -> None:
        for peer, kept in list(self._kept.items()):
            while kept and self._pass_on(peer, kept[0]):
                kept.popleft()
            if not kept:
                self._let_go(peer)

    def _let_go(self, peer: int) -> None:
        """Keep no more frames of this peer."""
        for letter in self._kept.pop(peer, ()):
            letter.waiting = False
        if self._peers[peer] in self._poller:
            self._poller.unregister(self._peers[peer])

    def watch(self, file: int) -> None:
        """End the wait also when something can be read there."""
        self._poller.register(file, zmq.POLLIN)

    def wake(self) -> None:
        """End the wait; from any thread."""
        # enough wake-ups are waiting already, or the thread has just ended
        with contextlib.suppress(OSError):
            self._wake_out.send(b"!")

    def wait(self, timeout: float) -> News:
        """Sleep until something happens or `timeout` seconds have passed."""
        news = News()
        due = min((probe.due for probe in self._probes.values()), default=None)
        if due is not None:
            timeout = min(timeout, due - time.monotonic())
        for ready, _ in self._poller.poll(max(0, int(timeout * 1000) + 1)):
            if ready is self._own_monitor and self._own_monitor is not None:
                self._receive(recv_monitor_message(self._own_monitor), news)
            elif ready is self._door and self._door is not None:
                self._ask(self._door)
            elif ready in self._monitors:
                self._watch(self._monitors[ready], recv_monitor_message(ready), news)
            elif ready == self._wake_in.fileno():
                self._wake_in.recv(4096)
        self._pass_on_kept()
        self._probe(news)
        return news

    def frames(self, most: int = 64) -> Iterator[memoryview]:
        """The frames that have come, without waiting. One of several parts is none of ours and
        comes empty.
        """
        for _ in range(most):
            try:
                frame = self._pull.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            several = frame.more
            while frame.more:
                frame = self._pull.recv(copy=False)
            yield memoryview(b"") if several else frame.buffer

    def _receive(self, event: Any, news: News) -> None:
        """Somebody has connected, has gone, or was not let in."""
        kind = event["event"]
        descriptor = event["value"]
        if kind == zmq.Event.ACCEPTED:
            self._guests.add(descriptor)
            if len(self._guests) > _MOST_GUESTS + 4 * len(self._peers):
                _show_out(descriptor, self.address)
                news.strangers += 1
        elif kind & _GUESTS:
            self._guests.discard(descriptor)
        elif kind == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            news.hung_up += 1
        else:
            news.strangers += 1

    def _ask(self, door: zmq.Socket[bytes]) -> None:
        """Whether somebody who connects knows the password (ZeroMQ's authentication protocol)."""
        version, request, *_, password = door.recv_multipart()
        known = hmac.compare_digest(password, self._password)
        door.send_multipart([version, request, b"200" if known else b"400", b"", b"", b""])

    def _watch(self, peer: int, event: Any, news: News) -> None:
        if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
            if peer in self._probes:
                news.again.add(peer)
            self._end_probe(peer)
        elif peer not in self._probes:
            self._probes[peer] = _Probe(time.monotonic())

    def _probe(self, news: News) -> None:
        now = time.monotonic()
        for peer, probe in list(self._probes.items()):
            if now < probe.due:
                continue
            outcome: int | None
            if probe.socket is None:
                outcome = self._knock(peer, probe)
            else:
                outcome = (
                    probe.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if _writable(probe.socket)
                    else None
                )
            if outcome in (None, errno.EINPROGRESS):
                probe.due = now + (_PROBE_EVERY if outcome else 0.25)
                continue
            self._hang_up(probe)
            refused = outcome == errno.ECONNREFUSED
            probe.refusals = probe.refusals + 1 if refused else 0
            # A process that is just ending may still accept, so look again soon; less and less
            # often if it lives.
            probe.delay = _PROBE_EVERY if refused else min(0.5, 2 * probe.delay)
            probe.due = now + probe.delay
            if probe.refusals >= _REFUSALS:
                news.dead.add(peer)
                self._end_probe(peer)

    def _knock(self, peer: int, probe: _Probe) -> int:
        host, port = self._addresses[peer]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            probe.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left for now
            return errno.EINPROGRESS
        probe.socket.setblocking(False)
        return probe.socket.connect_ex((host, port))

    def _hang_up(self, probe: _Probe) -> None:
        if probe.socket is not None:
            probe.socket.close()
            probe.socket = None

    def _end_probe(self, peer: int) -> None:
        probe = self._probes.pop(peer, None)
        if probe is not None:
            self._hang_up(probe)

    def forget(self, peer: int, *, linger: float = 0.0) -> None:
        """Close the connection to a peer."""
        self._end_probe(peer)
        if peer not in self._peers:
            return
        self._let_go(peer)
        push = self._peers.pop(peer)
        push.disable_monitor()
        for monitor in [m for m, watched in self._monitors.items() if watched == peer]:
            self._poller.unregister(monitor)
            del self._monitors[monitor]
            monitor.close(linger=0)
        push.close(linger=int(linger * 1000))

    def close(self, *, linger: float = 0.0) -> None:
        """Send what is queued for at most `linger` seconds, then let everything go. A second
        call does nothing.
        """
        if self._context.closed:
            return
        until = time.monotonic() + linger
        while self._kept and time.monotonic() < until:
            zmq.select([], [self._peers[peer] for peer in self._kept], [], timeout=0.02)
            self._pass_on_kept()
        for peer in list(self._peers):
            self.forget(peer, linger=linger)
        if self._own_monitor is not None:
            self._pull.disable_monitor()
            self._own_monitor.close(linger=0)
        self._pull.close(linger=0)
        if self._door is not None:
            self._door.close(linger=0)
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()
        _open.discard(self)


_open: weakref.WeakSet[Transport] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a child that was forked, as the workers of a DataLoader are: it holds copies of the
    connections that peers have made to this process, who would not see them close when this process
    is killed and the child lives on. Only these descriptors are closed; the rest of ZeroMQ is the
    parent's.
    """
    addresses = {transport.address for transport in _open}
    _open.clear()
    if not addresses:
        return
    timeout = socket.getdefaulttimeout()
    # with one, to look at a socket makes it non-blocking, in the parent too
    socket.setdefaulttimeout(None)
    with contextlib.suppress(OSError):  # where the system has no such folder
        for name in os.listdir("/dev/fd"):
            if _local_end(int(name)) in addresses:
                os.close(int(name))
    socket.setdefaulttimeout(timeout)


def _local_end(descriptor: int) -> tuple[str, int] | None:
    """The own address of a TCP socket; None for any other descriptor."""
    with contextlib.suppress(OSError):
        looked_at = socket.socket(fileno=descriptor)
        try:
            if (
                looked_at.family in (socket.AF_INET, socket.AF_INET6)
                and looked_at.type == socket.SOCK_STREAM
            ):
                host, port, *_ = looked_at.getsockname()
                return host, port
        finally:
            looked_at.detach()
    return None


os.register_at_fork(after_in_child=_close_inherited)


def _show_out(descriptor: int, address: tuple[str, int]) -> None:
    """End a connection that was made to `address`; ZeroMQ sees it and closes the descriptor, which
    may be another's already.
    """
    if _local_end(descriptor) == address:
        with contextlib.suppress(OSError):
            guest = socket.socket(fileno=os.dup(descriptor))
            with guest:
                guest.shutdown(socket.SHUT_RDWR)


def _writable(probe: socket.socket) -> bool:
    poller = zmq.Poller()
    poller.register(probe, zmq.POLLOUT)
    return bool(poller.poll(0))
