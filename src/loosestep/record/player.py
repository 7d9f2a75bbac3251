"""A recording as the tape of a replay: the compute thread passes marks, background events are
played between them.

The order of a recording is the order in which things really happened, and what a rank waits for in
a replay (the marks before, its own events before, values its peers had taken by then) had really
happened before. So the original order is one in which the replay can go, and it never deadlocks,
however fast each rank is now.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from loosestep.record.format import Record, Recording, RecordingError, RecordKind
from loosestep.record.recorder import Recorder, circumstances
from loosestep.record.values import Condition, ReplayError, Values

log = logging.getLogger("loosestep")

WAIT_AT_END = 60.0


class Threads(Protocol):
    """What a replay needs of the world its rank lives in."""

    rank: int

    def values(self) -> Values: ...
    def condition(self) -> Condition: ...
    def spawn(self, function: Callable[[], None], name: str) -> Callable[[], None]: ...


class RecordingEnds(Exception):
    """The recording of this rank ends here: it was killed, or its run was broken off."""


class ReplayStopped(Exception):
    """The replay has reached the step it was to stop at."""


class ReplayDiffers(ReplayError):
    """The replay is not what was recorded."""


class Player:
    """One rank's recording in a replay; the tape of its run."""

    binds = True
    writer: Recorder | None = None

    def __init__(
        self,
        recording: Recording,
        world: Threads,
        *,
        together: Iterable[int] = (),
        until: int | None = None,
    ) -> None:
        """`together`: the ranks that this one meets in collectives. `until`: the step after
        which to stop.
        """
        self.rank = world.rank
        self.steps = 0
        self.checked = 0
        self.digest = 0
        self.total = recording.steps
        self.header = recording.header
        self.values = world.values()
        self._until = until
        self._spawn = world.spawn
        self._together = [rank for rank in together if rank != world.rank]
        self._same = 0  # the last step that was compared
        self._records = recording.records()
        self._condition = world.condition()
        self._failure: BaseException | None = None
        self._join: Callable[[], None] | None = None
        self._closed = False
        self._head: Record | None = None
        with self._condition:
            self._next()

    # The thread that plays background events ------------------------------------------------------

    def play(self, act: Callable[[Record], None]) -> None:
        """From here on background events are handed to `act`, on a thread."""
        self._join = self._spawn(lambda: self._play(act), f"loosestep-replay-{self.rank}")

    def _play(self, act: Callable[[Record], None]) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._closed or not self._at_mark())
                    record = self._head
                    if self._closed or record is None:
                        return
                act(record)
                with self._condition:
                    self._next()
        except Exception as error:  # noqa: BLE001 it is raised again in the compute thread, at its next mark
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _at_mark(self) -> bool:
        return self._head is not None and self._head.is_mark

    def _next(self) -> None:
        self._head = next(self._records, None)
        if self.exhausted:
            self.values.end()
        self._condition.notify_all()

    # Marks ----------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Nothing is left that the run could still do."""
        return self._head is None or self._head.kind in (RecordKind.ABORT, RecordKind.END)

    def peek(self) -> RecordKind | None:
        """The kind of the next mark; None at the end."""
        record = self.ahead()
        return None if record is None else record.kind

    def ahead(self) -> Record | None:
        """The next mark; None at the end."""
        with self._condition:
            self._wait()
            return self._head

    def mark(self, *kinds: RecordKind, do: Callable[[], Any] = lambda: None) -> Record:
        """Wait until everything before the next mark was played; it must be one of `kinds`. `do`
        runs before anything after it.
        """
        with self._condition:
            self._wait()
            head = self._head
            if head is None or head.kind is RecordKind.ABORT:
                self._end(None if head is None else str(head.rest))
            assert head is not None
            if head.kind not in kinds:
                raise ReplayDiffers(
                    f"rank {self.rank} does something else than was recorded after step "
                    f"{self.steps}: {kinds[0].name} instead of {head.kind.name}; is it the same "
                    "program, configuration and data?"
                )
            do()
            self._next()
            return head

    def _wait(self) -> None:
        self._condition.wait_for(
            lambda: (
                self._failure is not None
                or self._head is None
                or self._head.is_mark
                or self._join is None
            )
        )
        if self._failure is not None:
            raise self._failure

    def _end(self, reason: str | None) -> None:
        self.values.wait_for_end_of(self._together, WAIT_AT_END)
        why = f"its run was broken off: {reason}" if reason else "it was killed"
        raise RecordingEnds(f"the recording of rank {self.rank} ends at step {self.steps}: {why}")

    # The tape -------------------------------------------------------------------------------------

    def step(self) -> None:
        """The boundary of an optimizer step begins."""
        self.mark(RecordKind.STEP)
        self.steps += 1

    def stepped(self, global_steps: int, digest: Callable[[], int]) -> int:
        """It is complete; the parameters must be what they were."""
        record = self.mark(RecordKind.STEPPED, RecordKind.CHECKED)
        if record.kind is RecordKind.CHECKED:
            self._check(record.fields[1], digest())
            self.checked += 1
        if self.steps == self._until:
            self.digest = digest()
            raise ReplayStopped(f"rank {self.rank} is at step {self.steps}")
        return int(record.fields[0])

    def number(self, value: int) -> int:
        """What it was."""
        return int(self.mark(RecordKind.NUMBER).fields[0])

    def value(self, compute: Callable[[], Any]) -> Any:
        """What it was."""
        return json.loads(self.mark(RecordKind.VALUE).rest)

    def ended(self, global_steps: int, digest: Callable[[], int]) -> int:
        """The final parameters must be what they were."""
        record = self.mark(RecordKind.END)
        self._check(record.fields[1], digest())
        return int(record.fields[0])

    def breaking(self, reason: str) -> None:
        """Tell the others, unless this is what was recorded."""
        with self._condition:
            if not self.exhausted:
                self._closed = True
                self.values.fail(reason)
            self._condition.notify_all()

    def aborted(self, reason: str) -> None:
        """Nothing is written in a replay."""

    def close(self) -> None:
        """End the thread; unless the run was broken off, after it has played what others wait
        for.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._closed
                    or self._failure is not None
                    or self._head is None
                    or self._at_mark()
                )
            )
            self._closed = True
            self._condition.notify_all()
        if self._join is not None:
            self._join()

    def _check(self, recorded: int, found: int) -> None:
        self.digest = found
        if recorded != found:
            since = (
                f"step {self._same}, the last that was compared" if self._same else "the beginning"
            )
            raise ReplayDiffers(
                f"rank {self.rank} differs at step {self.steps}: its parameters have the digest "
                f"{found:016x}, recorded was {recorded:016x}; identical up to "
                f"{since}.{self._suspicion()}"
            )
        self._same = self.steps

    def _suspicion(self) -> str:
        changes = changed_circumstances(self.header)
        return (
            f" Since it was recorded, {'; '.join(changes)}: that may change bits" if changes else ""
        )


def changed_circumstances(header: dict[str, Any]) -> list[str]:
    """What is different now and may change bits."""
    now = circumstances()
    return [
        f"{name} was {header.get(name)} and is {value}"
        for name, value in now.items()
        if header.get(name) != value
    ]


def require_same(
    recording: Recording, *, nodes: list[list[int]], strategy: str, layout: list[str]
) -> None:
    """The recording must be one of this run; RecordingError says what differs."""
    header = recording.header
    path = recording.path
    if header["nodes"] != nodes:
        raise RecordingError(
            f"{path} was recorded by the ranks {header['nodes']} on their nodes, now they are "
            f"{nodes}; replay with as many"
        )
    if header["strategy"] != strategy:
        raise RecordingError(
            f"{path} was recorded with the strategy {header['strategy']}, this run uses {strategy}"
        )
    for position, (recorded, mine) in enumerate(zip(header["layout"], layout, strict=False)):
        if recorded != mine:
            raise RecordingError(
                f"{path} was recorded with another model: entry {position} was '{recorded}', now "
                f"it is '{mine}'; build the same"
            )
    if len(header["layout"]) != len(layout):
        raise RecordingError(
            f"{path} was recorded with another model: it had {len(header['layout'])} tensors, now "
            f"there are {len(layout)}"
        )
    for change in changed_circumstances(header):
        log.warning("replay: %s; bits may differ for that reason", change)
