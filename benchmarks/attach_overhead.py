"""What attaching costs per step: hooks, checks and events, without and with a second rank on the
node.

    python benchmarks/attach_overhead.py [--quick]

Blocks of steps of a tiny model, plain and attached in turn, so that the difference is loosestep's
own work and not arithmetic or traffic. The bar is 1 % of a step of 10 ms: 100 microseconds.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loosestep
from common import (
    Spread,
    is_rank,
    leave,
    machine,
    options,
    publish,
    run_ranks,
    say,
    settings_of_rank,
    table,
)
from loosestep.events import Trace

PLAIN = "plain loop"
DDP = "torch DDP"
VARIANTS = (
    PLAIN,
    DDP,
    "localsgd:period=1000000",
    "allreduce",
    "daso:period=4,delay=1",
    "daso:period=1000000,delay=1",
)
STEP = 10e-3


def work() -> None:
    """Blocks of every variant in turn, then the price of an event."""
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    for _ in range(settings["rounds"]):
        for variant in VARIANTS:
            seconds, events = block(variant, settings["steps"])
            say(world=dist.get_world_size(), variant=variant, seconds=seconds, events=events)
        say(
            world=dist.get_world_size(),
            variant="one event",
            seconds=price_of_an_event(),
            events=1.0,
        )
    leave()


def block(variant: str, steps: int) -> tuple[float, float]:
    """Seconds and events per step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = torch.arange(16) % 10
    run = None if variant in (PLAIN, DDP) else loosestep.attach(model, optimizer, variant)
    trained: nn.Module = DistributedDataParallel(model) if variant == DDP else model
    with run or nullcontext():
        train(trained, optimizer, x, y, steps // 10 + 8, run)
        dist.barrier()
        before = len(run.trace.events) if run else 0
        start = time.perf_counter()
        train(trained, optimizer, x, y, steps, run)
        seconds = time.perf_counter() - start
        events = (len(run.trace.events) if run else 0) - before
    return seconds / steps, events / steps


def train(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, steps: int, run: Any
) -> None:
    """An ordinary loop."""
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.observe(loss)


def price_of_an_event(count: int = 20_000) -> float:
    """Seconds for one `emit`."""
    trace = Trace()
    start = time.perf_counter()
    for step in range(count):
        trace.emit("step", step=step)
    return (time.perf_counter() - start) / count


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    """One table: worlds and variants."""
    rows = []
    for world in (1, 2):
        plain = [s["seconds"] for s in said if (s["world"], s["variant"]) == (world, PLAIN)]
        for variant in (*VARIANTS, "one event"):
            mine = [s for s in said if (s["world"], s["variant"]) == (world, variant)]
            micro = Spread(tuple(1e6 * s["seconds"] for s in mine))
            base = [0.0] * len(mine) if variant == "one event" else plain
            added = Spread(tuple(1e6 * (s["seconds"] - b) for s, b in zip(mine, base, strict=True)))
            named = variant if variant in (PLAIN, DDP, "one event") else f"`{variant}`"
            events = f"{mine[0]['events']:.2f}" if variant not in (PLAIN, DDP) else ""
            extra = (
                ["", ""]
                if variant == PLAIN
                else [added.text(".1f"), f"{added.median / 1e6 / STEP:.2%}"]
            )
            rows.append(
                [f"{world} rank{'s' * (world > 1)}: {named}", micro.text(".1f"), *extra, events]
            )
    headers = ["", "microseconds a step", "added", "of a 10 ms step", "events a step"]
    return "\n".join(
        [
            "## What attaching costs a step\n",
            table(headers, rows),
            "",
            f"Median and range (least-most) of {settings['rounds']} interleaved rounds of "
            f"{settings['steps']} steps; a model of 4,810 parameters. With two ranks on one node "
            "the rows other than local SGD contain a real exchange between two processes on "
            "every step, as DDP's does.\n",
            f"{where}.",
        ]
    )


def main() -> None:
    """Parse, run, publish."""
    quick = options(__doc__, quick="fewer steps").parse_args().quick
    settings = {"rounds": 2 if quick else 5, "steps": 200 if quick else 1000}
    where = machine()
    print(where, flush=True)
    said = []
    for ranks in (1, 2):
        said += run_ranks(
            __file__,
            settings,
            nodes=1,
            ranks_per_node=ranks,
            show=lambda s: (
                f"{s['world']} ranks  {s['variant']:28} {1e6 * s['seconds']:8.1f} microseconds"
            ),
        )
    publish("attach", section(said, settings, where), quick=quick)


if __name__ == "__main__":
    if is_rank():
        work()
    else:
        main()
