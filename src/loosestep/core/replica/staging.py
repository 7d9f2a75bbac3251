"""Between an accelerator and the host: pinned memory, side streams and events. The compute thread
never waits here.

    send:   compute stream --event--> side stream copies to the host --event--> a communication thread waits for it
    push:   side stream copies to the device (any thread may start it)
    fetch:  push, and the compute *stream* waits for it; the compute thread goes on
    aside:  what stays on the device is worked on by a side stream, and the compute stream waits for it

Flat memory on the device is kept and written by the compute stream, so no block is freed under a
copy: sending starts after what the compute stream did before, and the compute stream waits for what
comes back before it uses it. What the host may touch follows from the communication: a
communication thread reads and writes pinned memory only between the arrival of a send and the next
push. On a CPU there is nothing to stage and copies are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from loosestep.core.pending import nothing

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]  # host, device


class Staging:
    """One device's way to the host and back. `remote`: whether the host is somewhere else than
    the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.remote = device.type == "cuda"
        if self.remote:
            # Two streams: what comes back must not queue behind a copy that waits for the compute
            # stream.
            self._out = torch.cuda.Stream(device)
            self._back = torch.cuda.Stream(device)
            self._came = torch.cuda.Event()
            self._consumed = torch.cuda.Event()
            self._compute = torch.cuda.current_stream(device)

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the host, pinned if they have to travel."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.remote)

    def near(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros where the tensors are."""
        return torch.zeros(size, dtype=dtype, device=self.device)

    def send(self, pairs: Pairs, *, after: torch.cuda.Event | None = None) -> Callable[[], None]:
        """host <- device, after what was marked, or else what the current stream has been given so
        far. What is returned waits for the arrival.
        """
        if not self.remote:
            for host, near in pairs:
                host.copy_(near)
            return nothing
        self._out.wait_event(after or torch.cuda.current_stream(self.device).record_event())
        with self._on(self._out):
            for host, near in pairs:
                host.copy_(near, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # whoever waits sleeps instead of spinning
        arrived.record(self._out)
        return arrived.synchronize

    def push(self, pairs: Pairs) -> None:
        """device <- host, when the last values there have been used; see `receive`."""
        if not self.remote:
            for host, near in pairs:
                near.copy_(host)
            return
        self._back.wait_event(self._consumed)
        with self._on(self._back):
            for host, near in pairs:
                near.copy_(host, non_blocking=True)
        self._came.record(self._back)

    def receive(self) -> None:
        """The current stream, not this thread, waits for what was pushed."""
        if self.remote:
            torch.cuda.current_stream(self.device).wait_event(self._came)

    def fetch(self, pairs: Pairs) -> None:
        """device <- host, for the current stream to use."""
        self.push(pairs)
        self.receive()

    def mark(self) -> torch.cuda.Event | None:
        """What the current stream has been given so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.remote else None

    @contextmanager
    def aside(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """A communication thread works on the device, after what was marked; `receive` waits for
        what it does.
        """
        if not self.remote:
            yield
            return
        with self._on(self._back):
            if after is not None:
                self._back.wait_event(after)
            yield
        self._came.record(self._back)

    def used(self) -> None:
        """What was received has been used by the current stream and may be overwritten."""
        if self.remote:
            self._consumed.record(torch.cuda.current_stream(self.device))

    def leave(self) -> None:
        """The compute thread hands over to a communication thread and waits: remember its
        stream.
        """
        if self.remote:
            self._compute = torch.cuda.current_stream(self.device)

    def stand_in(self) -> AbstractContextManager[object]:
        """A communication thread does the compute thread's work, on its stream."""
        return self._on(self._compute) if self.remote else nullcontext()

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Work on a stream. On its device first: a thread begins on device 0, where returning to
        it would open a context.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield


class Groups:
    """Tensors and the pieces of a flat vector that stand for them, for operations on many at once.

    On an accelerator those without gaps come first, as flat ones: one pair whose strides differ (a
    convolution in channels-last order) would have all others worked on one by one. Made again only
    when a tensor has moved.
    """

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._views = views
        self._key: tuple[int, ...] = ()
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def of(
        self, tensors: Sequence[torch.Tensor]
    ) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Lists of tensors and of their views, as many as there are groups."""
        if not self._views or self._views[0].device.type == "cpu":
            return [(list(tensors), self._views)]
        key = tuple(tensor.data_ptr() for tensor in tensors)
        if key != self._key:
            pairs = [
                (tensor.detach(), view) for tensor, view in zip(tensors, self._views, strict=True)
            ]
            flat = [(a.view(-1), b.view(-1)) for a, b in pairs if a.is_contiguous()]
            rest = [(a, b) for a, b in pairs if not a.is_contiguous()]
            self._groups = [
                ([a for a, _ in group], [b for _, b in group]) for group in (flat, rest) if group
            ]
            self._key = key
        return self._groups


class Image:
    """One flat vector over tensors of some shapes: `near` where they are, `host` where
    communication works on it.

    On a CPU both are the same memory.
    """

    def __init__(
        self, like: list[torch.Tensor], dtype: torch.dtype, padded: int, staging: Staging
    ) -> None:
        self.near = staging.near(padded, dtype)
        self.host = staging.host(padded, dtype) if staging.remote else self.near
        sizes = [tensor.numel() for tensor in like]
        pieces = self.near[: sum(sizes)].split(sizes)
        self.views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
        self.groups = Groups(self.views)

    @torch.no_grad()
    def pack(self, tensors: list[torch.Tensor]) -> None:
        """near <- tensors, on the current stream: a copy inside the device costs microseconds,
        and the tensors may change.
        """
        for these, views in self.groups.of(tensors):
            torch._foreach_copy_(views, these)

    @torch.no_grad()
    def pack_row(self, tensors: list[torch.Tensor], row: int, rows: int) -> None:
        """The same for one row of the vector cut into so many."""
        wanted = self.row(row, rows)
        begin = 0
        targets = []
        sources = []
        for view, tensor in zip(self.views, tensors, strict=True):
            first = max(wanted.start - begin, 0)
            last = min(wanted.stop - begin, view.numel())
            begin += view.numel()
            if first == 0 and last == view.numel():
                targets.append(view)
                sources.append(tensor)
            elif first < last:
                targets.append(view.view(-1)[first:last])
                sources.append(tensor.detach().reshape(-1)[first:last])
        if targets:
            torch._foreach_copy_(targets, sources)

    def row(self, row: int, rows: int) -> slice:
        """Where a row of the vector is."""
        width = self.near.numel() // rows
        return slice(row * width, (row + 1) * width)
