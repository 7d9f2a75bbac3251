"""The step boundary for parameters on an accelerator, in two halves, so that the compute thread never waits.

    compute thread, at a step boundary:   x <- x + d;  send x to the host                    (on the device, in stream order)
    own thread, when x has arrived:       y <- y + u, that is base <- x;  d <- delta;  base <- base + d;  delta <- 0

`d` is what exchanges have added to the shadow since the last second half; it is part of the shadow from the moment it is
taken and of the parameters from the next boundary on. Nothing is lost and nothing counts twice: with x' the parameters
at the next boundary, base <- x' + d replaces the old x + d, so the shadow moves by exactly the update u = x' - x.

What it costs is staleness: an exchange lands one boundary later than on a CPU, and a boundary that finds the second half
under way (the host runs ahead of the device by some steps) leaves everything to the next one. Memory: one copy of the
parameters on the device, one pinned on the host, beside the shadow's two.

Parameters of lower precision than the shadow keep what rounding cut off in `remainder`, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from loosestep.comm.base import Pending
from loosestep.comm.stream import Stream
from loosestep.staging import Staging

if TYPE_CHECKING:
    from loosestep.comm.shadow import Fold, Shadow


class Relay:
    """Carries parameters to a shadow and what has landed there back. Called by the compute thread."""

    def __init__(self, shadow: Shadow, params: Sequence[torch.Tensor]) -> None:
        self._shadow, self._staging = shadow, Staging(params[0].device)
        dtype = torch.float64 if shadow.dtype.itemsize == 8 else torch.float32
        self._near, self._host = self._staging.near(shadow.size, dtype), self._staging.host(shadow.size, dtype)
        self._views = _cut(self._near, params)
        rounds = any(param.element_size() < dtype.itemsize for param in params)
        self._remainder = _cut(torch.zeros_like(self._near), params) if rounds else None
        self._landed = False  # the host buffer holds something for the parameters
        self._half: Pending[float] | None = None
        self._thread: Stream | None = None

    def busy(self) -> bool:
        """Whether the second half of the last boundary is still under way."""
        return self._half is not None and not self._half.done()

    def boundary(self, params: Sequence[torch.Tensor]) -> Fold | None:
        """x <- x + d, and send x; what the last second half took, None when there was none. Call it when not `busy`."""
        fold = self._take()
        self._add(params)
        ready = self._staging.send([(self._host, self._near)])
        self._thread = self._thread or Stream("fold")
        self._half = self._thread.submit(lambda: self._publish(ready))
        return fold

    def settle(self, params: Sequence[torch.Tensor]) -> Fold:
        """Both halves now, waiting: every update is published and everything that landed is in the parameters."""
        earlier = self.boundary(params)
        fold = self._take()
        assert fold is not None
        self._add(params)
        return fold if earlier is None else fold.absorb(earlier)

    def _take(self) -> Fold | None:
        """Wait for the second half; what it took belongs to the parameters of this step."""
        half, self._half = self._half, None
        if half is None:
            return None
        seconds = half.wait()
        return self._shadow.take().fold(self._shadow.steps, seconds=seconds)

    def forget(self) -> None:
        """The parameters were set from outside: nothing on its way belongs to them."""
        self._take()
        self._landed = False
        for remainder in self._remainder or []:
            remainder.zero_()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close(timeout=10.0)

    def _publish(self, ready: Callable[[], None]) -> float:
        ready()
        seconds = self._shadow.renew(self._host.numpy())
        self._landed = self._shadow.taken.chunks > 0
        return seconds

    @torch.no_grad()
    def _add(self, params: Sequence[torch.Tensor]) -> None:
        """x <- x + d, and a copy of x (before rounding) into `near`."""
        if self._landed:
            self._landed = False
            self._staging.fetch([(self._host, self._near)])
            if self._remainder is None:
                torch._foreach_add_(list(params), self._views)
        elif self._remainder is not None:
            self._near.zero_()
        if self._remainder is None:
            torch._foreach_copy_(self._views, list(params))
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
