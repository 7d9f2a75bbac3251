"""Heartbeats: who is alive, who left, who failed and why.

Every rank writes a beat into the run's store and reads the others' once an interval. A rank is lost
when its beat stands still for the deadline, not when an operation is old: an evaluation may take an
hour. A rank that fails says so in its last beat, and names the culprit it knows of, so that all
ranks report the same one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from loosestep.core.errors import CommError, LostPeer
from loosestep.core.messages.mates import Mates, own_place
from loosestep.core.messages.sealed_store import SealedStore
from loosestep.core.stopping import Stop

FORGIVEN = 2.0  # a check this late means that this process itself was stopped


class Pulse:
    """One thread that beats and listens. `check()` raises once a peer is known to be lost.

    `names`: what the ranks are called in messages, where they are part of a larger world.
    """

    def __init__(
        self,
        store: SealedStore,
        rank: int,
        *,
        world: int,
        deadline: float,
        names: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self.deadline = deadline
        self.names = range(world) if names is None else names
        self.interval = min(1.0, deadline / 10)
        self.step = 0
        self.fault: CommError | None = None
        now = time.monotonic()
        self._beat = 0
        self._values: list[bytes] = [b""] * world
        self._seen = [now] * world
        self._listened = self._checked = now
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self._silence = deadline
        self._called: list[Callable[[], None]] = []
        self._wish = stop or Stop()
        self._asks: tuple[int, int] | None = None
        self._asked: dict[int, tuple[int, int]] = {}
        self._place = own_place()
        self._mates = Mates()
        self._saw: dict[str, object] = {}
        self._write(self._sign_of_life())
        self._thread = threading.Thread(target=self._live, name="loosestep-pulse", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LostPeer` if somebody is gone; costs nothing otherwise."""
        now = time.monotonic()
        if now - self._checked > FORGIVEN:  # we were stopped, not they
            self._listened = now
        self._checked = now
        if self.fault is None and now - self._listened > self.deadline:
            self.hurt(self._lost(0, f"the run's store has not answered for {self.deadline:g} s"))
        if self.fault is not None:
            raise self.fault

    def blame(self, error: BaseException) -> CommError:
        """An operation failed: wait for the heartbeats to tell who caused it, at most for the
        deadline.
        """
        self.suspect()
        until = time.monotonic() + self.deadline
        while time.monotonic() < until:
            try:
                self.check()
            except CommError as fault:
                return fault
            self._hurry.wait(self.interval / 4)
        return CommError(f"communication failed although every rank is alive: {error}")

    def suspect(self) -> None:
        """Somebody does not answer where it should: from now on a few beats that fail to come
        are enough.
        """
        self._silence = min(self.deadline, 4 * self.interval)

    def hurt(self, fault: CommError) -> None:
        """The run cannot go on; the first reason counts."""
        if self.fault is None:
            self.fault = fault
            self._hurry.set()
            for call in self._called:
                call()

    def on_fault(self, call: Callable[[], None]) -> None:
        """Have something called as soon as somebody is lost, for what waits in a place where
        `check` is never called.
        """
        self._called.append(call)

    def ask(self, number: int, step: int) -> None:
        """Tell the others that this rank waits for consensus `number`, after its step `step`."""
        self._asks = number, step

    def stop_asking(self) -> None:
        """It has come."""
        self._asks = None

    def is_asked(self, number: int, step: int) -> bool:
        """Whether somebody waits for that consensus since a step that is behind this rank, which
        then has not called it at the same step and will not.
        """
        asked = list(self._asked.values())  # the heartbeat thread changes them
        return any(theirs == number and begun < step for theirs, begun in asked)

    def waiting_for(self) -> str:
        """Where the other ranks are, for a message to somebody who waits."""
        steps = ", ".join(
            f"rank {self.names[r]} at step {self._read(r).get('step', 0)}"
            for r in range(self.world)
            if r != self.rank
        )
        return steps or "no other rank"

    def leave(self) -> None:
        """Say goodbye: from now on our silence means nothing."""
        self._end({"left": True})

    def fail(self, reason: str, culprit: int | None = None) -> None:
        """Tell the others why this rank ends, then stop beating."""
        self._end(
            {"failed": reason, "culprit": self.names[self.rank] if culprit is None else culprit}
        )

    def _end(self, beat: dict[str, object]) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._hurry.set()
        self._mates.wake()
        self._thread.join(timeout=self.deadline)
        with contextlib.suppress(
            RuntimeError
        ):  # the store went first: there is nobody left to tell
            self._write(beat)

    def _live(self) -> None:
        try:
            self._listen()
            while not self._stop.is_set():
                ended = self._mates.wait(self.interval)
                if self._stop.is_set():
                    return
                self._beat += 1
                self._write(self._sign_of_life())
                self._listen()
                self._miss(
                    [rank for rank in ended if not self._read(rank).keys() & {"left", "failed"}]
                )
        except RuntimeError as error:
            if not self._stop.is_set():
                why = f"the run's store is gone ({str(error).splitlines()[0]})"
                self.hurt(self._lost(0, why))
        finally:
            self._mates.close()

    def _sign_of_life(self) -> dict[str, object]:
        return {
            "beat": self._beat,
            "step": self.step,
            "place": self._place,
            **({"stop": True} if self._wish.asked else {}),
            **({"asks": self._asks} if self._asks is not None else {}),
            **self._saw,
        }

    def _miss(self, ended: list[int]) -> None:
        """The system says that processes on this machine have ended, who have not said so: tell the
        others at once, for a launcher may be about to end this process too.
        """
        if ended and not self._saw:
            self._saw = {"saw": ended[0]}
            self._write(self._sign_of_life())
            self.hurt(self._lost(ended[0], "its process has ended"))

    def _listen(self) -> None:
        there = [rank for rank in range(self.world) if "left" not in self._read(rank)]
        values = self.store.peek([f"beat/{rank}" for rank in there])
        now = self._listened = time.monotonic()
        for rank, value in zip(there, values, strict=True):
            if value is not None and value != self._values[rank]:
                self._values[rank] = value
                self._seen[rank] = now
                beat = self._read(rank)
                self._wish.asked = self._wish.asked or "stop" in beat
                self._asked.pop(rank, None)
                if "asks" in beat:
                    self._asked[rank] = (int(beat["asks"][0]), int(beat["asks"][1]))
                if "failed" in beat and rank != self.rank:
                    self.hurt(LostPeer(int(beat["culprit"]), str(beat["failed"])))
                if "saw" in beat and beat["saw"] != self.rank:
                    who = f"rank {self.names[rank]} saw its process end"
                    self.hurt(self._lost(int(beat["saw"]), who))
                if "place" in beat and rank != self.rank:
                    self._mates.watch(rank, beat["place"])
        for rank in range(self.world):
            silent = now - self._seen[rank]
            if rank != self.rank and silent > self._silence and "left" not in self._read(rank):
                step = self._read(rank).get("step", 0)
                self.hurt(
                    self._lost(rank, f"no heartbeat for {silent:.1f} s, last seen at step {step}")
                )

    def _read(self, rank: int) -> dict[str, Any]:
        value = self._values[rank]
        return dict(json.loads(value)) if value else {}

    def _write(self, beat: dict[str, object]) -> None:
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _lost(self, rank: int, why: str) -> LostPeer:
        return LostPeer(
            self.names[rank],
            f"rank {self.names[rank]} is lost: {why}. A collective run ends when a rank is lost; "
            "the parameters on this rank are as they were before the exchange",
        )
