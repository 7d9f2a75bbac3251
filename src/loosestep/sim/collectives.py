"""Communication between virtual ranks: the real `Collective`, on channels, threads and heartbeats
of a virtual clock.

Only what touches the outside is replaced: a channel's operations become meetings on a stage, whose
results are made of everybody's tensors in rank order as on real processes, and whose ends follow
from the links. What is built on top (rounds, joins, lanes, sums) is the same code, so results are
bit for bit those of real processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from loosestep.core.collectives.gloo import LITTLE, Channel, ordered_sum
from loosestep.core.collectives.ring import ring_sum
from loosestep.core.collectives.shared_memory import Slots, slot_bytes
from loosestep.core.contracts import Parcel
from loosestep.core.errors import CommError, LostPeer
from loosestep.core.messages.heartbeat import Pulse
from loosestep.core.pending import Pending, nothing
from loosestep.core.thread import CommThread
from loosestep.sim.clock import Gate, Strand, VirtualClock
from loosestep.sim.links import Flow, Links, Pattern

T = TypeVar("T")
Tensors = list[torch.Tensor]


class Meetings:
    """Where ranks leave something for each other and go on when everybody has, and the links
    have carried it.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._open: dict[Any, tuple[dict[int, Any], Gate, list[Any]]] = {}

    def meet(
        self,
        key: Any,
        index: int,
        *,
        size: int,
        value: Any,
        combine: Callable[[list[Any]], Any],
        ends: Callable[[float], float],
        pulse: VirtualPulse | None,
        timeout: float | None = None,
    ) -> Any:
        """What `combine` makes of everybody's values, once; None when somebody has not come
        within `timeout`.
        """
        values, gate, result = self._open.setdefault(key, ({}, Gate(self.clock), []))
        values[index] = value
        if len(values) == size:
            del self._open[key]
            result.append(combine([values[i] for i in range(size)]))
            gate.open_at(ends(self.clock.now))
        why = f"{size - len(values)} of {size} ranks at {key}"
        if pulse is None:
            opened = gate.wait(timeout, why=why)
        else:
            opened = pulse.watch(gate, why=why)
        return result[0] if opened else None

    def missing(self, key: Any, size: int) -> list[int]:
        """Who has not come."""
        values = self._open[key][0] if key in self._open else {}
        return [index for index in range(size) if index not in values]


class VirtualPulse(Pulse):
    """Who is lost, as heartbeats would tell: a fault is heard an interval after it was said, a
    death four after it.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rank: int,
        *,
        world: dict[int, VirtualPulse],
        deadline: float,
        names: Sequence[int],
    ) -> None:
        self.rank = rank
        self.deadline = deadline
        self.names = names
        self.interval = min(1.0, deadline / 10)
        self.step = 0
        self.fault: CommError | None = None
        self.left = False
        self._asked: dict[int, tuple[int, int]] = {}
        self._clock = clock
        self._peers = world
        self._watching: list[Strand] = []
        world[rank] = self

    def check(self) -> None:
        """Raise if somebody is gone."""
        if self.fault is not None:
            raise self.fault

    def watch(self, gate: Gate, *, why: str) -> bool:
        """Wait for a gate; raise if somebody is lost before it opens."""
        self.check()
        strand = self._clock.current
        self._watching.append(strand)
        try:
            while not gate.wait(why=why):
                self.check()
        finally:
            self._watching.remove(strand)
        return True

    def ask(self, number: int, step: int) -> None:
        """Heard at once."""
        for peer in self._peers.values():
            peer._asked[self.rank] = number, step

    def stop_asking(self) -> None:
        """It has come."""
        for peer in self._peers.values():
            peer._asked.pop(self.rank, None)

    def hurt(self, fault: CommError) -> None:
        """The run cannot go on; the first reason counts."""
        self.fault = self.fault or fault

    def accuse(self, rank: int, reason: str) -> None:
        """Somebody is lost."""
        if self.fault is None and not self.left:
            self.fault = LostPeer(rank, reason)
            for strand in self._watching:
                self._clock.wake(strand)

    def leave(self) -> None:
        """Nobody misses this rank from now on."""
        self.left = True

    def fail(self, reason: str, culprit: int | None = None) -> None:
        """Tell the others why this rank ends."""
        if not self.left:
            self.left = True
            self._tell(
                self.names[self.rank] if culprit is None else culprit, reason, after=self.interval
            )

    def die(self) -> None:
        """Killed: the others find out by themselves."""
        if not self.left:
            self.left = True
            lost = self._lost(self.rank, f"no heartbeat, last seen at step {self.step}")
            self._tell(lost.rank, str(lost), after=min(self.deadline, 4 * self.interval))

    def _tell(self, culprit: int, reason: str, *, after: float) -> None:
        for peer in self._peers.values():
            self._clock.call(self._clock.now + after, partial(peer.accuse, culprit, reason))


class VirtualResult(Pending[T]):
    """A result that arrives on the virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._gate = Gate(clock)

    def wait(self, timeout: float | None = None) -> T:
        """Wait in virtual time."""
        if not self._gate.wait(timeout, why="a result"):
            raise TimeoutError(f"nothing arrived within {timeout} s")
        return super().wait(0)

    def fulfil(self, value: T) -> None:
        """Deliver the result."""
        super().fulfil(value)
        self._gate.open()

    def fail(self, error: BaseException) -> None:
        """Deliver an error."""
        super().fail(error)
        self._gate.open()


class VirtualStream(CommThread):
    """A communication thread that is a strand, started when it gets its first task."""

    def __init__(self, clock: VirtualClock, rank: int, name: str) -> None:
        self._clock = clock
        self._rank = rank
        self._name = name
        self._queued: deque[tuple[Callable[[], Any], Pending[Any]]] = deque()
        self._error: BaseException | None = None
        self._last: Pending[Any] | None = None
        self._closed = False
        self._strand: Strand | None = None
        self._news = Gate(clock)
        self._over = Gate(clock)

    def submit(self, task: Callable[[], T]) -> Pending[T]:
        """Queue a task."""
        pending: Pending[T] = VirtualResult(self._clock)
        if self._closed:
            pending.fail(CommError("the run has ended; attach the model again to communicate"))
            return pending
        self._last = pending
        self._queued.append((task, pending))
        if self._strand is None:
            name = f"{self._name} of rank {self._rank}"
            self._strand = self._clock.spawn(
                self._live, name=name, rank=self._rank, at=self._clock.now
            )
        self._news.open()
        return pending

    def run(self, task: Callable[[], T]) -> T:
        """Do a task and wait for it; from the strand itself, at once."""
        return task() if self._clock.current is self._strand else self.submit(task).wait()

    def close(self, timeout: float) -> bool:
        """Finish what is queued and end."""
        self._closed = True
        self._last = None
        self._news.open()
        return (
            self._strand is None
            or self._strand.ended
            or self._over.wait(timeout, why="a stream's end")
        )

    def _live(self) -> None:
        while self._queued or not self._closed:
            if not self._queued:
                self._news = Gate(self._clock)
                self._news.wait(why="a task")
                continue
            task, pending = self._queued.popleft()
            try:
                if self._error is not None:
                    raise self._error
                value = task()
            except Exception as error:  # noqa: BLE001  delivered to whoever waits
                self._error = error
                pending.fail(error)
            else:
                pending.fulfil(value)
        self._over.open()


class _Capacity(Slots):
    """What shared memory would hold."""

    def __init__(self, size: int) -> None:
        self.capacity = slot_bytes(size)


class VirtualChannel(Channel):
    """A group of virtual ranks. Large means are made once and shared: whoever gets one only
    reads it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        key: Any,
        nodes: Sequence[int],
        home: Sequence[int],
        meetings: Meetings,
        links: Links,
        pulse: VirtualPulse | None,
    ) -> None:
        super().__init__(ranks, rank, name="", store=None, pulse=None, nodes=nodes)
        self._key = key
        self._count_of_meetings = 0
        self._meetings = meetings
        self._links = links
        self._virtual_pulse = pulse
        self._home = [home[r] for r in ranks]
        self._flows: dict[Pattern, Flow] = {}
        if self.size > 1 and self._strangers == 0:
            self._slots = _Capacity(self.size)

    def mean(
        self, values: torch.Tensor, weights: Sequence[int] | None, divisor: int
    ) -> torch.Tensor:
        """As on real processes, with one meeting for the all-to-all and the all-gather."""
        if self.size == 1:
            return super().mean(values, weights, divisor)
        size = values.numel() * values.element_size()
        chunk = values.view(self.size, -1)[0]
        self._count(chunk, self.size - 1, between=self._strangers)
        self._count(chunk, self.size - 1, between=self._right_is_stranger * (self.size - 1))
        steps: list[tuple[Pattern, float]] = [("swap", size), ("ring", size / self.size)]
        mean: torch.Tensor = self._meet(
            values, lambda all_: ordered_sum(all_, weights).div_(divisor).to(values.dtype), *steps
        )
        return mean

    def sum(self, values: torch.Tensor) -> None:
        """In place, in the order in which the backend of real processes adds up."""
        if self.size > 1:
            self._count_sum(values)
            values.copy_(
                self._meet(values, ring_sum, ("sum", values.numel() * values.element_size()))
            )

    def begin_sum(self, values: torch.Tensor) -> Callable[[], None]:
        """At once."""
        self.sum(values)
        return nothing

    def follows_ring(self, sizes: Iterable[tuple[int, torch.dtype]]) -> bool:
        """By construction."""
        return True

    def through_memory(self, parcel: Parcel, divisor: int) -> None:
        """Packed, met, unpacked."""
        mine = torch.empty_like(parcel.flat)
        parcel.pack(mine)
        self._count(mine, 1, between=0)
        parcel.unpack(
            self._meet(mine, list, ("memory", mine.numel() * mine.element_size())), divisor
        )

    def _put(self, values: torch.Tensor) -> Tensors:
        self._count(values, 1, between=0)
        shown: Tensors = self._meet(
            values,
            lambda all_: [v.clone() for v in all_],
            ("memory", values.numel() * values.element_size()),
        )
        return shown

    def tell(self, *numbers: float) -> list[tuple[float, ...]]:
        """Everybody's few numbers; inside a node they ride on a meeting."""
        if self._slots is None:
            return super().tell(*numbers)
        told: list[tuple[float, ...]] = self._meet(numbers, list, ("memory", 8 * len(numbers)))
        return told

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked in rank order."""
        if self.size == 1:
            return super().gather(mine)
        if mine.numel() * mine.element_size() <= LITTLE:
            return self.swap(torch.stack([mine] * self.size))
        self._count(mine, self.size - 1, between=self._right_is_stranger * (self.size - 1))
        stacked: torch.Tensor = self._meet(
            mine, torch.stack, ("ring", mine.numel() * mine.element_size())
        )
        return stacked

    def swap(self, chunks: torch.Tensor) -> torch.Tensor:
        """All-to-all: row j goes to rank j."""
        if self.size == 1:
            return super().swap(chunks)
        self._count(chunks[0], self.size - 1, between=self._strangers)
        stacked: torch.Tensor = self._meet(
            chunks, torch.stack, ("swap", chunks.numel() * chunks.element_size())
        )
        return stacked[:, self.index]

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of the rank at position `root`."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self.index == root:
            self._count(tensor, self.size - 1, between=self._strangers)
        size = tensor.numel() * tensor.element_size()
        value = self._meet(tensor, lambda all_: all_[root].clone(), ("tree", size))
        if self.index != root:
            tensor.copy_(value)

    def close(self) -> None:
        """Nothing to release."""
        self._slots = None

    def abandon(self) -> None:
        """Nothing to release."""
        self._slots = None

    def _meet(
        self, value: Any, combine: Callable[[list[Any]], Any], *steps: tuple[Pattern, float]
    ) -> Any:
        self._count_of_meetings += 1

        def ends(now: float) -> float:
            for pattern, size in steps:
                if pattern not in self._flows:
                    self._flows[pattern] = self._links.flow(self._home, pattern)
                now = self._links.collective(now, self._flows[pattern], size)
            return now

        return self._meetings.meet(
            (*self._key, self._count_of_meetings),
            self.index,
            size=self.size,
            value=value,
            combine=combine,
            ends=ends,
            pulse=self._virtual_pulse,
        )
