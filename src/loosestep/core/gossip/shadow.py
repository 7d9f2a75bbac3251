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

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loosestep.codecs import Codec
from loosestep.core.gossip.exchange import Moved, NotFiniteError
from loosestep.core.gossip.gpu_relay import Relay
from loosestep.core.messages.frames import HEADER_BYTES
from loosestep.core.messages.slots import Buffer, EdgeSlots
from loosestep.record.format import Kind, pack, pack_boundary

Array = NDArray[Any]
Span = slice

SAMPLE_STRIDE = 16  # every 16th number of a difference is enough for the consensus distance


@dataclass(slots=True)
class Fold:
    """What a step boundary did. `staleness_*` count the steps between the snapshot of an
    exchange and its fold.
    """

    chunks: int = 0  # chunk exchanges that landed
    staleness_mean: float = 0.0
    staleness_max: int = 0
    seconds: float = 0.0
    # folding would have cost too large a share of the time: it comes with a later step
    skipped: bool = False


@dataclass(slots=True)
class Landings:
    """Chunk exchanges that have landed: how many, and after which steps their snapshots were
    taken, summed and lowest.
    """

    chunks: int = 0
    total: int = 0
    oldest: int = 0

    def add(self, other: Landings) -> None:
        """More have landed."""
        if other.chunks:
            self.oldest = min(self.oldest, other.oldest) if self.chunks else other.oldest
            self.chunks = self.chunks + other.chunks
            self.total = self.total + other.total

    def fold(self, step: int, *, seconds: float) -> Fold:
        """They are in the parameters after this step."""
        if not self.chunks:
            return Fold(seconds=seconds)
        mean = step - self.total / self.chunks
        return Fold(
            self.chunks, staleness_mean=mean, staleness_max=step - self.oldest, seconds=seconds
        )


@dataclass(slots=True)
class _Chunk:
    start: int
    stop: int
    # tensor, start in it, stop in it, start in the flat vector
    segments: list[tuple[int, int, int, int]]
    dirty: bool = False  # delta holds something
    frozen: bool = False  # so does what a relay has taken
    ahead: bool = False  # a boundary under way has not passed this chunk yet
    published: int = 0  # the step after which it was last crossed in a boundary of some chunks
    landed: Landings = field(default_factory=Landings)

    def take(self) -> Landings:
        """What has landed since the last time."""
        landed = self.landed
        self.landed = Landings()
        return landed


class Writer(Protocol):
    """Where a shadow writes down what happens to it."""

    def write(self, body: bytes, behind: bool = False) -> None: ...


class Shadow:
    """One flat vector over a list of tensors, in chunks. With a `tape`, every `note` is written
    to it under the lock.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        *,
        chunk_bytes: int = 1 << 20,
        relayed: bool | None = None,
        codec: Codec | None = None,
    ) -> None:
        """`codec`: how values are written that pairs exchange; nothing else is."""
        if not params:
            raise ValueError("a shadow needs at least one parameter, got none")
        wide = any(p.dtype == torch.float64 for p in params)
        self.dtype: np.dtype[Any] = np.dtype("<f8" if wide else "<f4")
        self.sizes = [p.numel() for p in params]
        self.size = sum(self.sizes)
        self.lock = threading.Lock()
        # that the learner has made, folded or not; whoever calls `boundary` counts them
        self.steps = 0
        self.published = 0  # the step whose parameters the base holds, or newer ones in some chunks
        self.tape: Writer | None = None
        self._boundary: _Boundary | None = None
        if relayed is None:
            relayed = len({p.device for p in params}) == 1 and params[0].device.type != "cpu"
        self.relay = Relay(self, params) if relayed else None
        self._base = self._memory()
        self._delta = self._memory()
        self._frozen = self._delta
        self._spare = self._memory() if relayed else self._base
        per_chunk = max(1, chunk_bytes // self.dtype.itemsize)
        self._chunks = _cut(self.sizes, per_chunk)
        self._difference = np.empty(min(per_chunk, self.size), dtype=self.dtype)
        self._whole = min(per_chunk, self.size) * self.dtype.itemsize
        self._codec = codec
        # Of whole chunks, and of their codes.
        self._free: dict[int, list[Buffer]] = {self._whole: [], self.offer_bytes(0): []}
        scratch = len(self._difference) if codec is not None else 0
        self._own = np.empty(scratch, dtype=self.dtype)
        self._theirs = np.empty(scratch, dtype=self.dtype)
        self._views = _Views(
            self._chunks, torch.from_numpy(self._base), torch.from_numpy(self._delta)
        )
        with self.lock:
            self._views.of(params).adopt_all()
        if relayed:
            self._views.forget()

    def _memory(self) -> Array:
        return np.empty(self.size, dtype=self.dtype) if self.relay is None else self.relay.memory()

    @property
    def chunks(self) -> int:
        return len(self._chunks)

    @property
    def largest_chunk_bytes(self) -> int:
        return self._whole

    def published_at(self, chunk: int) -> int:
        """The step whose parameters the base holds in a chunk."""
        return max(self.published, self._chunks[chunk].published)

    def length(self, chunk: int) -> int:
        return self._chunks[chunk].stop - self._chunks[chunk].start

    def read(self, chunk: int, note: bytes = b"", slots: EdgeSlots | None = None) -> Buffer:
        """A copy of y[chunk]; in a slot, where one is free."""
        length = self.length(chunk)
        buffer = (slots.take(length) if slots is not None else None) or self._take(length)
        self._copy(chunk, buffer.value, note)
        return buffer

    def _copy(self, chunk: int, out: Array, note: bytes) -> None:
        part = self._chunks[chunk]
        with self.lock:
            self._into(part, out)
            self._write(note, part.ahead)

    def offer(self, chunk: int, note: bytes = b"", slots: EdgeSlots | None = None) -> Buffer:
        """What this rank sends of y[chunk] for a pair: a copy, or its code."""
        if self._codec is None:
            return self.read(chunk, note, slots)
        value = self._own[: self.length(chunk)]
        self._copy(chunk, value, note)
        size = self.offer_bytes(chunk)
        buffer = (slots.take(size) if slots is not None else None) or self._take_bytes(size)
        self._codec.encode(_row(value), _row(buffer.value))
        return buffer

    def meet(
        self,
        chunk: int,
        weight: float,
        *,
        mine: Array,
        theirs: Array,
        snapshot: int,
        note: bytes = b"",
    ) -> Moved:
        """`move` by what two ends have offered: each uses its own value as it was sent, so that
        they add and subtract the same and the mean stays, however coarse the codec.
        """
        if self._codec is not None:
            length = self.length(chunk)
            mine = self._decode(mine, self._own[:length])
            theirs = self._decode(theirs, self._theirs[:length])
        return self.move(chunk, weight, mine=mine, theirs=theirs, snapshot=snapshot, note=note)

    def _decode(self, codes: Array, out: Array) -> Array:
        assert self._codec is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that memory of a peer is read-only, which is all
            self._codec.decode(_row(codes), _row(out))
        return out

    @property
    def offer_dtype(self) -> np.dtype[Any]:
        """Of what is offered: a code is bytes."""
        return self.dtype if self._codec is None else np.dtype(np.uint8)

    def offer_bytes(self, chunk: int) -> int:
        """How many bytes an offer has."""
        length = self.length(chunk)
        return length * self.dtype.itemsize if self._codec is None else self._codec.size(length)

    def note(self, note: bytes) -> None:
        """Write down something that concerns no chunk."""
        with self.lock:
            self._write(note)

    def _write(self, note: bytes, behind: bool = False) -> None:
        if self.tape is not None and note:
            self.tape.write(note, behind)

    def read_into(self, chunk: int, out: Array) -> None:
        """out[chunk] <- y[chunk] in a flat vector."""
        part = self._chunks[chunk]
        with self.lock:
            self._into(part, out[part.start : part.stop])

    def store(self, chunk: int, value: Array, out: Array) -> None:
        """out[chunk] <- value in a flat vector."""
        part = self._chunks[chunk]
        out[part.start : part.stop] = value

    def slice(self, chunk: int, flat: Array) -> Array:
        part = self._chunks[chunk]
        return flat[part.start : part.stop]

    def _into(self, part: _Chunk, out: Array) -> None:
        span = slice(part.start, part.stop)
        y = self._base[span]
        # of a model that has diverged: its peers refuse it
        with np.errstate(over="ignore", invalid="ignore"):
            if part.frozen:
                y = np.add(y, self._frozen[span], out=out)
            if part.dirty:
                y = np.add(y, self._delta[span], out=out)
        if y is not out:
            np.copyto(out, y)

    def move(
        self,
        chunk: int,
        weight: float,
        *,
        mine: Array,
        theirs: Array,
        snapshot: int,
        note: bytes = b"",
    ) -> Moved:
        """delta[chunk] += weight (theirs - mine); refused as a whole when `theirs` is not
        finite.
        """
        part = self._chunks[chunk]
        difference = self._difference[: part.stop - part.start]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(theirs, mine, out=difference)
            total = float(difference.sum())
            # A finite sum proves every number finite; one that is not may be an overflow, so look
            # again.
            if not math.isfinite(total) and not np.isfinite(theirs).all():
                raise NotFiniteError(f"chunk {chunk} holds NaN or Inf")
            sample = difference[::SAMPLE_STRIDE]
            square = float(np.einsum("i,i->", sample, sample)) / max(1, len(sample))
        with self.lock:
            self._add(part, difference, weight)
            part.landed.add(Landings(1, snapshot, snapshot))
            self._write(note, part.ahead)
        return Moved(weight * total, square)

    def _add(self, part: _Chunk, difference: Array, weight: float) -> None:
        """delta += weight difference, which is overwritten."""
        target = self._delta[part.start : part.stop]
        with np.errstate(over="ignore", invalid="ignore"):
            if part.dirty:
                difference *= weight
                target += difference
            else:
                # the first since the boundary: no need to zero before
                np.multiply(difference, weight, out=target)
                part.dirty = True

    @property
    def age(self) -> int:
        """Steps since the oldest snapshot of what has landed and is not in the parameters yet."""
        return self.steps - min(
            (part.landed.oldest for part in self._chunks if part.landed.chunks), default=self.steps
        )

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
        return [chunk for chunk, part in enumerate(self._chunks) if part.landed.chunks]

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
        self.open_boundary(params, chunks)
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
            self._frozen = self._delta
            self._delta = self._spare
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
            self._spare = self._base
            self._base = self._frozen
            self.published = step

    def open_boundary(
        self, params: Sequence[torch.Tensor], chunks: Sequence[int] | None = None
    ) -> None:
        """The first part of a boundary: from here on its chunks are crossed, in any order."""
        whole = chunks is None
        crossing = list(range(self.chunks) if chunks is None else chunks)
        self._boundary = _Boundary(self._views.of(params), time.perf_counter(), crossing, whole)
        with self.lock:
            for chunk in crossing:
                self._chunks[chunk].ahead = True
            self._write(pack_boundary([] if whole else crossing))

    def cross(self, chunk: int) -> None:
        """y += u;  x <- y for one chunk, unless the boundary under way has passed it already or
        leaves it out.
        """
        part = self._chunks[chunk]
        boundary = self._boundary
        if boundary is None or not part.ahead:
            return
        with self.lock:
            if part.dirty:
                part.dirty = boundary.views.fold(chunk)
            else:
                boundary.views.adopt(chunk)
            part.ahead, part.published = False, self.steps
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
        self.note(pack(Kind.LANDED))
        return boundary.landed.fold(self.steps, seconds=time.perf_counter() - boundary.begun)

    def assign(self, params: Sequence[torch.Tensor], flat: Array) -> None:
        """x <- flat and y <- flat: the parameters and the shadow become this vector."""
        if self.relay is not None:
            self.relay.forget()
        with self.lock:
            np.copyto(self._base, flat)
            for part in self._chunks:
                part.dirty = False
                part.landed = Landings()
        unflatten(flat, params)

    def flat(self) -> Array:
        """A copy of y."""
        out = np.empty(self.size, dtype=self.dtype)
        for chunk in range(self.chunks):
            self.read_into(chunk, out)
        return out

    def _take(self, length: int) -> Buffer:
        buffer = self._take_bytes(length * self.dtype.itemsize)
        buffer.value = buffer.value.view(self.dtype)
        return buffer

    def _take_bytes(self, size: int) -> Buffer:
        if self._free.get(size):
            return self._free[size].pop()
        raw = np.empty(HEADER_BYTES + size, dtype=np.uint8)
        return Buffer(raw.data, value=raw[HEADER_BYTES:])

    def buffer(self, chunk: int, value: Array) -> Buffer:
        """A copy of a value, ready to be sent."""
        buffer = self._take(self.length(chunk))
        np.copyto(buffer.value, value)
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back that no edge refers to any more."""
        if buffer.home is not None:
            buffer.home.append(buffer.slot)
            return
        free = self._free.get(buffer.value.nbytes)
        if free is not None and len(free) < 4 and not buffer.waiting:
            buffer.value = buffer.value.view(np.uint8)
            free.append(buffer)


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

    def __init__(self, chunks: list[_Chunk], base: torch.Tensor, delta: torch.Tensor) -> None:
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
        self._xs = [[flats[t][a:b] for t, a, b, _ in part.segments] for part in self._chunks]
        self._key = key
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

    def fold(self, chunk: int) -> bool:
        """x += delta;  base = x. Whether delta keeps something: what rounding cut off."""
        xs = self._xs[chunk]
        bases = self._bases[chunk]
        deltas = self._deltas[chunk]
        if all(
            x.dtype == base.dtype and x.device == base.device
            for x, base in zip(xs, bases, strict=True)
        ):
            torch._foreach_add_(xs, deltas)
            torch._foreach_copy_(bases, xs)
            return False
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


def _row(values: Array) -> torch.Tensor:
    """The same memory as a tensor of one row."""
    return torch.from_numpy(values)[None]


def _flat_views(part: _Chunk, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[start : start + b - a] for _, a, b, start in part.segments]


def _runs(spans: list[slice]) -> list[slice]:
    """Neighbouring spans as one."""
    runs: list[slice] = []
    for span in spans:
        if runs and runs[-1].stop == span.start:
            span = slice(runs.pop().start, span.stop)
        runs.append(span)
    return runs


def _cut(sizes: list[int], per_chunk: int) -> list[_Chunk]:
    total = sum(sizes)
    chunks = [
        _Chunk(start, min(start + per_chunk, total), []) for start in range(0, total, per_chunk)
    ]
    offset = 0
    for tensor, size in enumerate(sizes):
        position = 0
        while position < size:
            part = chunks[(offset + position) // per_chunk]
            length = min(size - position, part.stop - offset - position)
            part.segments.append((tensor, position, position + length, offset + position))
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
