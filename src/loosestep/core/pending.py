"""Results that are on their way, and the default of a hook that has nothing to do."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


def nothing() -> None:
    """Do nothing: everything is here already."""


class Pending(Generic[T]):
    """A result that is on its way. `done()` never blocks; `wait()` returns the result or raises
    what went wrong.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the result (or the error) is here."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result; `TimeoutError` after `timeout` seconds."""
        if not self._event.wait(timeout):
            raise TimeoutError(f"nothing arrived within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def fulfil(self, value: T) -> None:
        """Deliver the result."""
        self._value = value
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Deliver an error; it is raised by `wait()`."""
        self._error = error
        self._event.set()
