"""A group of ranks on torch.distributed, its sums in known order, its waits watched by heartbeats.

Plain vectors are summed by gloo's own all-reduce, in the order of its ring (`ring.py`), once that
has been seen to be so. What gloo would round at every rank, and sums of a backend whose order is
not known, are made of an all-to-all of chunks, a sum of each chunk in rank order and an all-gather:
twice the price. Either way a result depends on nothing except the values, so that a simulator can
reproduce it bit for bit.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroupGloo,
)

from loosestep.core.collectives.ring import WIDE, OrderCheck
from loosestep.core.collectives.shared_memory import Slots, forget, open_slots
from loosestep.core.contracts import Parcel
from loosestep.core.errors import CommError
from loosestep.core.messages.heartbeat import Pulse
from loosestep.core.messages.sealed_store import SealedStore
from loosestep.core.pending import nothing

SLICE = timedelta(milliseconds=250)  # how often a wait looks at the heartbeats
LITTLE = 1 << 12  # bytes: below, one hop of many messages is quicker than a ring of hops
SMALL = 1 << 14  # elements: below, memory is simply allocated
PATIENCE = timedelta(days=365)  # gloo's own time-out never fires: the heartbeats decide


class Channel:
    """Blocking operations among `ranks`; a communication thread calls them, one at a time."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        name: str,
        store: SealedStore | None,
        pulse: Pulse | None,
        nodes: Sequence[int],
        devices: Sequence[ProcessGroupGloo.Device] = (),
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        self.bytes_sent = 0
        self.bytes_between_nodes = 0
        here = nodes[self.index]
        self._strangers = sum(node != here for node in nodes)  # members on other nodes
        self._right_is_stranger = nodes[(self.index + 1) % self.size] != here
        self._pulse = pulse
        self._rings = False
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._slots: Slots | None = None
        self._group: Any = None  # a ProcessGroupGloo, whose operations torch's stubs do not know
        if self.size > 1 and pulse is not None and store is not None:
            members = store.within(f"{name}/{'-'.join(map(str, self.ranks))}")
            try:
                self._group = open_group(
                    members, self.index, self.size, devices=devices, timeout=pulse.deadline
                )
            except RuntimeError as error:
                raise pulse.blame(error) from error
            if self._strangers == 0:
                self._slots = self._open_slots(members)

    def mean(
        self, values: torch.Tensor, weights: Sequence[int] | None, divisor: int
    ) -> torch.Tensor:
        """`sum_j weights[j] values_j / divisor`, summed in rank order, the same bits on every rank.

        What is returned is scratch memory: use it before the next operation. The length must divide
        by the size.
        """
        parts = self.swap(values.view(self.size, -1))
        mine = ordered_sum(parts.unbind(0), weights).div_(divisor).to(values.dtype)
        return self.gather(mine).view(-1)

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether the backend's own sum of such numbers has an order that is known; that of two
        numbers is always.
        """
        return (self._rings or self.size == 2) and dtype in WIDE

    def sum(self, values: torch.Tensor) -> None:
        """Overwrite `values` with their sum over all ranks, made by the backend."""
        self.begin_sum(values)()

    def begin_sum(self, values: torch.Tensor) -> Callable[[], None]:
        """Begin to; what is returned waits for the end. Sums end in the order in which they began."""
        if self._group is None:
            return nothing
        options = AllreduceOptions()
        options.timeout = PATIENCE
        work = self._group.allreduce([values], options)
        self._count_sum(values)
        return partial(self._finish, work)

    def add_up(self, values: torch.Tensor, divisor: int) -> int:
        """Overwrite `values` with their sum over all ranks; what it is still to be divided by. A
        sum that would be rounded on its way is divided before.
        """
        if self.sums(values.dtype):
            self.sum(values)
            return divisor
        values.copy_(self.mean(values, None, divisor))
        return 1

    def scratch(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory that stays, of the shape of `like`, for a sum; the same until the next one is
        asked for.
        """
        return self._keep("sum", like.numel(), dtype or like.dtype, like.device).view(like.shape)

    def memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The same on the host, for so many numbers."""
        return self._keep("sum", size, dtype, torch.device("cpu"))

    def follows_ring(self, sizes: Iterable[tuple[int, torch.dtype]]) -> bool:
        """Whether the backend sums vectors of such lengths in the order of the ring: tried on
        numbers that all ranks know.
        """
        follows = True
        for length, dtype in sizes:
            check = OrderCheck(self.size, dtype)
            values = check.values(self.index, length)
            self.sum(values)
            follows = follows and check.holds(values)
        return follows

    def rely_on_ring(self) -> None:
        """From now on the backend's own sums are used."""
        self._rings = True

    def fits(self, flat: torch.Tensor) -> bool:
        """Whether a tensor can be averaged in shared memory at one go."""
        return (
            self._slots is not None and flat.numel() * flat.element_size() <= self._slots.capacity
        )

    def through_memory(self, parcel: Parcel, divisor: int) -> None:
        """Pack into shared memory, meet, unpack the sum from there: no copy in between."""
        assert self._slots is not None
        assert self._pulse is not None
        like = parcel.flat
        parcel.pack(self._slots.next(like))
        self._slots.meeting.meet(self._pulse)
        parcel.unpack([self._slots.read(rank, like) for rank in range(self.size)], divisor)
        self._count(like, 1, between=0)

    def total(self, flat: torch.Tensor, lanes: int) -> None:
        """Overwrite `flat` with its sum over all ranks."""
        if self._slots is not None:
            for piece in self._slots.pieces(flat):
                everybody = self._put(piece)
                if self.size == 2 and piece.dtype in WIDE:
                    torch.add(everybody[0], everybody[1], out=piece)
                else:
                    piece.copy_(ordered_sum(everybody))
        elif self.sums(flat.dtype):
            self.sum(flat)
        elif self._group is not None or self.size > 1:
            shards = flat.view(lanes, -1)
            shards[self.row(lanes)] = self.part(flat, lanes)
            self.share(shards)

    def row(self, lanes: int) -> int:
        """The lane that this rank works on; beyond the last one, that."""
        return min(self.index, lanes - 1)

    def part(self, flat: torch.Tensor, lanes: int) -> torch.Tensor:
        """The sum over all ranks of the part of `flat` that belongs to this rank's lane."""
        chunks = flat.view(lanes, -1)
        mine = self.row(lanes)
        if self._slots is None:
            if self.size > lanes:
                chunks = torch.cat([chunks, chunks.new_zeros(self.size - lanes, chunks.shape[1])])
            return ordered_sum(self.swap(chunks).unbind(0))
        out = torch.empty_like(chunks[mine])
        width = max(self._slots.capacity // flat.element_size() // lanes, 1)
        for begin in range(0, chunks.shape[1], width):
            columns = chunks[:, begin : begin + width]
            everybody = self._put(columns.reshape(-1))
            piece = ordered_sum([other.view(lanes, -1)[mine] for other in everybody])
            out[begin : begin + width] = piece
        return out

    def share(self, shards: torch.Tensor) -> None:
        """Fill in the other lanes' rows; the row of this rank's lane is there. Ranks beyond the
        last lane only receive.
        """
        lanes = len(shards)
        mine = self.row(lanes)
        if self._slots is None:
            shards.copy_(self.gather(shards[mine].contiguous())[:lanes])
            return
        for columns in shards.split(self._slots.capacity // shards.element_size(), 1):
            everybody = self._put(columns[mine])
            for lane in range(lanes):
                if lane != self.index:
                    columns[lane] = everybody[lane]

    def _put(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Show values to the other ranks of the node and see theirs, through shared memory."""
        assert self._slots is not None
        assert self._pulse is not None
        self._slots.next(values).copy_(values)
        self._slots.meeting.meet(self._pulse)
        self._count(values, 1, between=0)
        return [self._slots.read(rank, values) for rank in range(self.size)]

    def tell(self, *numbers: float) -> list[tuple[float, ...]]:
        """Everybody's few numbers, in rank order."""
        if self._slots is None or self._pulse is None:
            return [
                tuple(row)
                for row in self.gather(torch.tensor(numbers, dtype=torch.float64)).tolist()
            ]
        form = struct.Struct(f"<{len(numbers)}d")
        return [
            form.unpack(note) for note in self._slots.meeting.meet(self._pulse, form.pack(*numbers))
        ]

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked in rank order (in scratch memory, if it is large)."""
        out = self._take("gather", mine, rows=self.size)
        if self._group is None:
            out[0] = mine
            return out
        if mine.numel() * mine.element_size() <= LITTLE:
            return self.swap(torch.stack([mine] * self.size))
        options = AllgatherOptions()
        options.timeout = PATIENCE
        self._finish(self._group._allgather_base(out.view(-1), mine.reshape(-1), options))
        self._count(mine, self.size - 1, between=self._right_is_stranger * (self.size - 1))
        return out

    def swap(self, chunks: torch.Tensor) -> torch.Tensor:
        """All-to-all: row j goes to rank j; row j of the result came from rank j."""
        if self._group is None:
            return chunks.clone()
        out = self._take("swap", chunks)
        options = AllToAllOptions()
        options.timeout = PATIENCE
        self._finish(self._group.alltoall_base(out.view(-1), chunks.reshape(-1), [], [], options))
        self._count(chunks[0], self.size - 1, between=self._strangers)
        return out

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of the rank at position `root`."""
        if self._group is None or tensor.numel() == 0:
            return
        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = PATIENCE
        self._finish(self._group.broadcast([tensor], options))
        if self.index == root:
            self._count(tensor, self.size - 1, between=self._strangers)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What fails inside is blamed on who caused it."""
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            raise (
                CommError(str(error)) if self._pulse is None else self._pulse.blame(error)
            ) from error

    def abandon(self) -> None:
        """Leave with an operation in flight: gloo cannot cancel it, so keep the group alive
        rather than wait for it.
        """
        if self._slots is not None:
            self._slots.meeting.close()
            self._slots = None
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self._group = None
        else:
            self._scratch.clear()  # nobody else writes into it

    def close(self) -> None:
        """Release the group, its connections and memory; nothing is in flight."""
        if self._slots is not None:
            self._slots.meeting.close()
        self._group = self._slots = None
        self._scratch.clear()

    def _open_slots(self, store: SealedStore) -> Slots | None:
        """Shared memory, if every rank of the group can have it."""
        slots = open_slots(store, index=self.index, size=self.size)
        agreed = self._agreed(slots is not None)
        if slots is not None and agreed:
            agreed = self._agreed(slots.meeting.reach())
        forget(store, self.index)
        if slots is not None and not agreed:
            slots.meeting.close()
        return slots if agreed else None

    def _agreed(self, mine: bool) -> bool:
        """Whether all ranks say so."""
        return bool(self.gather(torch.tensor([int(mine)])).all())

    def _take(self, use: str, like: torch.Tensor, *, rows: int = 0) -> torch.Tensor:
        """Memory of the shape of `like`, or of so many of it."""
        shape = (rows, *like.shape) if rows else like.shape
        return self._keep(use, max(rows, 1) * like.numel(), like.dtype, like.device).view(shape)

    def _keep(self, use: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for so many numbers; large pieces are kept, fresh ones cost page faults."""
        if size < SMALL:
            return torch.empty(size, dtype=dtype, device=device)
        kept = self._scratch.get((use, dtype))
        if kept is None or kept.numel() < size:
            kept = self._scratch[use, dtype] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size]

    def _finish(self, work: dist.Work) -> None:
        assert self._pulse is not None
        while not work.is_completed():
            try:
                work.wait(SLICE)
            except RuntimeError:
                if not work.is_completed():
                    self._pulse.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._pulse.blame(error) from error

    def _count_sum(self, values: torch.Tensor) -> None:
        parts = values.numel() * values.element_size() * 2 * (self.size - 1) // self.size
        self.bytes_sent += parts
        self.bytes_between_nodes += parts * self._right_is_stranger

    def _count(self, tensor: torch.Tensor, times: int, *, between: int) -> None:
        size = tensor.numel() * tensor.element_size()
        self.bytes_sent += size * times
        self.bytes_between_nodes += size * between


def open_devices() -> list[ProcessGroupGloo.Device]:
    """Gloo's way into the network: those interfaces that the user names, as torch does it.

    Each has a thread that wakes up a hundred times a second, so the groups of a run share them.
    """
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in named] or [
        ProcessGroupGloo.create_default_device()
    ]


def open_group(
    store: dist.Store,
    index: int,
    size: int,
    *,
    devices: Sequence[ProcessGroupGloo.Device],
    timeout: float,
) -> ProcessGroupGloo:
    """A group of gloo that is nobody's default group."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._devices = list(devices)
    options._threads = 2 * len(devices)
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupGloo(store, index, size, options)


def ordered_sum(
    parts: Sequence[torch.Tensor], weights: Sequence[int] | None = None
) -> torch.Tensor:
    """`sum_j weights[j] * parts[j]`, taken in order; halves are summed in float32."""
    first, *rest = parts
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
    total = first.to(wide, copy=True)
    if weights is None:
        for part in rest:
            total.add_(part)
        return total
    total.mul_(weights[0])
    for part, weight in zip(rest, weights[1:], strict=True):
        total.add_(part, alpha=weight)
    return total
