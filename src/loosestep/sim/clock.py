"""A virtual clock and the threads that live on it.

Every *strand* is a real thread, but only the one that holds the baton runs. A strand that waits
takes the next event off the queue: a function to call, or a strand to hand the baton to. Real
threads, because torch keeps grad mode, autocast and the state of a running backward per thread, so
a strand may wait anywhere, in a backward hook too. Events happen in the order of their virtual
times; of equal times a generator seeded by the caller decides, so the order of everything is a
function of the seed.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from typing import NamedTuple


class Killed(BaseException):
    """Raised in a strand that has been killed, wherever it waits."""


class Strand:
    """A thread that runs while it holds the baton. `on_resume` is called whenever it gets it
    back from another one.
    """

    def __init__(self, name: str, rank: int | None) -> None:
        self.name = name
        self.rank = rank
        self.killed = self.ended = False
        self.waits_for = ""
        self.on_resume: Callable[[], None] | None = None
        self.ticket = 0  # of the latest wait: a wake-up for an older one comes too late
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None


class _Wakeup(NamedTuple):
    time: float
    tie: float
    number: int
    what: Callable[[], None] | tuple[Strand, int]


class VirtualClock:
    """Virtual seconds, and whose turn it is."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.failure: BaseException | None = None  # of a function that was called
        self._ties = random.Random(f"order/{seed}")
        self._queue: list[_Wakeup] = []
        self._number = 0
        self._root = Strand("root", None)
        self._running = self._root
        self._strands: list[Strand] = []
        self._stopping = False

    # Events ---------------------------------------------------------------------------------------

    def call(self, at: float, function: Callable[[], None]) -> None:
        """Call a function that never waits, at a time."""
        self._push(at, function)

    def _push(self, at: float, what: Callable[[], None] | tuple[Strand, int]) -> None:
        self._number += 1
        heapq.heappush(
            self._queue, _Wakeup(max(at, self.now), self._ties.random(), self._number, what)
        )

    # Strands --------------------------------------------------------------------------------------

    @property
    def current(self) -> Strand:
        """Who holds the baton."""
        return self._running

    def spawn(
        self, function: Callable[[], None], *, name: str, rank: int | None, at: float = 0.0
    ) -> Strand:
        """Start a strand at a time. What it raises ends it, and nothing else: it must keep what
        matters.
        """
        strand = Strand(name, rank)
        strand.thread = threading.Thread(
            target=self._live, args=(strand, function), name=name, daemon=True
        )
        self._strands.append(strand)
        self._push(at, (strand, strand.ticket))
        strand.thread.start()
        return strand

    def _live(self, strand: Strand, function: Callable[[], None]) -> None:
        strand.baton.acquire()
        try:
            if not strand.killed:
                self._resumed(strand)
                function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  the simulation ends with it
            self.failure = self.failure or error
        finally:
            strand.ended = True
            self._next().baton.release()

    def wait(self, gate: Gate | None = None, *, until: float | None = None, why: str = "") -> bool:
        """Hand the baton on until the gate opens (True) or a time has come (False)."""
        strand = self._running
        if strand.killed:
            raise Killed
        if gate is not None and gate.is_open:
            return True
        strand.ticket += 1
        strand.waits_for = why
        if until is not None:
            self._push(until, (strand, strand.ticket))
        if gate is not None:
            gate.waiting.append((strand, strand.ticket))
        follower = self._next()
        if follower is not strand:
            follower.baton.release()
            strand.baton.acquire()
            self._resumed(strand)
        strand.ticket += 1
        strand.waits_for = ""
        if strand.killed:
            raise Killed
        return gate is not None and gate.is_open

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        if seconds > 0:
            self.wait(until=self.now + seconds, why="its computation")

    def _resumed(self, strand: Strand) -> None:
        self._running = strand
        if strand.on_resume is not None:
            strand.on_resume()

    def _next(self) -> Strand:
        """Let events happen until one of them is a strand's turn; without events, or at the end,
        it is the root's.
        """
        while self._queue and not self._stopping and self.failure is None:
            event = heapq.heappop(self._queue)
            self.now = event.time
            if not isinstance(event.what, tuple):
                try:
                    event.what()
                except BaseException as error:  # noqa: BLE001  raised again by `run`
                    self.failure = error
                continue
            strand, ticket = event.what
            if not strand.ended and ticket == strand.ticket:
                return strand
        return self._root

    def wake(self, strand: Strand) -> None:
        """End a strand's wait; it looks for itself whether what it waits for is there."""
        self._push(self.now, (strand, strand.ticket))

    def kill(self, rank: int) -> None:
        """End all strands of a rank where they wait."""
        for strand in self._strands:
            if strand.rank == rank and not strand.ended:
                strand.killed = True
                strand.ticket += 1
                self._push(self.now, (strand, strand.ticket))

    # The whole ------------------------------------------------------------------------------------

    def run(self) -> list[Strand]:
        """Until nothing can happen any more; the strands that still wait then, for something
        that never comes.
        """
        try:
            self._hand_over(self._next())
        except BaseException:  # an interrupt: the strand that runs stops at its next wait
            self._stopping = True
            self._root.baton.acquire()
            raise
        finally:
            stuck = [strand for strand in self._strands if not strand.ended]
            self._end(stuck)
        if self.failure is not None:
            raise self.failure
        return stuck

    def _hand_over(self, strand: Strand) -> None:
        if strand is not self._root:
            strand.baton.release()
            self._root.baton.acquire()
        self._running = self._root

    def _end(self, strands: list[Strand]) -> None:
        """Unwind strands one after another."""
        self._stopping = True
        for strand in strands:
            strand.killed = True
            self._hand_over(strand)
        for strand in self._strands:
            if strand.thread is not None:
                strand.thread.join()


class Gate:
    """Something to wait for. Open it once; `at` a later time, everybody goes on then."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.is_open = False
        self.waiting: list[tuple[Strand, int]] = []

    def open(self) -> None:
        """Let everybody go on, in an order that the seed decides."""
        if self.is_open:
            return
        self.is_open = True
        for strand, ticket in self.waiting:
            self._clock._push(self._clock.now, (strand, ticket))
        self.waiting.clear()

    def open_at(self, time: float) -> None:
        """Open it then."""
        self._clock.call(time, self.open)

    def wait(self, timeout: float | None = None, *, why: str = "") -> bool:
        """Whether it opened in time."""
        until = None if timeout is None else self._clock.now + timeout
        return self._clock.wait(self, until=until, why=why)
