"""Gradients per second on two emulated nodes with a 500 Mbit/s link: no communication, DDP and
loosestep's strategies.

    python benchmarks/daso_throughput.py [--quick]          (Linux, root)

One set of 2x2 processes runs short blocks of every variant in turn, round after round, so that
whatever else the machine does hits all of them alike. A block builds model and optimizer, attaches,
makes warm-up steps, meets at a barrier, and only then is timed; start-up, attach and finish are
not. Ratios are taken within a round; the table shows their median.

Emulated compute: a 4 MB model of 8 layers whose forward and backward sleep, as a CPU does that
waits for an accelerator, 100 ms a step, one third forward; DDP may overlap its communication with
the rest of backward. Real compute: 8 Linear(1024, 1024), 33.6 MB, batch 64, four processes on this
machine's cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import loosestep
from common import (
    Spread,
    here,
    is_rank,
    leave,
    machine,
    publish,
    ratios,
    run_ranks,
    say,
    settings_of_rank,
    table,
)

BANDWIDTH = "500mbit"
FREE = "no communication"
TUNED_DDP = "torch DDP, bucket_cap_mb=1"
DDP = "torch DDP"
WARMUP = (
    # with period 4 an exchange starts at step 4 and has landed by step 7: none is in the air when
    # the clock starts
    7
)
VARIANTS = {
    "emulated": [
        FREE,
        "daso:period=4,delay=1",
        DDP,
        TUNED_DDP,
        "allreduce",
        "localsgd:period=4,replica=rank",
        "daso-paper:period=4",
        "delay-by-one:replica=node",
    ],
    "real": [FREE, "daso:period=4,delay=3", DDP, "daso:period=4,delay=1", "allreduce"],
}


class Sleep(torch.autograd.Function):
    """The identity; takes so many seconds forward, so many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None


class SleepyLayer(nn.Module):
    """A linear layer that takes as long as it is told to."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sleep.apply(self.linear(x), self.seconds / 3, self.seconds * 2 / 3)
        return y.relu()


def emulated_model() -> nn.Module:
    """8 layers, 4.2 MB, 100 ms."""
    return nn.Sequential(*[SleepyLayer(361, 0.1 / 8) for _ in range(8)])


def real_model() -> nn.Module:
    """8 layers, 33.6 MB."""
    return nn.Sequential(
        *[module for _ in range(8) for module in (nn.Linear(1024, 1024), nn.ReLU())]
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # model, width, batch
    "emulated": (emulated_model, 361, 4),
    "real": (real_model, 1024, 64),
}


# One rank -----------------------------------------------------------------------------------------


def work() -> None:
    """Every variant of every round, on this rank."""
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    for round_ in range(settings["rounds"]):
        for compute, steps in settings["steps"].items():
            for variant in settings["variants"][compute]:
                seconds, waited = block(compute, variant, steps=steps, seed=round_)
                mine = torch.tensor([steps / seconds, waited / seconds], dtype=torch.float64)
                total = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(total, mine)
                speed, waiting = torch.stack(total).T
                say(
                    round=round_,
                    compute=compute,
                    variant=variant,
                    speed=speed.sum().item(),
                    waiting=waiting.mean().item(),
                )
    leave()


def block(compute: str, variant: str, *, steps: int, seed: int) -> tuple[float, float]:
    """The seconds for `steps` steps of this rank, and how many of them loosestep knows that it
    waited.
    """
    build, width, batch = MODELS[compute]
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x, y = (torch.randn(batch, width, generator=generator) for _ in range(2))
    trained: nn.Module = model
    if variant in (DDP, TUNED_DDP):
        trained = (
            DistributedDataParallel(model, bucket_cap_mb=1)
            if variant == TUNED_DDP
            else DistributedDataParallel(model)
        )
    run = None if variant in (FREE, DDP, TUNED_DDP) else loosestep.attach(model, optimizer, variant)
    with run or nullcontext():
        train(trained, optimizer, x, y, WARMUP)
        dist.barrier()
        waited = run.stats["wait_seconds"] if run else 0.0
        start = time.monotonic()
        train(trained, optimizer, x, y, steps)
        seconds = time.monotonic() - start
        waited = (run.stats["wait_seconds"] if run else 0.0) - waited
    return seconds, waited


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int
) -> None:
    """An ordinary loop."""
    for _ in range(steps):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# The table ----------------------------------------------------------------------------------------


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    """The tables and what is needed to judge them."""
    parts = [
        "## Throughput: two nodes of two ranks, a link of 500 Mbit/s, "
        f"{len(os.sched_getaffinity(0))} cores\n"
    ]
    titles = {
        "emulated": "Emulated compute, 100 ms a step (sleeps inside the layers), a model of 4.2 MB",
        "real": "Real compute on this machine's cores, 8 Linear(1024, 1024), 33.6 MB, batch 64",
    }
    variants = settings["variants"]
    for compute in settings["steps"]:
        speeds = {
            v: [s["speed"] for s in said if (s["compute"], s["variant"]) == (compute, v)]
            for v in variants[compute]
        }
        waits = {
            v: [s["waiting"] for s in said if (s["compute"], s["variant"]) == (compute, v)]
            for v in variants[compute]
        }
        rows = [
            [
                f"`{variant}`" if variant not in (FREE, DDP, TUNED_DDP) else variant,
                Spread(tuple(speeds[variant])).text(".1f"),
                ratios(speeds[variant], speeds[FREE]).text(".3f"),
                ratios(speeds[variant], speeds[DDP]).text(".2f"),
                f"{Spread(tuple(waits[variant])).median:.0%}"
                if variant not in (FREE, DDP, TUNED_DDP)
                else "",
            ]
            for variant in variants[compute]
        ]
        headers = ["", "gradients/s", "of no communication", "times DDP", "waiting"]
        parts += [f"**{titles[compute]}.**\n", table(headers, rows), ""]
    steps = ", ".join(f"{steps} steps ({compute})" for compute, steps in settings["steps"].items())
    parts.append(
        f"Median and range (least-most) of {settings['rounds']} rounds; in each round every "
        f"variant runs once, {steps} timed after {WARMUP} of warm-up, seed = round; ratios within "
        "a round. Gradients of all four ranks; start-up, attach and finish not counted. Waiting: "
        "share of a rank's time that loosestep's events call waiting.\n"
    )
    parts.append(
        f"Limits: one machine; four processes share its cores, the link is a token bucket. {where}."
    )
    return "\n".join(parts)


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer rounds and steps, nothing written; under two minutes",
    )
    parser.add_argument("--only", choices=list(VARIANTS), help="one kind of compute")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--variants", nargs="+", help="only these, beside no communication and DDP")
    chosen = parser.parse_args()
    steps = {"emulated": 8, "real": 4} if chosen.quick else {"emulated": 24, "real": 12}
    steps = {compute: count for compute, count in steps.items() if chosen.only in (None, compute)}
    wanted = {*(chosen.variants or [v for vs in VARIANTS.values() for v in vs]), FREE, DDP}
    variants = {compute: [v for v in VARIANTS[compute] if v in wanted] for compute in steps}
    settings = {
        "rounds": chosen.rounds or (1 if chosen.quick else 5),
        "steps": steps,
        "variants": variants,
    }
    where = machine()
    print(where, flush=True)
    said = run_ranks(
        __file__,
        settings,
        bandwidth=BANDWIDTH,
        show=lambda s: (
            f"round {s['round']}  {s['compute']:9} {s['variant']:28} {s['speed']:7.1f} gradients/s"
        ),
    )
    publish(
        here("throughput", where),
        section(said, settings, where),
        quick=chosen.quick or chosen.only == "real",
    )


if __name__ == "__main__":
    if is_rank():
        work()
    else:
        main()
