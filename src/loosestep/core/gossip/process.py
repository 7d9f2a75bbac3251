"""The communication of one rank as a process of its own: `python -m loosestep.core.gossip.process`.

It is started by the rank, not forked, so it shares no lock, no interpreter and no device with it,
and it imports no torch unless a codec needs it. What both see is the memory of the shadow; orders
come and news go through a pipe. When the rank dies the process ends at once, without a goodbye, as
the rank did.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from loosestep.core.gossip.loop import Courier
from loosestep.core.gossip.memory import Memory
from loosestep.core.gossip.opening import Opening, Settings
from loosestep.core.gossip.peer import PendingExchange
from loosestep.core.gossip.room import Room
from loosestep.core.stopping import Stop

TELL = 0.05  # seconds between two pictures of what is known, while nobody waits for one


class Order(PendingExchange):
    """Something the rank waits for: it is told when it has come to its end."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def finish(self, outcome: str) -> None:
        """The first time, tell."""
        first = not self.done()
        super().finish(outcome)
        if first:
            self._tell(outcome)


class Half:
    """This process's side of the pipe."""

    def __init__(self, pipe: Connection, memory: int) -> None:
        self._pipe = pipe
        self._parent = os.pidfd_open(os.getppid())
        start = json.loads(pipe.recv_bytes())
        if os.getppid() != start["rank_process"]:
            os._exit(1)  # it was gone before it could be watched
        count, chunks, size, dtype = start["room"]
        room = Room(count, chunks, size, np.dtype(dtype), file=memory)
        codec = None
        if start["codec"]:
            from loosestep.codecs import codec as named

            codec = named(start["codec"])
        self._shadow = Memory(
            room.vectors[:-2],
            room.table,
            per_chunk=start["per_chunk"],
            lock=room.lock,
            codec=codec,
        )
        self._mean, self._result = room.vectors[-2:]
        self._wish = Stop()
        settings = Settings(**start["settings"])
        self._opening = Opening(settings, self._shadow, emit=self._emit, stop=self._wish)
        self._told = 0.0
        self._courier: Courier | None = None
        self.send(card=self._opening.card())

    def run(self) -> None:
        """Meet the others, and run the loop until the end."""
        cards = json.loads(self._pipe.recv_bytes())
        courier = self._courier = self._opening.meet({int(peer): card for peer, card in cards})
        courier.ending.result = self._result
        courier.ended = Order(lambda outcome: self.picture(ended=outcome))
        courier.transport.watch(self._pipe.fileno())
        courier.transport.watch(self._parent)
        courier.commands = self  # type: ignore[assignment]  # a queue that a pipe fills
        self.picture()
        courier.run()
        self.picture(failed=None if courier.failure is None else repr(courier.failure))

    def send(self, **news: Any) -> None:
        """Tell the rank."""
        try:
            self._pipe.send_bytes(json.dumps(news, default=float).encode())
        except OSError:
            os._exit(1)  # nobody is there any more

    def _emit(self, kind: str, **fields: Any) -> None:
        self.picture(event=kind, fields=fields)

    def picture(self, **news: Any) -> None:
        """What the rank may ask about at any time, and some news."""
        courier = self._courier
        if courier is not None:
            peers = courier.members.peers.values()
            news["picture"] = {
                "counters": {**courier.counters},
                "rejected": {**courier.rejected},
                "exchanges": courier.exchanges,
                "cpu": time.process_time(),
                "evicted_by": sorted(courier.evicted_by),
                "peers": [
                    [
                        peer.rank,
                        peer.state.value,
                        peer.progress,
                        peer.flags,
                        peer.slower,
                        courier.links[peer.rank].edge.square,
                        courier.links[peer.rank].edge.applied,
                    ]
                    for peer in peers
                ],
            }
            self._told = time.monotonic()
        self.send(**news)

    # ---- as the loop's queue of commands

    def __bool__(self) -> bool:
        """Whether an order waits. Called at every turn, so it also looks after the rest."""
        if select.select([self._parent], [], [], 0)[0]:
            os._exit(1)
        if self._wish.asked:
            self._shadow.stop = True
        elif self._shadow.stop:
            self._wish.asked = True
        if time.monotonic() - self._told > TELL:
            self.picture()
        try:
            return self._pipe.poll()
        except OSError:
            os._exit(1)

    def popleft(self) -> Callable[[], None]:
        """The next order."""
        try:
            name, *details = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        return partial(getattr(self, f"do_{name}"), *details)

    def _order(self, number: int) -> Order:
        return Order(lambda outcome: self.picture(done=number, outcome=outcome))

    def do_exchange(self, number: int, peer: int, weight: float, chunks: list[int]) -> None:
        """Begin an exchange."""
        assert self._courier is not None
        self._courier.exchange(peer, weight, chunks, self._order(number))

    def do_consensus(self, number: int) -> None:
        """Make the mean of the live."""
        assert self._courier is not None
        self._courier.consensus(self._mean, self._order(number))

    def do_lockstep(self, number: int, turn: int, weights: list[tuple[int, float]]) -> None:
        """One round."""
        assert self._courier is not None
        self._courier.lockstep(turn, dict(weights), self._order(number))

    def do_finish(self) -> None:
        """Begin nothing more."""
        assert self._courier is not None
        self._courier.finish()

    def do_stop(self) -> None:
        """Say goodbye."""
        assert self._courier is not None
        self._courier.stopping = True


def main() -> None:
    """Run until the rank says so, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the rank, which ends this process in order
    Half(Connection(int(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
