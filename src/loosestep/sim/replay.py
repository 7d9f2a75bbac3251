"""A replay on virtual ranks: what threads and a store are to real processes, on the virtual
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loosestep.record.values import unknown_value, was_ended
from loosestep.sim.clock import Gate, VirtualClock

Array = NDArray[Any]


class VirtualCondition:
    """A `threading.Condition` between strands, of which only one runs at a time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._gates: list[Gate] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool]) -> bool:
        """Hand the baton on until it holds."""
        while not predicate():
            gate = Gate(self._clock)
            self._gates.append(gate)
            gate.wait(why="its recording")
        return True

    def notify_all(self) -> None:
        """Let everybody look again."""
        gates = self._gates
        self._gates = []
        for gate in gates:
            gate.open()


class Shelf:
    """What all virtual ranks of a replay have left for each other."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.values: dict[str, Array] = {}
        self.gates: dict[str, Gate] = {}
        self.ended: set[int] = set()
        self.failed = ""

    def put(self, name: str, value: Array) -> None:
        """Leave a value, and let those go on who wait for it."""
        self.values[name] = value
        if name in self.gates:
            self.gates.pop(name).open()

    def wait(self, name: str) -> None:
        """Until it is there, or it is worth looking again."""
        self.gates.setdefault(name, Gate(self.clock)).wait(why=name)

    def look_again(self) -> None:
        """Something has changed that concerns all who wait."""
        gates = self.gates
        self.gates = {}
        for gate in gates.values():
            gate.open()


class VirtualValues:
    """One virtual rank's way to the shelf."""

    def __init__(self, shelf: Shelf, rank: int) -> None:
        self._shelf = shelf
        self._rank = rank

    def put(self, name: str, value: Array) -> None:
        """Leave a copy for the one who will take it."""
        self._shelf.put(name, value.copy())

    def take(self, name: str, source: int, dtype: np.dtype[Any]) -> Array:
        """Wait for a value that rank `source` leaves, and take it away."""
        self._wait(name, source)
        return self._shelf.values.pop(name)

    def put_shared(self, name: str, value: Array) -> None:
        """Leave a value that several may read."""
        self._shelf.put(name, value.copy())

    def read_shared(self, name: str, source: int, dtype: np.dtype[Any]) -> Array:
        """Wait for a value that rank `source` shares."""
        self._wait(name, source)
        return self._shelf.values[name]

    def end(self) -> None:
        """Nothing more will come from this rank."""
        self._shelf.ended.add(self._rank)
        self._shelf.look_again()

    def fail(self, reason: str) -> None:
        """This rank cannot go on; tell those who wait."""
        self._shelf.failed = self._shelf.failed or f"rank {self._rank}: {reason}"
        self._shelf.look_again()

    def wait_for_end_of(self, ranks: Iterable[int], timeout: float) -> None:
        """Until these have nothing more to give, or somebody has failed."""
        while not self._shelf.ended.issuperset(ranks) and not self._shelf.failed:
            self._shelf.wait(f"the end of ranks {sorted(ranks)}")

    def _wait(self, name: str, source: int) -> None:
        while name not in self._shelf.values:
            if self._shelf.failed:
                raise was_ended(self._shelf.failed)
            if source in self._shelf.ended:
                raise unknown_value(self._rank, source, name)
            self._shelf.wait(name)
