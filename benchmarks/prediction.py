"""The simulator's timing-only predictions against the lab: step time by strategy, bandwidth and
straggler.

    python benchmarks/prediction.py [--quick] [--stretch N]          (Linux, root)

Takes about seven minutes and a machine with nothing else to do; on a busy one `--quick --stretch 5`
makes compute and link five times slower, so that the rest matters less, and prints without writing.

Two nodes of two ranks in network namespaces. Compute is emulated (sleeps inside the layers, 100 ms
a step, a third of it forward). In every round each rank first measures its machine, whatever the
strategy: a step without communication, one pass over memory, a message around all ranks, a meeting
of a node's ranks in shared memory, what the link really carries. Then every strategy makes a few
steps. The prediction gets the medians of the former and is compared with the median of the latter;
nothing is fitted to a strategy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import loosestep
from common import (
    SIMULATED,
    Spread,
    here,
    is_rank,
    leave,
    machine,
    publish,
    run_ranks,
    say,
    settings_of_rank,
    table,
)
from daso_throughput import SleepyLayer
from loosestep.core.collectives.shared_memory import forget, open_slots
from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.machine import Machine
from loosestep.sim.predict.timing import predict

LAYERS = 8
WIDTH = 256
COMPUTE = 0.1
SLOWER = 3.0
PERIOD = 4
MEGABITS = [100, 300, 1000]
FREE = "no communication"
VARIANTS = [
    FREE,
    "allreduce",
    f"localsgd:period={PERIOD},replica=rank",
    f"daso:period={PERIOD},delay=1",
    "delay-by-one:replica=node",
    "adpsgd:graph=random-ring",
]
STRAGGLER = 3
# an exchange of period 4 that started at step 4 has landed: none is in the air when the clock
# starts
WARMUP = 7
SIZES = [WIDTH * WIDTH * 4, WIDTH * 4] * LAYERS
TARGET = 0.10


# One rank -----------------------------------------------------------------------------------------


def work() -> None:
    """Every round: the machine, then every variant without and with a straggler."""
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    lanes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for round_ in range(settings["rounds"]):
        say(round=round_, variant="machine", **measure(lanes[dist.get_rank() % 2], round_))
        for slow in (False, True):
            for variant in VARIANTS:
                steps = settings["slow_steps" if slow else "steps"]
                factor = SLOWER if slow and dist.get_rank() == STRAGGLER else 1.0
                seconds = everybody(
                    block(
                        variant,
                        steps=steps,
                        stretch=settings["stretch"],
                        factor=factor,
                        seed=round_,
                    )
                )
                say(round=round_, variant=variant, slow=slow, seconds=seconds)
    leave()


def everybody(mine: float) -> list[float]:
    """This figure of every rank."""
    figures = [torch.empty(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(figures, torch.tensor([mine], dtype=torch.float64))
    return [figure.item() for figure in figures]


class Calm:
    """Nobody is lost in a benchmark."""

    def check(self) -> None:
        """Nothing to say."""

    def suspect(self) -> None:
        """Nothing to fear."""


def measure(lane: Any, round_: int) -> dict[str, float]:
    """What every strategy is made of, while all ranks do the same: seconds, cores per rank, the
    payload of the link.
    """
    rank = dist.get_rank()
    bytes_ = sum(SIZES)
    row = torch.zeros(10, dtype=torch.float64)
    rows = torch.zeros(40, dtype=torch.float64)
    vector = torch.zeros(bytes_ // 4)
    swapped = torch.zeros(bytes_ // 4)
    store = dist.PrefixStore(
        f"meeting/{round_}/{rank // 2}", dist.distributed_c10d._get_default_store()
    )
    slots = open_slots(store, index=rank % 2, size=2)
    assert slots is not None, "the lab needs /dev/shm"

    def header() -> None:
        dist.all_gather_into_tensor(rows, row)

    def pair() -> None:
        header()
        dist.all_reduce(vector[: bytes_ // 8], group=lane)
        header()

    def mean() -> None:
        header()
        dist.all_to_all_single(swapped, vector)
        dist.all_gather_into_tensor(swapped, vector[: bytes_ // 16])
        header()

    figures = processor() | {
        "message": repeated(header, 9) / 3,
        "meeting": repeated(lambda: slots.meeting.meet(Calm()), 9),
        "pair": repeated(pair, 3),
        "mean": repeated(mean, 3),
    }
    forget(store, rank % 2)
    slots.meeting.close()
    return figures


# Averages of two lanes and of all ranks, between two headers: what follows bytes waits in the same
# queues as they did. models that leave a node, messages one after another
LINK = {"pair": (1.0, 2 + 6), "mean": (1.75, 4 + 6)}


def processor() -> dict[str, float]:
    """Bytes per second of processor time in short bursts over memory that no cache holds, and
    the share of a core they got.
    """
    cold = [torch.zeros(1 << 20) for _ in range(16)]  # 64 MB
    wall = cpu = 0.0
    for burst in range(12):
        dist.barrier()
        time.sleep(0.01)
        begun = time.monotonic()
        used = time.thread_time()
        for index in range(2):
            cold[(2 * burst + index) % 8].copy_(cold[8 + (2 * burst + index) % 8])
        wall = wall + time.monotonic() - begun
        cpu = cpu + time.thread_time() - used
    return {
        "copy": 12 * 2 * 4 * (1 << 20) / median(everybody(cpu)),
        "cores": median(everybody(cpu / wall)),
    }


def repeated(operation: Callable[[], Any], times: int) -> float:
    """The median of the time from the last rank's start to the last rank's end, by the clock
    they share.
    """
    operation()
    taken = []
    for _ in range(times):
        dist.barrier()
        start = time.monotonic()
        operation()
        end = time.monotonic()
        taken.append(max(everybody(end)) - max(everybody(start)))
    return median(taken)


def block(variant: str, *, steps: int, stretch: float, factor: float, seed: int) -> float:
    """Seconds per step of this rank. Gossip, and no communication, run for a time; others make
    so many steps.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(*[SleepyLayer(WIDTH, COMPUTE / LAYERS) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x, y = (torch.randn(4, WIDTH, generator=generator) for _ in range(2))

    def step() -> None:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    alone = variant == FREE or variant.startswith("adpsgd")
    with nullcontext() if variant == FREE else loosestep.attach(model, optimizer, variant):
        pace(model, 0.1)
        for _ in range(WARMUP):
            step()
        pace(model, stretch * factor)
        dist.barrier()
        times = [time.monotonic()]
        while times[-1] < times[0] + steps * stretch * COMPUTE if alone else len(times) <= steps:
            step()
            times.append(time.monotonic())
        dist.barrier()
    group = 1 if alone else PERIOD
    marks = times[::group]
    return median(after - before for before, after in pairwise(marks)) / group


def pace(model: nn.Sequential, factor: float) -> None:
    """How long the layers sleep, as a multiple of what they are built for."""
    for layer in model:
        layer.seconds = factor * COMPUTE / LAYERS  # type: ignore[assignment]


# Prediction and table -----------------------------------------------------------------------------


def lab_machine(said: list[dict[str, Any]], bandwidth: str) -> Machine:
    """The machine as the lab measured it at this bandwidth."""
    lines = [line for line in said if line["variant"] == "machine"]
    figure = {
        name: median(line[name] for line in lines)
        for name in lines[0]
        if name not in ("round", "variant")
    }
    rate = Cluster(bandwidth=bandwidth).bytes_per_second
    reached = {  # of the link's rate
        name: models * sum(SIZES) / rate / (figure[name] - messages * figure["message"])
        for name, (models, messages) in LINK.items()
    }
    return Machine(
        copy=figure["copy"],
        cores=min(1.0, figure["cores"]),
        message=figure["message"],
        meeting=figure["meeting"],
        payload=min(1.0, reached["pair"]),
        crowd=min(1.0, reached["mean"] / reached["pair"]),
    )


def compare(said: list[dict[str, Any]], bandwidth: str) -> list[dict[str, Any]]:
    """Predicted against measured seconds per step, for every variant."""
    where = lab_machine(said, bandwidth)
    lines = []
    for slow in (False, True):
        cases = {
            v: [s["seconds"] for s in said if s["variant"] == v and s.get("slow") == slow]
            for v in VARIANTS
        }
        compute = [median(times) for times in zip(*cases[FREE], strict=True)]
        cluster = Cluster(
            bandwidth=bandwidth,
            latency="30us",
            traces={rank: [seconds] for rank, seconds in enumerate(compute)},
        )
        for variant in VARIANTS[1:]:
            measured = Spread(tuple(seconds_per_step(variant, times) for times in cases[variant]))
            predicted = predict(
                variant,
                loosestep.Topology.grid(2, 2),
                cluster,
                parameters=SIZES,
                steps=200,
                machine=where,
            ).seconds_per_step
            lines.append(
                {
                    "bandwidth": bandwidth,
                    "slow": slow,
                    "variant": variant,
                    "measured": measured,
                    "predicted": predicted,
                    "error": predicted / measured.median - 1,
                }
            )
    return lines


def seconds_per_step(variant: str, times: list[float]) -> float:
    """Of all ranks together: gossip counts every gradient, collective strategies go at the pace
    of the last rank.
    """
    return (
        len(times) / sum(1 / seconds for seconds in times)
        if variant.startswith("adpsgd")
        else max(times)
    )


def section(
    lines: list[dict[str, Any]], machines: dict[str, Machine], settings: dict[str, Any], where: str
) -> str:
    """The table and what is needed to judge it."""
    rows = [
        [
            f"{line['bandwidth'].removesuffix('mbit')} Mbit/s"
            + (", one rank 3x slower" if line["slow"] else ""),
            f"`{line['variant']}`",
            f"{1000 * line['predicted']:.0f}",
            Spread(tuple(1000 * value for value in line["measured"].values)).text(".0f"),
            f"{line['error']:+.1%}",
        ]
        for line in lines
    ]
    errors = sorted(abs(line["error"]) for line in lines)
    within = sum(error <= TARGET for error in errors)
    head = ["link", "strategy", "predicted ms a step", "measured ms a step", "error"]
    figures = "; ".join(
        f"{bandwidth}: {m.copy / 1e9:.1f} GB/s of copying, {m.cores:.2f} cores a rank, "
        f"{m.payload:.2f} of the link's rate ({m.payload * m.crowd:.2f} among four), "
        f"{1e6 * m.message:.0f} us a message, {1e6 * m.meeting:.0f} us a meeting"
        for bandwidth, m in machines.items()
    )
    return (
        "## Predicted and measured: two nodes of two ranks on a machine of "
        f"{where.partition(' cores')[0].rpartition(' ')[2]} cores\n\n{table(head, rows)}\n\n"
        f"{within} of {len(lines)} within {TARGET:.0%}; median error {median(errors):.1%}, "
        f"largest {errors[-1]:.1%}. Measured: median and range of {settings['rounds']} rounds, "
        f"{settings['steps']} steps each ({settings['slow_steps']} with a straggler) after "
        f"{WARMUP} of warm-up, the median group of a period's steps; emulated compute of "
        f"{1000 * settings['stretch'] * COMPUTE:.0f} ms, a model of {sum(SIZES) / 1e6:.1f} MB. A "
        "step is ranks / (gradients per second), so that gossip with a straggler has one too. "
        "Predicted: `loosestep.sim.predict.timing.predict` with each rank's step time without "
        f"communication and the machine as measured in the same rounds ({figures}). {where}."
    )


def main() -> None:
    """Parse, run, predict, publish."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="everything so many times slower, on a busy machine",
    )
    parser.add_argument("--rounds", type=int, help="instead of three")
    parser.add_argument(
        "--rate",
        type=int,
        choices=MEGABITS,
        help="measure at this one, in Mbit/s, and only --save it",
    )
    parser.add_argument("--save", type=Path, help="write what was measured to this file")
    parser.add_argument(
        "--read", type=Path, nargs="*", default=[], help="files of --save, instead of measuring"
    )
    chosen = parser.parse_args()
    if not chosen.stretch >= 1:
        parser.error(f"--stretch must be at least 1, got {chosen.stretch:g}")
    steps = {"steps": 8, "slow_steps": 4} if chosen.quick else {"steps": 12, "slow_steps": 8}
    settings = {
        "rounds": chosen.rounds or (1 if chosen.quick else 3),
        "stretch": chosen.stretch,
        **steps,
    }
    where = machine()
    measured = {}
    for file in chosen.read:
        saved = json.loads(file.read_text())
        where = saved["where"]
        settings = saved["settings"]
        measured |= saved["measured"]
    for rate in [] if chosen.read else [chosen.rate] if chosen.rate else MEGABITS:
        bandwidth = f"{rate / chosen.stretch:g}mbit"
        print(bandwidth, flush=True)
        measured[bandwidth] = run_ranks(__file__, settings, bandwidth=bandwidth, show=show)
    if chosen.save is not None:
        chosen.save.write_text(
            json.dumps({"where": where, "settings": settings, "measured": measured})
        )
    if chosen.rate is not None:
        return
    lines = [line for bandwidth, said in measured.items() for line in compare(said, bandwidth)]
    machines = {bandwidth: lab_machine(said, bandwidth) for bandwidth, said in measured.items()}
    publish(
        here("prediction", where),
        section(lines, machines, settings, where),
        quick=chosen.quick,
        path=SIMULATED,
    )


def show(line: dict[str, Any]) -> str:
    """A line of progress."""
    if line["variant"] == "machine":
        times = "  ".join(
            f"{name} {1000 * line[name]:.2f} ms" for name in ("message", "meeting", *LINK)
        )
        return f"copy {1e-9 * line['copy']:.1f} GB/s  cores {line['cores']:.2f}  {times}"
    times = "  ".join(f"{1000 * seconds:6.1f}" for seconds in line["seconds"])
    return (
        f"round {line['round']}  {'straggler' if line['slow'] else '':9}  {line['variant']:28} "
        f"{times} ms a step"
    )


if __name__ == "__main__":
    work() if is_rank() else main()
