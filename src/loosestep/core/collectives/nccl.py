"""Channels whose values stay on the accelerator: NCCL instead of gloo, the same operations.

NCCL promises no order for its own sums, so those of more than two ranks are taken in rank order, the
same bits on every rank. The host's are in the order of gloo's ring (`ring.py`): between more than
two nodes, lanes on devices equal those over the host up to rounding, elsewhere bit for bit.

Who talks to whom, who is here and who is lost stays the host's business: ranks meet there before
anything is queued on a device, and the heartbeats decide who is lost. Then operations are cut off,
for a kernel that waits for a dead peer would never end. Nothing here makes a thread wait for the
device: operations follow each other on the current stream.

    gradients   inside a node, where each of its ranks has a GPU of its own, unless
                LOOSESTEP_GRADIENTS=host
    lanes       between nodes, only with LOOSESTEP_LANES=nccl
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from loosestep.core.collectives.gloo import PATIENCE, SLICE, Channel
from loosestep.core.errors import CommError
from loosestep.core.messages.heartbeat import Pulse
from loosestep.core.messages.sealed_store import SealedStore
from loosestep.core.thread import CommThread

log = logging.getLogger("loosestep")

LANES = "LOOSESTEP_LANES"
GRADIENTS = "LOOSESTEP_GRADIENTS"
# NCCL's watchdog would end the process: an error ends the operations instead, and a wait holds a
# stream, never a thread.
QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_BLOCKING_WAIT": "0"}
# seconds that a clean end may take, and a hasty one
LEAVING = 10.0
CUTTING = 2.0


@dataclass(frozen=True)
class Reach:
    """What all ranks agree on about their devices: `gpus` names the one of each rank, None where
    NCCL has no way to it.
    """

    device: torch.device
    gpus: tuple[str | None, ...]
    gradients: bool = True  # may stay on the device
    lanes: bool = False  # are asked to

    def apart(self, ranks: Sequence[int]) -> bool:
        """Whether each of the ranks has a GPU of its own."""
        gpus = {self.gpus[rank] for rank in ranks}
        return None not in gpus and len(gpus) == len(ranks)

    def within(self, ranks: Sequence[int]) -> Reach:
        """The same for a part of the ranks, counted from 0."""
        return Reach(
            self.device, tuple(self.gpus[rank] for rank in ranks), self.gradients, self.lanes
        )

    def check_lanes(self, groups: Sequence[Sequence[int]]) -> None:
        """Raise where lanes were asked to stay on the device and cannot: in a lane, or among the
        ranks that share its result.
        """
        for ranks in groups if self.lanes else ():
            if len(ranks) > 1 and not self.apart(ranks):
                raise ValueError(
                    f"{LANES}=nccl needs a GPU of its own for each of the ranks "
                    f"{', '.join(map(str, ranks))}, which have "
                    f"{', '.join(str(self.gpus[rank]) for rank in ranks)}; give every rank "
                    f"another device (torch.cuda.set_device), or unset {LANES}"
                )


def read_ways() -> dict[str, str]:
    """What the environment says about how things travel."""
    ways = {LANES: os.environ.get(LANES, "gloo"), GRADIENTS: os.environ.get(GRADIENTS, "auto")}
    for name, choices in ((LANES, ("gloo", "nccl")), (GRADIENTS, ("auto", "host"))):
        if ways[name] not in choices:
            raise ValueError(f"{name} must be {' or '.join(choices)}, got {ways[name]!r}")
    return ways


def find_gpu(device: torch.device) -> str | None:
    """The identity of a device that NCCL can reach, None for any other."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def open_group(store: dist.Store, index: int, size: int) -> Any:
    """A group of NCCL that is nobody's default group. Time-outs are the heartbeats' business."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)  # read once, now
    try:
        return dist.ProcessGroupNCCL(store, index, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NearChannel(Channel):
    """A channel for tensors on `device`. Its operations are queued on the current stream, and
    nobody waits for them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        name: str,
        store: SealedStore,
        pulse: Pulse | None,
        nodes: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__(ranks, rank, name=name, store=None, pulse=pulse, nodes=nodes)
        self._last: dist.Work | None = None
        self._group = open_group(
            store.open(f"{name}/near/{'-'.join(map(str, self.ranks))}"), self.index, self.size
        )
        # Another backend may stand in where there is no NCCL: its operations are the host's, and
        # watched there.
        self._by_host = isinstance(self._group, ProcessGroupGloo)
        self._was_cut = False
        if pulse is not None:
            pulse.on_fault(self._cut)
        self._connect(device)

    def abandon(self) -> None:
        """Leave with operations in flight."""
        self._cut()
        super().abandon()

    def close(self) -> None:
        """Nothing is in flight here, but the others may not have read everything: NCCL knows."""
        if self._group is not None and not (self._by_host or self._was_cut):
            self._end(self._group.shutdown, timeout=LEAVING)
        super().close()

    def _cut(self) -> None:
        """End what is in flight on the device: it waits for somebody who will not come."""
        if self._by_host or self._group is None or self._was_cut:
            return
        self._was_cut = True
        if self._last is not None and not self._last.is_completed():
            log.warning(
                "a sum on the device was cut off in flight: steps that were queued behind it used "
                "incomplete gradients, so resume from a checkpoint"
            )
        self._end(self._group.abort, timeout=CUTTING)

    def _end(self, how: Callable[[], None], *, timeout: float) -> None:
        """On a thread of its own, so that a device that does not answer holds up nobody."""
        ending = CommThread("ending")
        ended = ending.submit(how)
        try:
            ended.wait(timeout)
        except TimeoutError:
            log.warning("NCCL did not end its group within %g s and is left behind", timeout)
        except RuntimeError as error:
            log.warning("NCCL ended its group with an error: %s", error)
        ending.close(timeout=0.1)

    def _connect(self, device: torch.device) -> None:
        """NCCL connects in its first operation and waits there for its peers: watch the
        heartbeats meanwhile.
        """

        def greet() -> int:
            here = torch.ones(1, device=device)
            self.sum(here)
            return int(here)

        greeting = CommThread("greeting")
        pending = greeting.submit(greet)
        try:
            while not pending.done():
                try:
                    pending.wait(SLICE.total_seconds())
                except TimeoutError:
                    if self._pulse is not None:
                        self._pulse.check()
            answers = pending.wait()
        except CommError:
            raise
        except RuntimeError as error:
            if self._pulse is not None:
                self._pulse.check()  # it was cut off, because somebody is lost
            raise CommError(
                f"NCCL could not connect the devices of ranks {', '.join(map(str, self.ranks))}: "
                f"{error}. Without {LANES} and with {GRADIENTS}=host everything travels over the "
                "host"
            ) from error
        finally:
            greeting.close(timeout=CUTTING)
        if answers != self.size:
            raise CommError(
                f"{answers} of {self.size} ranks answered on the device; please report this"
            )

    def _finish(self, work: dist.Work) -> None:
        if self._by_host:
            super()._finish(work)
        else:
            work.wait()  # the current stream waits, this thread does not
            self._last = work
