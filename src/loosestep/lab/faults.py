"""Things that happen to ranks and links while a job runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from loosestep.lab.grammar import Fault, Kill, Partition, Stop
from loosestep.launch import Job

CYCLE = 0.02
"""Seconds of one turn of a slowed rank: short against heartbeats and steps, long against a
context switch.
"""


class Cuttable(Protocol):
    """A network that can be taken apart and mended."""

    def partition(self, *groups: Collection[int]) -> None: ...

    def rejoin(self, *groups: Collection[int]) -> None: ...


Announce = Callable[[str], None]


class FaultTimer:
    """Carries the faults out at their times and says so; ends with the job, and leaves no cut of
    its own behind.
    """

    def __init__(
        self, faults: Collection[Fault], job: Job, network: Cuttable, *, announce: Announce | None
    ) -> None:
        self._job = job
        self._network = network
        self._announce = announce
        self._cuts: list[Partition] = []
        events = [event for fault in faults for event in self._events_of(fault)]
        self._events = sorted(events, key=lambda event: event[0])
        self._thread = threading.Thread(target=self._run, name="loosestep-lab-faults", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which follows that of the job."""
        self._thread.join()

    def _events_of(self, fault: Fault) -> list[tuple[float, str, Callable[[], None]]]:
        if isinstance(fault, Kill):
            return [
                (
                    fault.at,
                    f"rank {fault.rank} killed",
                    lambda: self._job.ranks[fault.rank].kill(signal.SIGKILL),
                )
            ]
        if isinstance(fault, Stop):
            rank = self._job.ranks[fault.rank]
            return [
                (fault.at, f"rank {fault.rank} stopped", lambda: rank.hold(fault)),
                (fault.at + fault.lasts, f"rank {fault.rank} goes on", lambda: rank.let_go(fault)),
            ]
        groups = " / ".join(",".join(map(str, sorted(group))) for group in fault.groups)
        return [
            (fault.at, f"nodes {groups} cut off", lambda: self._cut(fault)),
            (fault.at + fault.lasts, f"nodes {groups} connected again", lambda: self._mend(fault)),
        ]

    def _cut(self, fault: Partition) -> None:
        self._network.partition(*fault.groups)
        self._cuts.append(fault)

    def _mend(self, fault: Partition) -> None:
        self._cuts.remove(fault)
        self._network.rejoin(*fault.groups)

    def _run(self) -> None:
        try:
            self._carry_out()
        finally:
            for fault in list(self._cuts):
                self._mend(fault)

    def _carry_out(self) -> None:
        begin = time.monotonic()
        for at, what, act in self._events:
            if self._job.ended(max(0.0, begin + at - time.monotonic())):
                return
            act()
            if self._announce is not None:
                self._announce(f"{at:g} s: {what}")


class Slowdown:
    """Lets a rank run for 1/factor of the time: it is stopped for as long as what it ran calls for,
    which on busy cores is more than it was meant to.
    """

    def __init__(self, job: Job, rank: int, factor: float) -> None:
        self._job = job
        self._rank = job.ranks[rank]
        self._factor = factor
        self._thread = threading.Thread(target=self._run, name="loosestep-lab-slow", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which follows that of the rank."""
        self._thread.join()

    def _run(self) -> None:
        begun = time.monotonic()
        while not self._job.ended(CYCLE / self._factor) and self._rank.returncode is None:
            self._rank.hold(self)
            self._job.ended((self._factor - 1) * (time.monotonic() - begun))
            self._rank.let_go(self)
            begun = time.monotonic()
