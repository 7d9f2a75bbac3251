"""The memory of a shadow, as communication sees it: numbers that are read, sent and moved.

Nothing here needs torch, and nothing here is an object that only one process can see but the lock:
two vectors (four with a relay) and a table of whole numbers, which may lie in memory that the
processes of a rank share. See `shadow.py` for what it is a shadow of.
"""

from __future__ import annotations

import math
import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loosestep.core.gossip.exchange import Moved, NotFiniteError
from loosestep.core.messages.frames import HEADER_BYTES
from loosestep.core.messages.slots import Buffer, EdgeSlots

if TYPE_CHECKING:
    import torch

    from loosestep.codecs import Codec

Array = NDArray[Any]

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


# What is known about a chunk, where both halves see it: whether delta holds something, whether what
# a relay has taken does, whether a boundary under way has not passed it yet; the step after which it
# was last crossed in a boundary of some chunks; what has landed.
DIRTY, FROZEN, AHEAD, PUBLISHED, LANDED, TOTAL, OLDEST = range(7)
# What is known about all: steps that the learner has made; the step whose parameters the base
# holds, or newer ones in some chunks; which vector plays which part; the chunk that is being
# written, counted from 1.
# The progress counter, when it was last counted (ns), by how many millionths communication slows
# steps, whether the run is asked to stop.
STEPS, WHOLE, BASE, DELTA, ICED, SPARE, WRITING, PROGRESS, STEPPED, SLOWER, STOP, WIDTH = range(12)


def _flag(column: int) -> property:
    def get(chunk: Any) -> bool:
        return bool(chunk._row[column])

    def put(chunk: Any, value: bool) -> None:
        chunk._row[column] = value

    return property(get, put)


class Chunk:
    """A part of the vector, and what is known about it."""

    __slots__ = ("_row", "start", "stop")

    def __init__(self, start: int, stop: int, row: Array) -> None:
        self.start = start
        self.stop = stop
        self._row = row

    dirty = _flag(DIRTY)
    frozen = _flag(FROZEN)
    ahead = _flag(AHEAD)

    @property
    def published(self) -> int:
        """The step after which it was last crossed in a boundary of some chunks."""
        return int(self._row[PUBLISHED])

    @published.setter
    def published(self, step: int) -> None:
        self._row[PUBLISHED] = step

    def land(self, snapshot: int) -> None:
        """An exchange of parameters after this step has landed."""
        row = self._row
        row[OLDEST] = min(row[OLDEST], snapshot) if row[LANDED] else snapshot
        row[LANDED] += 1
        row[TOTAL] += snapshot

    @property
    def landed(self) -> Landings:
        """What has landed since it was taken last."""
        row = self._row
        return Landings(int(row[LANDED]), int(row[TOTAL]), int(row[OLDEST]))

    def take(self) -> Landings:
        """The same, which is nobody's any more."""
        landed = self.landed
        self._row[LANDED] = 0
        self._row[TOTAL] = 0
        return landed


class Writer(Protocol):
    """Where a shadow writes down what happens to it."""

    def write(self, body: bytes, behind: bool = False) -> None: ...


def make_table(chunks: int) -> Array:
    """What is known at the beginning."""
    return fill_table(np.zeros((1 + chunks, WIDTH), dtype=np.int64))


def fill_table(table: Array) -> Array:
    """The same in given memory, which is zero."""
    table[0, STEPPED] = time.monotonic_ns()
    table[0, [BASE, DELTA, ICED, SPARE]] = (0, 1, 1, 2)
    return table


class Memory:
    """Vectors in chunks, and a table of what is known about them. With a `tape`, every `note` is
    written to it under the lock.
    """

    def __init__(
        self,
        vectors: list[Array],
        table: Array,
        *,
        per_chunk: int,
        lock: AbstractContextManager[Any],
        codec: Codec | None = None,
    ) -> None:
        """`table`: one row for all, and one for every chunk. `codec`: how values are written that
        pairs exchange; nothing else is.
        """
        self.size = len(vectors[0])
        self.dtype: np.dtype[Any] = vectors[0].dtype
        self.lock = lock
        self.tape: Writer | None = None
        self._vectors = vectors
        self._all: Array = table[0]
        self._rows: Array = table[1:]
        self._chunks = [
            Chunk(start, min(start + per_chunk, self.size), table[1 + index])
            for index, start in enumerate(range(0, self.size, per_chunk))
        ]
        self._difference = np.empty(min(per_chunk, self.size), dtype=self.dtype)
        self._whole = min(per_chunk, self.size) * self.dtype.itemsize
        self._codec = codec
        # Of whole chunks, and of their codes.
        self._free: dict[int, list[Buffer]] = {self._whole: [], self.offer_bytes(0): []}
        scratch = len(self._difference) if codec is not None else 0
        self._own = np.empty(scratch, dtype=self.dtype)
        self._theirs = np.empty(scratch, dtype=self.dtype)

    @property
    def steps(self) -> int:
        """Steps that the learner has made, folded or not; whoever has it make them counts them."""
        return int(self._all[STEPS])

    @steps.setter
    def steps(self, count: int) -> None:
        self._all[STEPS] = count

    @property
    def progress(self) -> int:
        """What this rank tells others about how far it is, in steps."""
        return int(self._all[PROGRESS])

    @progress.setter
    def progress(self, count: int) -> None:
        self._all[PROGRESS] = count

    @property
    def stepped(self) -> float:
        """When the last step was made, in monotonic seconds."""
        return int(self._all[STEPPED]) / 1e9

    @stepped.setter
    def stepped(self, when: float) -> None:
        self._all[STEPPED] = int(when * 1e9)

    @property
    def slower(self) -> float:
        """By which share communication makes this rank's steps slower: what others are told."""
        return int(self._all[SLOWER]) / 1e6

    @slower.setter
    def slower(self, share: float) -> None:
        self._all[SLOWER] = int(share * 1e6)

    @property
    def stop(self) -> bool:
        """Whether the run is asked to stop."""
        return bool(self._all[STOP])

    @stop.setter
    def stop(self, asked: bool) -> None:
        self._all[STOP] = asked

    @property
    def published(self) -> int:
        """The step whose parameters the base holds, or newer ones in some chunks."""
        return int(self._all[WHOLE])

    @published.setter
    def published(self, step: int) -> None:
        self._all[WHOLE] = step

    @property
    def _base(self) -> Array:
        return self._vectors[int(self._all[BASE])]

    @property
    def _delta(self) -> Array:
        return self._vectors[int(self._all[DELTA])]

    @property
    def _frozen(self) -> Array:
        return self._vectors[int(self._all[ICED])]

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

    def _into(self, part: Chunk, out: Array) -> None:
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
            self._all[WRITING] = chunk + 1
            self._add(part, difference, weight)
            self._all[WRITING] = 0
            part.land(snapshot)
            self._write(note, part.ahead)
        return Moved(weight * total, square)

    def _add(self, part: Chunk, difference: Array, weight: float) -> None:
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


def _row(values: Array) -> torch.Tensor:
    """The same memory as a tensor of one row."""
    import torch

    return torch.from_numpy(values)[None]
