"""The shadow: the communication side's copy of the model, which exchanges average at once.

    base   the parameters x at the last step boundary
    delta  what exchanges have added since                     y = base + delta
    exchange (communication thread):   delta += w (v - a)      a, v: y and the peer's y of the pair
    boundary (compute thread):         x += delta;  base = x;  delta = 0

With u the local update since the last boundary, x = base + u, so a boundary is y <- y + u; x <- y.
Each happens under the lock, chunk by chunk, so a learner that is averaged ten times during one step
moves once per disagreement and never overshoots. `delta` is not zeroed: a chunk that is not dirty
is overwritten by the next exchange.

Parameters of lower precision than the shadow (bfloat16) keep what rounding cut off in `delta`: the
mean stays exact. Parameters on an accelerator reach the shadow through a relay, in two halves
(`relay.py`); between them what has landed is `frozen`, y = base + frozen + delta.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loosestep.codecs import Codec
from loosestep.core.gossip.gpu_relay import Relay
from loosestep.core.gossip.memory import (
    BASE,
    DELTA,
    ICED,
    LANDED,
    OLDEST,
    SPARE,
    WRITING,
    Fold,
    Landings,
    Memory,
    fill_table,
    make_table,
)
from loosestep.core.gossip.room import Room
from loosestep.record.format import RecordKind, pack, pack_boundary

Array = NDArray[Any]
Span = slice


class Shadow(Memory):
    """One flat vector over a list of tensors, in chunks."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        *,
        chunk_bytes: int = 1 << 20,
        relayed: bool | None = None,
        codec: Codec | None = None,
        apart: bool = False,
    ) -> None:
        """`codec`: how values are written that pairs exchange; nothing else is. `apart`: in memory
        that another process can see, its `room`.
        """
        if not params:
            raise ValueError("a shadow needs at least one parameter, got none")
        wide = any(p.dtype == torch.float64 for p in params)
        self.dtype = np.dtype("<f8" if wide else "<f4")
        self.sizes = [p.numel() for p in params]
        self.size = sum(self.sizes)
        self._boundary: _Boundary | None = None
        if relayed is None:
            relayed = len({p.device for p in params}) == 1 and params[0].device.type != "cpu"
        self.relay = Relay(self, params) if relayed else None
        self.room: Room | None = None
        per_chunk = max(1, chunk_bytes // self.dtype.itemsize)
        segments = _cut(self.sizes, per_chunk)
        self.per_chunk = per_chunk
        count = 3 if relayed else 2
        if apart:  # and two more, for the mean and the end
            self.room = Room(count + 2, len(segments), self.size, self.dtype)
            vectors = self.room.vectors[:count]
            table = fill_table(self.room.table)
            if self.relay is not None:
                self.relay.pin(vectors)
        else:
            vectors = [self._memory() for _ in range(count)]
            table = make_table(len(segments))
        lock = threading.Lock() if self.room is None else self.room.lock
        super().__init__(vectors, table, per_chunk=per_chunk, lock=lock, codec=codec)
        self._views = _Views(segments, torch.from_numpy(self._base), torch.from_numpy(self._delta))
        with self.lock:
            self._views.of(params).adopt_all()
        if relayed:
            self._views.forget()

    def _memory(self) -> Array:
        return np.empty(self.size, dtype=self.dtype) if self.relay is None else self.relay.memory()

    @property
    def age(self) -> int:
        """Steps since the oldest snapshot of what has landed and is not in the parameters yet."""
        waiting = self._rows[:, LANDED] > 0
        return self.steps - int(self._rows[waiting, OLDEST].min(initial=self.steps))

    def stale(self, chunks: Sequence[int] | None = None) -> list[int] | None:
        """Which of these chunks do not hold the parameters of this step; where they cannot cross
        alone, or of all: None for all, or none of them.
        """
        if self.busy or not self.unpublished:
            return []
        if chunks is None or len(chunks) == self.chunks or self.relay is not None:
            return None
        return sorted(chunk for chunk in chunks if self.published_at(chunk) < self.steps)

    @property
    def unpublished(self) -> int:
        """Steps since the one whose parameters the base holds."""
        return self.steps - self.published

    @property
    def waiting(self) -> list[int]:
        """The chunks in which something has landed that is not in the parameters yet."""
        found: list[int] = np.flatnonzero(self._rows[:, LANDED]).tolist()
        return found

    @property
    def busy(self) -> bool:
        """Whether a boundary now would have to wait for the last one."""
        return self.relay is not None and self.relay.busy()

    def when_published(self, task: Callable[[], None]) -> None:
        """Do something as soon as the parameters of the last boundary are here: at once, unless
        they are on their way.
        """
        if self.relay is None:
            task()
        else:
            self.relay.when_published(task)

    def boundary(self, params: Sequence[torch.Tensor]) -> Fold:
        """y += u;  x <- y. Through a relay it is begun, and skipped while the last one is under
        way.
        """
        if self.relay is None:
            return self.settle(params)
        if self.relay.busy():
            return Fold(skipped=True)
        return self.relay.boundary(params)

    def settle(self, params: Sequence[torch.Tensor], chunks: Sequence[int] | None = None) -> Fold:
        """y += u;  x <- y, complete when it returns: chunk by chunk, each under the lock. With
        `chunks` in these only: what the others hold is a little older, and the mean untouched all
        the same.
        """
        if self.relay is not None:
            return self.relay.settle(params)
        for chunk in self.open_boundary(params, chunks):
            self.cross(chunk)
        return self.close_boundary(params)

    def lift(self, copy: Sequence[torch.Tensor], *, step: int) -> Fold:
        """y += u with a copy of the parameters after some step, which becomes d = y - x: whoever
        adds d to the parameters, however much later, has them take part as if they had been folded
        then.
        """
        begun = time.perf_counter()
        views = self._views.of(copy)
        landed = Landings()
        for chunk, part in enumerate(self._chunks):
            with self.lock:
                self._require_whole()
                part.dirty = views.lift(chunk, part.dirty)
                landed.add(part.take())
        self.published = step
        return landed.fold(step, seconds=time.perf_counter() - begun)

    def freeze(self) -> tuple[Array, list[Span], Landings]:
        """The first half of a relay's boundary: what has landed belongs to the parameters from now
        on. The memory it is in, where in it, and what it is; the next exchanges write into the
        spare memory.
        """
        landed = Landings()
        with self.lock:
            self._require_whole()
            self._all[ICED] = self._all[DELTA]
            self._all[DELTA] = self._all[SPARE]
            for part in self._chunks:
                part.frozen = part.dirty
                part.dirty = False
                landed.add(part.take())
        return (
            self._frozen,
            _runs([slice(part.start, part.stop) for part in self._chunks if part.frozen]),
            landed,
        )

    def merge(self) -> None:
        """base += frozen, after which the frozen memory is free."""
        for part in self._chunks:
            if part.frozen:
                span = slice(part.start, part.stop)
                with self.lock:
                    self._base[span] += self._frozen[span]
                    part.frozen = False

    def renew(self, step: int) -> None:
        """The second half: the frozen memory now holds the parameters of this step and becomes
        the base.
        """
        with self.lock:
            self._all[SPARE] = self._all[BASE]
            self._all[BASE] = self._all[ICED]
            self.published = step

    def _require_whole(self) -> None:
        """Nothing is folded of a chunk that was being written when its writer died."""
        if self._all[WRITING]:
            raise ConnectionError("the communication process of this rank has ended")

    def open_boundary(
        self, params: Sequence[torch.Tensor], chunks: Sequence[int] | None = None
    ) -> list[int]:
        """The first part of a boundary: from here on its chunks, which are returned, are crossed,
        in any order.
        """
        whole = chunks is None
        crossing = list(range(self.chunks) if chunks is None else chunks)
        self._boundary = _Boundary(self._views.of(params), time.perf_counter(), crossing, whole)
        with self.lock:
            for chunk in crossing:
                self._chunks[chunk].ahead = True
            self._write(pack_boundary([] if whole else crossing))
        return crossing

    def cross(self, chunk: int) -> None:
        """y += u;  x <- y for one chunk, unless the boundary under way has passed it already or
        leaves it out.
        """
        part = self._chunks[chunk]
        boundary = self._boundary
        if boundary is None or not part.ahead:
            return
        with self.lock:
            self._require_whole()
            if part.dirty and boundary.views.plain:
                x, delta, base = boundary.views.at(chunk)
                torch._foreach_add_(x, delta)
                torch._foreach_copy_(base, x)
                part.dirty = False
            elif part.dirty:
                part.dirty = boundary.views.fold_rounded(chunk)
            else:
                boundary.views.adopt(chunk)
            part.ahead = False
            part.published = self.steps
            boundary.landed.add(part.take())

    def close_boundary(self, params: Sequence[torch.Tensor]) -> Fold:
        """The last part of a boundary: what is not crossed yet is, and the parameters are written
        back.
        """
        assert self._boundary is not None
        for chunk in self._boundary.chunks:
            self.cross(chunk)
        boundary = self._boundary
        self._boundary = None
        boundary.views.write_back(params)
        if boundary.whole:
            self.published = self.steps
        self.note(pack(RecordKind.LANDED))
        return boundary.landed.fold(self.steps, seconds=time.perf_counter() - boundary.begun)

    def assign(self, params: Sequence[torch.Tensor], flat: Array) -> None:
        """x <- flat and y <- flat: the parameters and the shadow become this vector."""
        if self.relay is not None:
            self.relay.forget()
        with self.lock:
            np.copyto(self._base, flat)
            for part in self._chunks:
                part.dirty = False
                part.take()
        unflatten(flat, params)


@dataclass(slots=True)
class _Boundary:
    """A boundary under way."""

    views: _Views
    begun: float
    chunks: list[int]
    whole: bool
    landed: Landings = field(default_factory=Landings)


class _Views:
    """Views of the parameters, the base and the delta, chunk by chunk, made again only when a
    tensor has moved.
    """

    def __init__(
        self, chunks: list[list[Segment]], base: torch.Tensor, delta: torch.Tensor
    ) -> None:
        self.plain = False  # parameters are of the base's type and on the host, too
        self._dtype = base.dtype
        self._chunks = chunks
        self._bases = [_flat_views(part, base) for part in chunks]
        self._deltas = [_flat_views(part, delta) for part in chunks]
        self._xs: list[list[torch.Tensor]] = []
        self._key: tuple[int, ...] = ()
        self._copies: list[tuple[int, torch.Tensor]] = []

    def of(self, params: Sequence[torch.Tensor]) -> _Views:
        key = tuple(p.data_ptr() for p in params)
        strided = not all(p.is_contiguous() for p in params)
        if key == self._key and not strided:
            return self
        flats = [p.detach().reshape(-1) for p in params]
        self._copies = [(i, flats[i]) for i, p in enumerate(params) if not p.is_contiguous()]
        self._xs = [[flats[t][a:b] for t, a, b, _ in part] for part in self._chunks]
        self._key = key
        self.plain = all(p.dtype == self._dtype and p.device.type == "cpu" for p in params)
        return self

    def forget(self) -> None:
        """Let go of the parameters, and of the copies of those that are not contiguous."""
        self._xs = []
        self._key = ()
        self._copies = []

    def adopt(self, chunk: int) -> None:
        torch._foreach_copy_(self._bases[chunk], self._xs[chunk])

    def adopt_all(self) -> None:
        for chunk in range(len(self._chunks)):
            self.adopt(chunk)

    def at(self, chunk: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The parts of x, delta and base."""
        return self._xs[chunk], self._deltas[chunk], self._bases[chunk]

    def fold_rounded(self, chunk: int) -> bool:
        """x += delta;  base = x, where x is of another type or elsewhere. Whether delta keeps
        something: what rounding cut off.
        """
        xs, deltas, bases = self.at(chunk)
        for x, base, delta in zip(xs, bases, deltas, strict=True):
            exact = x.to(base) + delta
            x.copy_(exact)
            base.copy_(x)
            torch.sub(exact, base, out=delta)  # stays for the next fold
        return any(x.dtype != base.dtype for x, base in zip(xs, bases, strict=True))

    def lift(self, chunk: int, dirty: bool) -> bool:
        """base = x + delta;  x = delta. Whether delta keeps something, as above."""
        xs = self._xs[chunk]
        bases = self._bases[chunk]
        deltas = self._deltas[chunk]
        torch._foreach_copy_(bases, xs)
        if not dirty:
            torch._foreach_zero_(xs)
            return False
        torch._foreach_copy_(xs, deltas)
        torch._foreach_add_(bases, xs)
        torch._foreach_sub_(deltas, xs)
        return any(x.dtype != base.dtype for x, base in zip(xs, bases, strict=True))

    def write_back(self, params: Sequence[torch.Tensor]) -> None:
        for index, flat in self._copies:
            params[index].detach().copy_(flat.view(params[index].shape))


def _flat_views(part: list[Segment], flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[start : start + b - a] for _, a, b, start in part]


def _runs(spans: list[slice]) -> list[slice]:
    """Neighbouring spans as one."""
    runs: list[slice] = []
    for span in spans:
        if runs and runs[-1].stop == span.start:
            span = slice(runs.pop().start, span.stop)
        runs.append(span)
    return runs


Segment = tuple[int, int, int, int]  # tensor, start in it, stop in it, start in the flat vector


def _cut(sizes: Sequence[int], per_chunk: int) -> list[list[Segment]]:
    """The segments of every chunk."""
    total = sum(sizes)
    chunks: list[list[Segment]] = [[] for _ in range(0, total, per_chunk)]
    offset = 0
    for tensor, size in enumerate(sizes):
        position = 0
        while position < size:
            chunk = (offset + position) // per_chunk
            stop = min((chunk + 1) * per_chunk, total)
            length = min(size - position, stop - offset - position)
            chunks[chunk].append((tensor, position, position + length, offset + position))
            position += length
        offset += size
    return chunks


def unflatten(flat: Array, params: Sequence[torch.Tensor]) -> None:
    """Write a flat vector into tensors."""
    source = torch.from_numpy(flat)
    offset = 0
    for p in params:
        p.detach().copy_(source[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
