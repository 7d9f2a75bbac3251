"""The step boundary for parameters on an accelerator, in two halves, so that the compute thread
never waits.

    compute thread, at a step boundary:   d <- delta;  delta <- 0;  x <- x + d      (x and d on the device, in stream order)
    own thread:                           base <- base + d;  fetch x;  base <- x

`d` belongs to the parameters from the first half on and to the shadow all the time: y = base + d +
delta until it is in the base. When x has arrived the base is replaced, so the shadow moves by
exactly the update u = x - (base + d). What has landed before a boundary is in the parameters after
it, as on a CPU; what is new are the parameters, which arrive a little later. Exchanges wait for
that (`when_published`), and a boundary that finds the second half of the last one under way (the
host runs ahead of the device by some steps) leaves everything to the next one.

Memory: one copy of the parameters on the device, three pinned on the host that take turns at being
base, delta and the one that travels. Parameters of lower precision than the shadow keep what
rounding cut off in `remainder`, on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from loosestep.core.pending import Pending
from loosestep.core.replica.staging import Groups, Staging
from loosestep.core.thread import CommThread

if TYPE_CHECKING:
    from loosestep.core.gossip.memory import Fold
    from loosestep.core.gossip.shadow import Shadow


class Relay:
    """Carries parameters to a shadow and what has landed there back. Called by the compute
    thread.
    """

    def __init__(self, shadow: Shadow, params: Sequence[torch.Tensor]) -> None:
        self._shadow = shadow
        self._staging = Staging(params[0].device)
        self._dtype = torch.float64 if shadow.dtype.itemsize == 8 else torch.float32
        self._near = self._staging.near(shadow.size, self._dtype)
        self._views = _cut(self._near, params)
        self._groups = Groups(self._views)
        rounds = any(param.element_size() < self._dtype.itemsize for param in params)
        self._remainder = _cut(torch.zeros_like(self._near), params) if rounds else None
        self._half: Pending[None] | None = None
        self._thread: CommThread | None = None
        self._pinned: list[NDArray[Any]] = []
        self._seconds = 0.0  # of the processor, that the last second half has taken

    def memory(self) -> NDArray[Any]:
        """Of the host, for a whole vector that can travel."""
        array: NDArray[Any] = self._staging.host(self._shadow.size, self._dtype).numpy()
        return array

    def pin(self, vectors: Sequence[NDArray[Any]]) -> None:
        """Tell the device's driver that memory made elsewhere stays where it is."""
        if self._staging.remote:
            runtime = torch.cuda.cudart()
            for vector in vectors:
                vector[:] = 0.0
                failed = runtime.cudaHostRegister(vector.ctypes.data, vector.nbytes, 0)
                if int(failed):
                    raise OSError(f"shared memory could not be pinned (CUDA error {int(failed)})")
            self._pinned = list(vectors)

    def busy(self) -> bool:
        """Whether the second half of the last boundary is still under way."""
        return self._half is not None and not self._half.done()

    def when_published(self, task: Callable[[], None]) -> None:
        """Do something as soon as the parameters of the last boundary are in the shadow."""
        if self._thread is not None and self.busy():
            self._thread.submit(task)
        else:
            task()

    def boundary(self, params: Sequence[torch.Tensor]) -> Fold:
        """x <- x + d, and begin to publish x; waits for the last boundary where it is `busy`."""
        self._finish()
        frozen, spans, landed = self._shadow.freeze()
        host = torch.from_numpy(frozen)
        self._add(params, host, spans)
        passed = self._staging.mark()
        step = self._shadow.steps
        self._thread = self._thread or CommThread("fold")
        self._half = self._thread.submit(lambda: self._publish(host, passed, step))
        return landed.fold(step, seconds=self._seconds)

    def settle(self, params: Sequence[torch.Tensor]) -> Fold:
        """Both halves, waiting: what has landed is in the parameters, and they are in the
        shadow.
        """
        fold = self.boundary(params)
        self._finish()
        return fold

    def forget(self) -> None:
        """The parameters were set from outside: nothing on its way belongs to them."""
        self._finish()
        for remainder in self._remainder or []:
            remainder.zero_()

    def close(self) -> None:
        """End the thread, and let go of memory made elsewhere."""
        if self._thread is not None:
            self._thread.close(timeout=10.0)
        for vector in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(vector.ctypes.data)
        self._pinned = []

    def _finish(self) -> None:
        half = self._half
        self._half = None
        if half is not None:
            half.wait()

    def _publish(self, host: torch.Tensor, passed: torch.cuda.Event | None, step: int) -> None:
        begun = time.thread_time()
        self._shadow.merge()
        self._staging.send([(host, self._near)], after=passed)()
        self._shadow.renew(step)
        self._seconds = time.thread_time() - begun

    @torch.no_grad()
    def _add(
        self, params: Sequence[torch.Tensor], host: torch.Tensor, spans: Sequence[slice]
    ) -> None:
        """x <- x + d, and a copy of x (before rounding) into `near`; d is what `host` holds in
        these spans.
        """
        whole = len(spans) == 1 and spans[0].stop - spans[0].start == len(host)
        if not whole and (spans or self._remainder is not None):
            self._near.zero_()
            self._staging.used()
        if spans:
            self._staging.fetch([(host[span], self._near[span]) for span in spans])
        if self._remainder is None:
            for these, views in self._groups.of(params):
                if spans:
                    torch._foreach_add_(these, views)
                torch._foreach_copy_(views, these)
        else:
            torch._foreach_add_(self._views, self._remainder)
            torch._foreach_add_(self._views, list(params))
            torch._foreach_copy_(list(params), self._views)
            for remainder, exact, param in zip(self._remainder, self._views, params, strict=True):
                torch.sub(exact, param, out=remainder)
        self._staging.used()


def _cut(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = flat.split([param.numel() for param in params])
    return [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]
