"""Things that happen to ranks and links while a job runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from loosestep.lab.grammar import Fault, Kill, Stop
from loosestep.launch import Job

CYCLE = 0.02
"""Seconds of one turn of a slowed rank: short against heartbeats and steps, long against a context switch."""


class Cuttable(Protocol):
    """A network that can be taken apart and mended."""

    def partition(self, *groups: Collection[int]) -> None: ...

    def heal(self) -> None: ...


class Schedule:
    """Carries the faults out at their times; ends with the job."""

    def __init__(self, faults: Collection[Fault], job: Job, network: Cuttable) -> None:
        self._job = job
        self._network = network
        self._events = sorted(
            (event for fault in faults for event in self._events_of(fault)), key=lambda event: event[0]
        )
        if self._events:
            threading.Thread(target=self._run, name="loosestep-lab-faults", daemon=True).start()

    def _events_of(self, fault: Fault) -> list[tuple[float, Callable[[], None]]]:
        if isinstance(fault, Kill):
            return [(fault.at, lambda: self._job.ranks[fault.rank].kill(signal.SIGKILL))]
        if isinstance(fault, Stop):
            rank = self._job.ranks[fault.rank]
            return [
                (fault.at, lambda: rank.kill(signal.SIGSTOP)),
                (fault.at + fault.lasts, lambda: rank.kill(signal.SIGCONT)),
            ]
        return [
            (fault.at, lambda: self._network.partition(*fault.groups)),
            (fault.at + fault.lasts, self._network.heal),
        ]

    def _run(self) -> None:
        begin = time.monotonic()
        for at, act in self._events:
            if self._job.ended(max(0.0, begin + at - time.monotonic())):
                return
            act()


class Slowdown:
    """Lets a rank run for 1/factor of the time: of every cycle it is stopped for the rest."""

    def __init__(self, job: Job, rank: int, factor: float) -> None:
        self._job = job
        self._rank = job.ranks[rank]
        self._on = CYCLE / factor
        if factor > 1:
            threading.Thread(target=self._run, name="loosestep-lab-slow", daemon=True).start()

    def _run(self) -> None:
        while not self._job.ended(self._on) and self._rank.returncode is None:
            self._rank.kill(signal.SIGSTOP)
            self._job.ended(CYCLE - self._on)
            self._rank.kill(signal.SIGCONT)
