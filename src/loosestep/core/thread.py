"""One communication thread: tasks in the order in which they were submitted, each with a
`Pending`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from loosestep.core.errors import CommError
from loosestep.core.pending import Pending

T = TypeVar("T")


class CommThread:
    """Runs tasks one after another on its own thread. After an error every later task fails with
    the same error.

    `narrow`: operations on tensors use this thread alone. Where a step computes on the same cores,
    threads that wait for each other at every operation would wait for the communication too.
    """

    def __init__(self, name: str, *, narrow: bool = False) -> None:
        self._narrow = narrow
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Pending[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._error: BaseException | None = None
        self._last: Pending[Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"loosestep-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Pending[T]:
        """Queue a task."""
        pending: Pending[T] = Pending()
        if self._closed:
            pending.fail(CommError("the run has ended; attach the model again to communicate"))
        else:
            self._last = pending
            self._tasks.put((task, pending))
        return pending

    def run(self, task: Callable[[], T]) -> T:
        """Do a task on this thread and wait for it; from the thread itself, at once."""
        if threading.current_thread() is self._thread:
            return task()
        return self.submit(task).wait()

    def here(self, task: Callable[[], T]) -> T:
        """Do a task on the calling thread, the only one that submits, after everything that it
        has submitted.
        """
        if self._last is not None:
            self._last.wait()
        try:
            return task()
        except BaseException as error:
            self._error = error
            raise

    def close(self, timeout: float) -> bool:
        """Finish what is queued and end the thread; false if it is still busy after `timeout`."""
        self._closed = True
        self._last = None
        self._tasks.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._narrow:
            _compute_alone()
        while (item := self._tasks.get()) is not None:
            task, pending = item
            try:
                if self._error is not None:
                    raise self._error
                value = task()
            except BaseException as error:  # noqa: BLE001  delivered to whoever waits; the thread must live on
                self._error = error
                pending.fail(error)
            else:
                pending.fulfil(value)


def _compute_alone() -> None:
    """Operations that this thread begins run on it alone; those of others, and of threads to
    come, as before.
    """
    before = torch.get_num_threads()
    if before > 1:
        # for this thread, and for those to come, which is taken back by one of them
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()
