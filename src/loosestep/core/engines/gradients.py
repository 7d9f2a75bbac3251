"""Averaging gradients during backward, complete when `backward()` returns.

Parameters are put into buckets in reverse order, roughly the order in which backward produces
gradients. A bucket is sent when its last gradient is there, always in the same order; an
end-of-backward callback sends the rest (parameters that this backward did not use count as zeros),
waits, and writes the means back. Each bucket carries one flag per parameter, so that a parameter
unused on every rank keeps `grad=None`.

On an accelerator a bucket is packed there by the compute stream, travels through pinned memory on
side streams and is unpacked there again. A host that averages has to wait for the last bucket at
the end of backward: that wait is the one that averaging over the host costs. Where the ranks of a
node have a GPU each it stays there instead: it is summed on a side stream, for which the compute
stream waits, and the host only learns who used what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from loosestep.core.collectives.gloo import ordered_sum
from loosestep.core.contracts import Coded, Codes, Comm, Parcel, Scope
from loosestep.core.errors import CommError
from loosestep.core.pending import Pending, nothing
from loosestep.core.replica.shards import local
from loosestep.core.replica.staging import Staging

# bytes in a bucket
LEAST = 1 << 20
MOST = 25 << 20


@dataclass
class Plain:
    """A flat vector of the host that is averaged as it is."""

    flat: torch.Tensor
    flags: None = None
    codes: None = None

    def pack(self, into: torch.Tensor) -> None:
        """As it is."""
        into.copy_(self.flat)

    def unpack(self, parts: Sequence[torch.Tensor], divisor: int) -> None:
        """In its place."""
        self.flat.copy_(ordered_sum(parts).div_(divisor))

    def aside(self) -> AbstractContextManager[torch.Tensor]:
        """It is nowhere else."""
        return nullcontext(self.flat)


class Bucket:
    """Some parameters of one dtype: their gradients side by side, then one flag each, then
    padding.
    """

    def __init__(self, params: Sequence[nn.Parameter], multiple: int, staging: Staging) -> None:
        self.params = list(params)
        self.sizes = [local(param).numel() for param in params]
        self.padding = -(sum(self.sizes) + len(params)) % multiple
        self.padded = sum(self.sizes) + len(params) + self.padding
        self.codes: Codes | None = None
        self.missing = set(map(id, self.params))  # which have no gradient of this backward yet
        self.sent: Pending[None] | None = None
        self.done = 1.0  # the share of a backward that has produced this bucket and those before it
        # of the gradients before they are averaged; None: not wanted
        self.checksum: float | None = None
        # those of a bucket that stays
        self.flags = Plain(torch.zeros(len(params) + -len(params) % multiple))
        self.staging = staging
        self._stays = False
        self._left: torch.cuda.Event | None = None  # when it was packed to stay
        self._flat: torch.Tensor | None = None
        self._near: torch.Tensor | None = None  # on the accelerator
        self._arrived: Callable[[], None] = nothing
        self._used: list[bool] = []
        self._views = WeakIdKeyDictionary()  # the same few tensors come again and again

    @property
    def flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self.staging.host(self.padded, self.params[0].dtype)
        return self._flat

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` cut into tensors of the parameters' shapes, and last the flags."""
        views: list[torch.Tensor] | None = self._views.get(flat)
        if views is None:
            *pieces, flags, _ = flat.split([*self.sizes, len(self.params), self.padding])
            views = [
                *(
                    piece.view(local(param).shape)
                    for piece, param in zip(pieces, self.params, strict=True)
                ),
                flags,
            ]
            self._views[flat] = views
        return views

    @torch.no_grad()
    def leave(self, *, stay: bool = False) -> None:
        """Called where backward runs: gradients on an accelerator start their way to the host,
        or `stay` there.
        """
        self._stays = stay
        if not (stay or self.staging.remote):
            return
        self._look()
        if self._near is None:
            self._near = self.staging.near(self.padded, self.params[0].dtype)
        torch._foreach_copy_(self.views(self._near)[:-1], self._dense())
        if stay:
            self.flags.flat[: len(self._used)] = torch.tensor(self._used)
            self._left = self.staging.mark()
        else:
            size = sum(self.sizes)
            self._arrived = self.staging.send([(self.flat[:size], self._near[:size])])

    @contextmanager
    def aside(self) -> Iterator[torch.Tensor]:
        """What stayed, for a communication thread to average; the first few times it waits there
        for the checksum.
        """
        assert self._near is not None
        with torch.no_grad(), self.staging.aside(self._left):
            if self.checksum is not None:
                self.checksum = float(self._near[: sum(self.sizes)].sum(dtype=torch.float64))
            yield self._near

    def _look(self) -> None:
        """Which parameters have a gradient."""
        gradients = [param.grad for param in self.params]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise RuntimeError(
                "sparse gradients cannot be averaged; build the embedding with sparse=False"
            )
        self._used = [gradient is not None for gradient in gradients]

    def _dense(self) -> list[torch.Tensor]:
        return [
            torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.params
        ]

    @torch.no_grad()
    def pack(self, into: torch.Tensor) -> None:
        """Gradients in; zeros and a zero flag where there is none."""
        if not self.staging.remote:
            self._look()
        *views, flags = self.views(into)
        flags.copy_(torch.tensor(self._used))
        size = sum(self.sizes)
        if not self.staging.remote:
            torch._foreach_copy_(views, self._dense())
        else:
            self._arrived()
            if into is not self.flat:
                into[:size].copy_(self.flat[:size])
        if self.checksum is not None:
            self.checksum = float(into[:size].sum(dtype=torch.float64))

    @torch.no_grad()
    def unpack(self, parts: Sequence[torch.Tensor], divisor: int) -> None:
        """Means out: the sum of the parts, in order, over the divisor. Unused everywhere: `grad`
        stays None.
        """
        rows = [self.views(part) for part in parts]
        self._used = [any(flags) for flags in zip(*(row[-1].tolist() for row in rows), strict=True)]
        if self.staging.remote:
            assert self._near is not None
            size = sum(self.sizes)
            _mean([part[:size] for part in parts], divisor, out=self.flat[:size])
            self.staging.push([(self.flat[:size], self._near[:size])])
            return
        for used, param, *views in zip(
            self._used, self.params, *(row[:-1] for row in rows), strict=True
        ):
            if used:
                _mean(views, divisor, out=_gradient(param))

    @torch.no_grad()
    def arrive(self) -> None:
        """Called where backward runs, at the end: the compute stream takes what came back to the
        accelerator, or stayed.
        """
        if self._stays:
            self._used = (self.flags.flat[: len(self.params)] > 0).tolist()
        elif not self.staging.remote:
            return
        assert self._near is not None
        self.staging.receive()
        used = [index for index, flag in enumerate(self._used) if flag]
        views = self.views(self._near)
        torch._foreach_copy_(
            [_gradient(self.params[index]) for index in used], [views[index] for index in used]
        )
        self.staging.used()


def _gradient(param: nn.Parameter) -> torch.Tensor:
    """What this rank holds of a gradient, made if there is none."""
    if param.grad is None:
        param.grad = torch.empty_like(param)
    return local(param.grad)


def _mean(parts: Sequence[torch.Tensor], divisor: int, *, out: torch.Tensor) -> None:
    """out <- the sum of the parts, in order, over the divisor."""
    if len(parts) == 2 and out.dtype in (torch.float32, torch.float64):
        torch.add(parts[0], parts[1], out=out).div_(divisor)
    else:
        out.copy_(ordered_sum(parts).div_(divisor))


class Blank:
    """What a rank that is away adds to a bucket: nothing."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._dtype = bucket.params[0].dtype
        self.flags = Plain(torch.zeros_like(bucket.flags.flat))
        self.codes = bucket.codes

    @cached_property
    def flat(self) -> torch.Tensor:
        """Zeros on the host, for ways that need them."""
        return torch.zeros(self._bucket.padded, dtype=self._dtype)

    def pack(self, into: torch.Tensor) -> None:
        """Zeros."""
        into.zero_()

    def unpack(self, parts: Sequence[torch.Tensor], divisor: int) -> None:
        """The mean is of no use here."""

    @contextmanager
    def aside(self) -> Iterator[torch.Tensor]:
        """Zeros where the gradients would be."""
        with torch.no_grad(), self._bucket.staging.aside():
            yield self._bucket.staging.near(self._bucket.padded, self._dtype)


class BackwardEnd:
    """What autograd calls at the end of a backward, and lets go of uncalled when the backward
    raises.
    """

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached

    def __call__(self) -> None:
        self._reached()


class GradientAverager:
    """Hooks on the parameters of a model; `scope()` says, at the start of each backward, over whom
    to average.

    `late`: something else averages inside the node during backward, so everything is sent at the
    end, after it.

    A backward that raises leaves its round open, and the next one fills it. Where others have got a
    part of it already the round is closed with zeros, and the next round tells: it goes on if all
    have raised, and ends the run if only some have.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        comm: Comm,
        *,
        multiple: int,
        scope: Callable[[], Scope],
        waited: Callable[[float], None],
        worked: Callable[[float], None],
        late: bool = False,
    ) -> None:
        self._comm = comm
        self._scope = scope
        self._late = late
        self._waited = waited
        self._worked = worked
        self._buckets = make_buckets(params, multiple)
        self._coded: Callable[[], Coded | None] = lambda: None
        self._home = {id(param): bucket for bucket in self._buckets for param in bucket.params}
        self._paused = 0
        self._open: Scope | None = None
        self._raised = False  # the last backward, before its end
        self._ending: weakref.ref[BackwardEnd] | None = None
        self._rounds = 0
        self.backwards = 0  # since the last step; the engine counts from there
        # of the first rounds, to notice ranks that see the same data
        self._buckets[0].checksum = 0.0
        ready = torch.compiler.disable(self._ready)
        self._at_end = torch.compiler.disable(self._end)
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(ready) for p in params
        ]

    def encode(self, coded: Callable[[], Coded]) -> None:
        """From now on gradients travel between nodes as `coded()` says."""
        self._coded = coded
        self._look_up_codes()

    def _look_up_codes(self) -> None:
        coded = self._coded()
        if coded is not None:
            for number, bucket in enumerate(self._buckets):
                bucket.codes = Codes(coded, number, sum(bucket.sizes))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate locally; the next backward outside averages the sum."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def blank_parcels(self) -> Iterable[Parcel]:
        """Zeros in the shape of every bucket, in order."""
        self._look_up_codes()
        return map(Blank, self._buckets)

    def check_step(self) -> None:
        """Raise if an optimizer steps on gradients that are not averaged: inside backward, or
        after one that raised.
        """
        if self._paused or self._scope() == "rank":
            return
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the optimizer steps inside backward(), before its gradients are averaged, so the "
                "ranks would drift apart; step it after backward(), or use a strategy that "
                "averages parameters only: replica='rank'"
            )
        if self._raised:
            raise RuntimeError(
                "the optimizer steps on what a backward() that raised has left, which is not "
                "averaged; skip the step too and call optimizer.zero_grad()"
            )

    def close(self) -> None:
        """End the round of a backward that raised, if one is open, with zeros for what it has
        not sent.
        """
        if self._open is None:
            return
        scope = self._open
        sent = [bucket for bucket in self._buckets if bucket.sent is not None]
        try:
            for bucket in self._buckets:
                bucket.sent = bucket.sent or self._comm.reduce(Blank(bucket), scope)
            for bucket in self._buckets:
                assert bucket.sent is not None
                bucket.sent.wait()
            self._comm.land_gradients()
            for bucket in sent:
                bucket.arrive()
            self._comm.torn = True  # for the next round to tell, after this one
        finally:
            self._reset()

    def _reset(self) -> None:
        self._open = None
        for bucket in self._buckets:
            bucket.sent = None
            bucket.missing.update(map(id, bucket.params))

    def rows(self, rows: int) -> list[torch.Tensor]:
        """Zeros in the shape of one of so many rows of every bucket, for what codes lose."""
        wide = [torch.promote_types(b.params[0].dtype, torch.float32) for b in self._buckets]
        return [
            torch.zeros(bucket.padded // rows, dtype=dtype)
            for bucket, dtype in zip(self._buckets, wide, strict=True)
        ]

    def lengths(self) -> list[tuple[int, torch.dtype]]:
        """Of the first bucket, the longest and the shortest: so long are the vectors that are added
        up.
        """
        some = [pick(self._buckets, key=lambda bucket: bucket.padded) for pick in (min, max)]
        return [(b.padded, b.params[0].dtype) for b in (self._buckets[0], *some)]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ready(self, param: torch.Tensor) -> None:
        if self._paused:
            return
        if self._open is None or self._raised:
            self._begin()
        if self._open == "rank" or self._late:
            return
        bucket = self._home[id(param)]
        if bucket.sent is not None:
            raise RuntimeError(
                "a gradient arrived twice in one backward, after it was averaged: checkpoint with "
                "use_reentrant=False, or wrap all but the last backward in run.no_sync()"
            )
        bucket.missing.discard(id(param))
        if not bucket.missing:
            self._send_complete()

    def _begin(self) -> None:
        self._worked(0.0)
        self._raised = False
        ending = BackwardEnd(self._at_end)
        self._ending = weakref.ref(ending, self._let_go)
        # A callback that is queued by a callback comes after those of DDP and fully_shard.
        at_end = torch.autograd.Variable._execution_engine.queue_callback
        at_end((lambda: at_end(ending)) if self._late else ending)
        if self._open is not None:
            return  # the round of a backward that raised
        self.backwards += 1
        self._look_up_codes()  # a state may have been loaded
        self._open = self._scope()
        if self._open != "rank":
            self._comm.open_round(self._open, self._buckets[0].checksum or 0.0)

    def _let_go(self, _: object) -> None:
        """Autograd has forgotten a backward: after its end, or because it raised."""
        if self._open is None:
            return
        self._raised = True
        for bucket in self._buckets:
            bucket.missing.update(map(id, bucket.params))
        if self._open == "rank":
            self._open = None
        elif any(bucket.sent is not None for bucket in self._buckets):
            try:
                self.close()
            except CommError:
                return  # raised again by whatever communicates next

    def _send_complete(self) -> None:
        """In order, what backward has produced; the last bucket waits for its end, where nothing
        hides it.
        """
        for bucket in self._buckets[:-1]:
            if bucket.missing:
                return
            if bucket.sent is None:
                self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        assert self._open is not None
        self._leave(bucket)
        bucket.sent = self._comm.reduce(bucket, self._open)

    def _leave(self, bucket: Bucket) -> None:
        assert self._open is not None
        self._worked(bucket.done)
        bucket.leave(stay=self._comm.stays(self._open))

    def _end(self) -> None:
        scope = self._open
        start = self._comm.now()
        try:
            if scope is None or scope == "rank":
                return
            *others, last = self._buckets
            for bucket in others:
                if bucket.sent is None:
                    self._send(bucket)
            self._leave(last)
            self._comm.reduce_here(last, scope)
            for bucket in others:
                assert bucket.sent is not None
                bucket.sent.wait()
                bucket.arrive()
            last.arrive()
            self._rounds += 1
            if self._rounds >= 4:
                self._buckets[0].checksum = None
        finally:
            self._reset()
            self._waited(self._comm.now() - start)


def make_buckets(params: Sequence[nn.Parameter], multiple: int) -> list[Bucket]:
    """Last parameters first, one dtype per bucket."""
    sizes = [p.numel() * p.element_size() for p in params]
    buckets = []
    done = 0
    staging = Staging(local(params[0]).device)
    for indices in fill_buckets(sizes, [p.dtype for p in params]):
        bucket = Bucket([params[index] for index in indices], multiple, staging)
        done += sum(sizes[index] for index in indices)
        bucket.done = done / sum(sizes)
        buckets.append(bucket)
    return buckets


def fill_buckets(sizes: Sequence[int], kinds: Sequence[object]) -> list[list[int]]:
    """Indices of parameters of so many bytes, last ones first, one kind per bucket. Each takes three
    quarters of what is left: few buckets, for every one costs a trip, and the last one, which
    nothing hides any more, is small.
    """
    buckets: list[list[int]] = []
    group: list[int] = []
    left = sum(sizes)
    size = 0
    for index in reversed(range(len(sizes))):
        limit = min(max(3 * left // 4, LEAST), MOST)
        if group and (kinds[index] != kinds[group[0]] or size >= limit):
            buckets.append(group)
            left -= size
            group = []
            size = 0
        group.append(index)
        size += sizes[index]
    return [*buckets, group]
