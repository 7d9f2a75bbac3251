"""What gossip costs a core: eight learners that compute for real, a model of 1 MB, about ten
exchanges a second each.

    python benchmarks/gossip_cpu.py [--quick]

CPU seconds of the communication threads (ours and ZeroMQ's) and of folding, per second; then the
CPU of a whole process that is attached and does nothing. Eight processes share this machine's
cores.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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

# seconds a step lasts, as far as the cores allow: ten exchanges a second, or more
LEARNERS = 8
MEGABYTES = 1
STEP = 0.09
GOSSIP = ("adpsgd:graph=ring,slowdown=1.0", "adpsgd:graph=random-ring,slowdown=1.0")
IDLE = "idle"


def work() -> None:
    settings = settings_of_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for round_ in range(settings["rounds"]):
        for variant in (*GOSSIP, IDLE):
            mine = torch.tensor(block(variant, settings["seconds"]), dtype=torch.float64)
            everybody = [torch.empty_like(mine) for _ in range(LEARNERS)]
            dist.all_gather(everybody, mine)
            rows = torch.stack(everybody)
            say(
                round=round_,
                variant=variant,
                mean=rows.mean(0).tolist(),
                worst=rows.max(0).values.tolist(),
            )
    leave()


def block(variant: str, seconds: float) -> list[float]:
    """Per second, of this rank: steps, exchanges begun, CPU of communication threads, CPU of
    folding, CPU of the process.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(MEGABYTES << 18))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = loosestep.attach(model, optimizer, GOSSIP[0] if variant == IDLE else variant)
    burden = torch.randn(192, 192)
    other = torch.randn(192, 192)
    dist.barrier()
    before = run.stats
    cpu = time.process_time()
    begin = time.monotonic()
    steps = 0
    while (now := time.monotonic()) < begin + seconds:
        if variant == IDLE:
            time.sleep(begin + seconds - now)
            continue
        used = time.thread_time()
        # all learners together keep one core busy
        while time.thread_time() - used < STEP / LEARNERS:
            burden = (burden @ other).tanh_()  # bounded: a product that grows would end as NaN
        (model[0] * float(burden[0, 0] * 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        time.sleep(max(0.0, begin + steps * STEP - time.monotonic()))
    elapsed = time.monotonic() - begin
    after = run.stats
    process = time.process_time() - cpu
    folding = after["fold_cpu_seconds"] - before["fold_cpu_seconds"]
    threads = after["communication_cpu_seconds"] - before["communication_cpu_seconds"] - folding
    begun = after["exchanges"] - before["exchanges"]
    run.finish()
    return [value / elapsed for value in (steps, begun, threads, folding, process)]


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    """One row a variant."""
    rows = []
    for variant in (*GOSSIP, IDLE):
        lines = [line for line in said if line["variant"] == variant]

        def column(index: int, which: str, form: str, lines: list[dict[str, Any]] = lines) -> str:
            return Spread(tuple(line[which][index] for line in lines)).text(form)

        rows.append(
            [
                f"`{variant}`" if variant != IDLE else "attached, idle",
                *(column(index, "mean", ".1f") for index in (0, 1)),
                column(2, "mean", ".1%"),
                column(2, "worst", ".1%"),
                *(column(index, "mean", ".1%") for index in (3, 4)),
            ]
        )
    header = [
        "",
        "steps/s",
        "exchanges/s",
        "communication threads",
        "of the busiest rank",
        "folding",
        "whole process",
    ]
    return (
        f"## Gossip: CPU, {LEARNERS} learners that compute, a model of {MEGABYTES} MB\n\n"
        f"{table(header, rows)}\n\nPer rank, in percent of a core; median and range of "
        f"{settings['rounds']} rounds of {settings['seconds']:g} s. Exchanges are those a learner "
        f"began; it answers as many. `slowdown=1.0` switches the pace controller off. {where}."
    )


def main() -> None:
    quick = options(__doc__, quick="one short round").parse_args().quick
    settings = {"rounds": 1 if quick else 3, "seconds": 3.0 if quick else 6.0}
    where = machine()
    said = run_ranks(
        __file__,
        settings,
        nodes=LEARNERS,
        ranks_per_node=1,
        show=lambda s: (
            f"round {s['round']}  {s['variant']:<44} {s['mean'][1]:5.1f} exchanges/s  "
            f"communication {s['mean'][2]:.1%} of a core"
        ),
    )
    publish("gossip-cpu", section(said, settings, where), quick=quick)


if __name__ == "__main__":
    work() if is_rank() else main()
