"""A rank's view of its communication, where that is a process of its own: `process.py`.

What `Courier` is for a thread: orders go through a pipe, and a picture of what is known comes back
at least every twentieth of a second, and with everything that somebody waits for. The end of the
pipe is the death of the process; a chunk that it was writing then is never folded.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from loosestep.codecs import Codec
from loosestep.core.gossip.memory import Memory
from loosestep.core.gossip.opening import Settings
from loosestep.core.gossip.peer import PendingExchange
from loosestep.core.gossip.room import Room
from loosestep.core.messages.members import Peer, State
from loosestep.core.stopping import Stop

PATIENCE = 60.0  # seconds that the process may take to start


@dataclass(slots=True)
class EdgeView:
    """What an edge has seen."""

    square: float = 0.0
    applied: int = 0


@dataclass(slots=True)
class LinkView:
    """A peer, as `Link`."""

    edge: EdgeView


class MembersView:
    """Who is there, as the process said last."""

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = {rank: Peer(rank, 0.0) for rank in peers}

    def ranks(self, *states: State) -> set[int]:
        """The peers in one of these states."""
        return {rank for rank, peer in self.peers.items() if peer.state in states}

    def alive(self) -> set[int]:
        """The peers that answer."""
        return self.ranks(State.ALIVE)

    def progress(self) -> int:
        """Gradients of all peers, as last heard."""
        return sum(peer.progress for peer in self.peers.values())


@dataclass(slots=True)
class EndingView:
    """How far the end of the run is."""

    result: Any
    done: bool = False


class Apart:
    """The process, and what is known of it. As `Opening` until it has met the others, as `Courier`
    from then on.
    """

    def __init__(
        self,
        settings: Settings,
        shadow: Memory,
        room: Room,
        *,
        per_chunk: int,
        codec: Codec | None,
        emit: Callable[..., None],
        stop: Stop,
    ) -> None:
        self.shadow = shadow
        self.members = MembersView(settings.peers)
        self.links = {peer: LinkView(EdgeView()) for peer in settings.peers}
        self.ending = EndingView(room.vectors[-1])
        self.mean = room.vectors[-2]
        self.ended = PendingExchange()
        self.counters: Counter[str] = Counter()
        self.rejected: dict[str, int] = {}
        self.exchanges = 0.0
        self.cpu_seconds = 0.0
        self.evicted_by: set[int] = set()
        self.failure: BaseException | None = None
        self._per_step = dict(settings.gradients)[settings.rank]
        self._emit = emit
        self._stop = stop
        self._waiting: dict[int, PendingExchange] = {}
        self._copies: dict[int, Any] = {}
        self._number = 0
        self._stopping = False
        self._sending = threading.Lock()
        ours, theirs = socket.socketpair()
        paths = [os.path.abspath(path) for path in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-m", __package__ + ".process", str(theirs.fileno()), str(room.file)],
            pass_fds=[theirs.fileno(), room.file],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._send(
            {
                "rank_process": os.getpid(),
                "room": room.figures,
                "per_chunk": per_chunk,
                "codec": str(codec or ""),
                "settings": asdict(settings),
            }
        )

    # ---- as `Opening`

    def card(self) -> dict[str, Any]:
        """Where it can be found."""
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(PATIENCE):
                card: dict[str, Any] = json.loads(self._pipe.recv_bytes())["card"]
                return card
        self.close()
        raise OSError("the communication process of this rank has not started; see its message")

    def meet(self, cards: dict[int, dict[str, Any]]) -> Apart:
        """The same, among the ranks that these cards tell of."""
        self._send(list(cards.items()))
        return self

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    # ---- as `Courier`

    def run(self) -> None:
        """Take in what the process says, on a thread, until it ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._hear(json.loads(self._pipe.recv_bytes()))
        code = self.process.wait()
        if self.failure is None and not self._stopping:
            how = f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"
            self.failure = ConnectionError(f"the communication process of this rank {how}")
            self._emit("mailbox_failed", error=repr(self.failure))
        for pending in [*self._waiting.values(), self.ended]:
            pending.finish("dropped")
        with self._sending:
            self._pipe.close()

    def _hear(self, news: dict[str, Any]) -> None:
        picture = news.get("picture")
        if picture is not None:
            self._look(picture)
        if "event" in news:
            self._emit(news["event"], **news["fields"])
        if news.get("done") in self._copies:
            np.copyto(self._copies.pop(news["done"]), self.mean)
        if "done" in news:
            self._waiting.pop(news["done"]).finish(news["outcome"])
        if "ended" in news:
            self.ended.finish(news["ended"])
        if news.get("failed"):
            self.failure = ConnectionError(news["failed"])
        if self.shadow.stop:
            self._stop.asked = True
        elif self._stop.asked:
            self.shadow.stop = True

    def _look(self, picture: dict[str, Any]) -> None:
        self.counters = Counter(picture["counters"])
        self.rejected = picture["rejected"]
        self.exchanges = picture["exchanges"]
        self.cpu_seconds = picture["cpu"]
        self.evicted_by = set(picture["evicted_by"])
        for rank, state, progress, flags, slower, square, applied in picture["peers"]:
            peer = self.members.peers[rank]
            peer.state = State(state)
            peer.progress = progress
            peer.flags = flags
            peer.slower = slower
            self.links[rank].edge = EdgeView(square, applied)

    def _send(self, what: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # it has ended, which `run` finds out
            self._pipe.send_bytes(json.dumps(what).encode())

    def _order(self, name: str, pending: PendingExchange, *details: Any) -> None:
        self._number += 1
        self._waiting[self._number] = pending
        if self.failure is not None:
            pending.finish("dropped")
        self._send([name, self._number, *details])

    @property
    def gradients(self) -> int:
        """That this rank's steps stand for."""
        return self.shadow.progress * self._per_step

    def tell(self, command: Callable[[], None]) -> None:
        """Do it: an order is sent, and nothing waits."""
        command()

    def exchange(
        self, peer: int, weight: float, chunks: list[int], pending: PendingExchange
    ) -> None:
        """Begin an exchange."""
        self._order("exchange", pending, peer, weight, chunks)

    def consensus(self, out: Any, pending: PendingExchange) -> None:
        """Make the mean of the live."""
        self._copies[self._number + 1] = out
        self._order("consensus", pending)

    def lockstep(self, number: int, weights: dict[int, float], pending: PendingExchange) -> None:
        """One round."""
        self._order("lockstep", pending, number, list(weights.items()))

    def finish(self) -> None:
        """Begin nothing more."""
        self.ending.done = True
        self._send(["finish"])

    def end(self) -> None:
        """Have it say goodbye and end."""
        self._stopping = True
        self._send(["stop"])
