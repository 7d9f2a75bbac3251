"""One block on one rank: prepare the peer, meet the others once, then step until the cluster ends
the process.

A second thread takes the figures by the clock. So nobody is asked to stop at the same step, no peer
gets a barrier that it does not have, and a rank that hangs still reports.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from harness.work import Pace, make_work
from peers import find, load

with suppress(ImportError):
    import pyroute2  # noqa: F401  # counts bytes; imported later, a peer would pay for it

Tell = Callable[..., None]
LOOK = 0.01
"""Seconds between two looks of the watching thread while it waits for a last step."""


def run(order: dict[str, Any], tell: Tell) -> None:
    """Never returns before the cluster ends this process, unless the peer fails."""
    block = order["block"]
    number = order["number"]
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    moments: list[float] = []
    try:
        store = _store(number)
        _init_process_group(store, rank, world, node_only=find(block["peer"]).launcher == "mpirun")
        pace = Pace(
            slower=block["slow"].get(str(rank), 1.0),
            jitter=block["jitter"],
            seed=1000 * block["seed"] + rank,
        )
        work = make_work(block["work"], pace=pace, seed=block["seed"], rank=rank, world=world)
        model = work.make_model()
        options = {**find(block["peer"]).options, **block["options"]}
        prepare = load(block["peer"]).prepare
        for module in find(block["peer"]).imports:
            importlib.import_module(module)
        held = _own_memory()
        begun = time.monotonic()
        trainer = prepare(model, work, **options)
        prepared = time.monotonic() - begun
        start = _meet(store, rank, world)
        watch = Watch(order, start, moments, model, tell, exchanges=trainer.exchanges)
        tell(block=number, started=start)
        watch.begin(prepared, held)
        for loss in work.losses(trainer.model):
            trainer.step(loss)
            pace.next()
            moments.append(time.monotonic() - start)
            watch.snapshot()
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is a finding
        told = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        tell(block=number, failed=told, moments=_round(moments))


def _store(number: int) -> dist.Store:
    """The launcher's store, with keys of this block."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=120)
    )
    return dist.PrefixStore(f"block/{number}", shared)


def _init_process_group(store: dist.Store, rank: int, world: int, *, node_only: bool) -> None:
    """torch's default group: all ranks, or those of this node where MPI connects the nodes."""
    if node_only:
        store = dist.PrefixStore(f"node/{os.environ['GROUP_RANK']}", store)
        rank = int(os.environ["LOCAL_RANK"])
        world = int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def _meet(store: dist.Store, rank: int, world: int) -> float:
    """All are prepared; the moment at which all begin, a little later."""
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(world)])
    if rank == 0:
        store.set("start", repr(time.monotonic() + 0.05))
    start = float(store.get("start"))
    time.sleep(max(0.0, start - time.monotonic()))
    return start


class Watch:
    """Looks at the clocks and counters at the begin and at the end of the timed window, and
    reports.
    """

    def __init__(
        self,
        order: dict[str, Any],
        start: float,
        moments: list[float],
        model: nn.Module,
        tell: Tell,
        exchanges: Callable[[], float | None],
    ) -> None:
        self.exchanges = exchanges
        self.block = order["block"]
        self.number = order["number"]
        self.start = start
        self.moments = moments
        self.model = model
        self.tell = tell
        self.every: float = self.block["snapshots"]
        self.taken: dict[int, torch.Tensor] = {}

    def begin(self, prepared: float, held: int) -> None:
        """From now on the figures are taken in a thread, which ends with the process."""
        threading.Thread(
            target=self._watch, args=(prepared, held), name="watch", daemon=True
        ).start()

    def snapshot(self) -> None:
        """Keep the model now and then: judged afterwards, averaged over the ranks, without stopping
        anybody.

        The first model after a multiple of `every` counts for the next multiple: never for a moment
        before it existed.
        """
        if self.every:
            number = math.ceil(self.moments[-1] / self.every)
            if number not in self.taken:
                self.taken[number] = flat(self.model)

    def _watch(self, prepared: float, held: int) -> None:
        block = self.block
        self._wait(block["warmup"], least=block["warm_steps"])
        before = _counters()
        begin = time.monotonic() - self.start
        first = len(self.moments)
        exchanged = self.exchanges()
        self._wait(begin + block["window"], least=first + block["least_steps"])
        end = time.monotonic() - self.start
        moments = list(self.moments)
        after = _counters()
        completed = self.exchanges()
        if self.every:
            self._save()
        self.tell(
            block=self.number,
            prepared=round(prepared, 3),
            begin=begin,
            end=end,
            steps=len(moments) - first,
            exchanges=None if completed is None else completed - (exchanged or 0.0),
            before=before,
            after=after,
            memory=_own_memory() - held,
            moments=_round(moments),
        )

    def _wait(self, until: float, *, least: int) -> None:
        """Until this moment, and longer for slow peers that have not made the least number of
        steps, and until a period is over where that is wanted; never for ever.
        """
        time.sleep(max(0.0, self.start + until - time.monotonic()))
        limit = self.start + self.block["deadline"]
        multiple = self.block["multiple"]
        while (
            len(self.moments) < least or len(self.moments) % multiple
        ) and time.monotonic() < limit:
            time.sleep(LOOK)

    def _save(self) -> None:
        from safetensors.torch import save_file

        path = Path(self.block["folder"]) / f"{self.number}-{os.environ['RANK']}.safetensors"
        save_file({str(number): vector for number, vector in self.taken.copy().items()}, path)


def flat(model: nn.Module) -> torch.Tensor:
    """Parameters and floating-point buffers as one vector."""
    kept = [t.detach().reshape(-1) for t in model.state_dict().values() if t.is_floating_point()]
    return torch.cat(kept).clone()


def _round(moments: list[float]) -> list[float]:
    """To a tenth of a millisecond; the last two thousand, for a line has its limits."""
    return [round(moment, 4) for moment in moments[-2000:]]


def _counters() -> dict[str, float]:
    """CPU seconds of this process and of those it started, bytes this node has sent."""
    sent = sent_by_node()
    spent = [process.cpu_times() for process in _processes()]
    return {"cpu": sum(times.user + times.system for times in spent), "sent": sent}


def _processes() -> list[psutil.Process]:
    """This one and what it has started: some peers work in daemons."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def sent_by_node() -> int:
    """Bytes that left this node over its cable, in the network that this process is in; 0
    without one.
    """
    if "eth0:" not in Path("/proc/self/net/dev").read_text():
        return 0
    from loosestep.lab.network import sent_through  # late: an optional dependency

    return sent_through("eth0")


def _own_memory() -> int:
    """Bytes that this process and those it started share with nobody: what they have come to own
    since the fork.
    """
    return sum(process.memory_full_info().uss for process in _processes())
