"""Several mailboxes in one process."""

import contextlib
import os
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.distributed import HashStore

from loosestep.core.gossip.mailbox import Mailbox
from loosestep.core.gossip.peer import Timing

KEY = "0123456789abcdef" * 2
QUICK = {"beat": 0.05, "suspend": 0.3, "retry": 0.1}


def wait_until(condition, seconds=10.0):
    """Polls: for states that another thread reaches and tells nobody about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def cut(addresses: Collection[tuple[str, int]]) -> int:
    """Break the connections of this process to these addresses, as a firewall that forgets them
    would; how many.
    """
    broken = 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
            found = socket.socket(fileno=int(name))
            try:
                if found.family == socket.AF_INET and found.getpeername() in addresses:
                    found.shutdown(socket.SHUT_RDWR)
                    broken += 1
            finally:
                found.detach()
    return broken


class Cluster:
    """`n` mailboxes in this process, on one store."""

    def __init__(self, n, *, size=1000, dtype=torch.float64, **options):
        self.n = n
        self.params = [[start_vector(rank, size, dtype)] for rank in range(n)]
        self.start = self.sum()
        self.events = [[] for _ in range(n)]
        self.boxes = [None] * n
        self.pool = ThreadPoolExecutor(n)
        self.store = HashStore()
        self.options = {"timing": Timing(**QUICK), "deadline": 20.0} | options
        self.all(self._open)

    def _open(self, rank):
        options = {
            k: v(rank) if k in ("lose", "timing") and callable(v) else v
            for k, v in self.options.items()
        }
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


def step(box, params, mode="due", **options):
    """Make a step, whose parameters cross."""
    box.step()
    return box.cross(params, mode, **options)


def start_vector(rank, size, dtype):
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
    """A hook that ends the victim's communication thread without a goodbye, as kill -9 would,
    before a certain frame.
    """
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
