"""How the ranks of a replay hand each other the values that the recorded run exchanged.

In the original a message met whatever state its receiver was in. In a replay a value is left under
a name, and whoever folds it waits for that name: so timing has no say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

Array = NDArray[Any]

PATIENCE = timedelta(seconds=5)  # between two looks whether a value can still come


class ReplayError(RuntimeError):
    """A replay cannot go on; the message says why."""


class Condition(Protocol):
    """What `threading.Condition` offers, as far as a replay needs it."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...
    def wait_for(self, predicate: Callable[[], bool]) -> bool: ...
    def notify_all(self) -> None: ...


class Values(Protocol):
    """Where values are left and found. Every rank has one of its own."""

    def put(self, name: str, value: Array) -> None:
        """Leave a value for the one who will take it."""

    def take(self, name: str, source: int, dtype: np.dtype[Any]) -> Array:
        """Wait for a value that rank `source` leaves, and take it away."""

    def put_shared(self, name: str, value: Array) -> None:
        """Leave a value that several may read; equal ones are kept once."""

    def read_shared(self, name: str, source: int, dtype: np.dtype[Any]) -> Array:
        """Wait for a value that rank `source` shares."""

    def end(self) -> None:
        """Nothing more will come from this rank."""

    def fail(self, reason: str) -> None:
        """This rank cannot go on; tell those who wait."""

    def wait_for_end_of(self, ranks: Iterable[int], timeout: float) -> None:
        """Until these have nothing more to give, or somebody has failed, or the time is over."""


class StoreValues:
    """Values in a torch.distributed store, between processes.

    `connect` makes connections of this object's own: waiting on one blocks everybody else who uses
    it.
    """

    def __init__(self, connect: Callable[[], dist.Store], rank: int) -> None:
        self._rank = rank
        self._store: Any = connect()  # takes bytes, whatever its annotations say
        self._control: Any = connect()

    def put(self, name: str, value: Array) -> None:
        """Leave a value for the one who will take it."""
        self._store.set(name, value.tobytes())

    def take(self, name: str, source: int, dtype: np.dtype[Any]) -> Array:
        """Wait for a value that rank `source` leaves, and take it away."""
        self._wait(name, source)
        value = np.frombuffer(self._store.get(name), dtype=dtype)
        self._store.delete_key(name)
        return value

    def put_shared(self, name: str, value: Array) -> None:
        """Leave a value that several may read; equal ones are kept once."""
        raw = value.tobytes()
        content = f"content/{xxhash.xxh3_128_hexdigest(raw)}"
        if not self._store.check([content]):
            self._store.set(content, raw)
        self._store.set(name, content)

    def read_shared(self, name: str, source: int, dtype: np.dtype[Any]) -> Array:
        """Wait for a value that rank `source` shares."""
        self._wait(name, source)
        return np.frombuffer(self._store.get(self._store.get(name).decode()), dtype=dtype)

    def end(self) -> None:
        """Nothing more will come from this rank."""
        self._store.set(f"ended/{self._rank}", b"")

    def fail(self, reason: str) -> None:
        """This rank cannot go on; tell those who wait."""
        self._control.set("failed", f"rank {self._rank}: {reason}")

    def wait_for_end_of(self, ranks: Iterable[int], timeout: float) -> None:
        """Until these have nothing more to give, or somebody has failed, or the time is over."""
        names = [f"ended/{rank}" for rank in ranks]
        looks = max(1, round(timeout / PATIENCE.total_seconds()))
        for _ in range(looks):
            if self._there(names) or self._store.check(["failed"]):
                return

    def _wait(self, name: str, source: int) -> None:
        while not self._there([name]):
            if self._store.check(["failed"]):
                raise was_ended(self._store.get("failed").decode())
            if self._store.check([f"ended/{source}"]) and not self._store.check([name]):
                raise unknown_value(self._rank, source, name)

    def _there(self, names: list[str]) -> bool:
        try:
            self._store.wait(names, PATIENCE)
        except RuntimeError:  # torch's DistStoreError: the time is over
            return bool(self._store.check(names))
        return True


def was_ended(culprit: str) -> ReplayError:
    """Somebody else could not go on."""
    return ReplayError(f"the replay was ended by {culprit}")


def unknown_value(rank: int, source: int, name: str) -> ReplayError:
    """What `rank` folded was never taken by `source`."""
    return ReplayError(
        f"rank {rank} has folded a value of rank {source} ({name}) of which the recording of rank "
        f"{source} knows nothing: the recordings are not of one run, or one is incomplete. Replay "
        "the files as they were written"
    )
