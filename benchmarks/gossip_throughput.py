"""Gradients per second of gossip against no communication at all, with equal learners and with one
ten times slower.

    python benchmarks/gossip_throughput.py [--quick]

Four ranks on the loopback of this machine; a step sleeps for 20 ms, as a CPU does that waits for an
accelerator. One set of processes runs short blocks of every variant in turn, round after round;
ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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

FREE = "no communication"
DDP = "torch DDP"
GOSSIP = ["adpsgd:graph=ring", "adpsgd:graph=random-ring", "adpsgd:graph=pairs"]
CASES = [(1, [*GOSSIP, DDP]), (4, [GOSSIP[0], DDP]), (32, [GOSSIP[0], DDP])]  # MB, variants
# how much longer: one exchange of a large model is seconds of allowance
STRETCH = {1: 1.0, 4: 2.0, 32: 6.0}
COMPUTE = 0.02
SLOWER = 10
QUIET_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""Memory that a step has freed stays with the process: whether the C library hands it back to the
kernel on every step is a matter of chance, and costs a step of 32 MB a sixth of its time.
"""


def work() -> None:
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    for round_ in range(settings["rounds"]):
        for megabytes, variants in CASES:
            for slow in (1, SLOWER):
                for variant in (FREE, *variants):
                    if slow > 1 and variant == DDP and megabytes > 1:
                        continue
                    seconds = settings["seconds"] * (STRETCH[megabytes] if variant != DDP else 1)
                    result = block(variant, megabytes, slow=slow, seconds=seconds)
                    say(round=round_, megabytes=megabytes, slow=slow, variant=variant, **result)
    leave()


def block(variant: str, megabytes: int, *, slow: int, seconds: float) -> dict[str, float]:
    """Gradients of all ranks per second over a stretch of time, and the exchanges that a learner
    began per step in it.
    """
    rank = dist.get_rank()
    model = nn.ParameterList([nn.Parameter(torch.zeros(megabytes << 17)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = loosestep.attach(model, optimizer, variant) if variant.startswith("adpsgd") else None
    trained: Any = DistributedDataParallel(Product(model)) if variant == DDP else Product(model)
    pause = COMPUTE * (slow if rank == 3 else 1)
    dist.barrier()
    # the first part is warm-up: the first exchange comes at once
    begin = time.monotonic() + 0.3 * seconds
    steps = late = before = 0
    while (now := time.monotonic()) < begin + seconds or variant == DDP:
        if run is not None and late == 0:
            before = run.stats["exchanges"]
        trained(float(rank)).backward()
        time.sleep(pause)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        late += now >= begin
        # DDP needs every rank to make as many steps: stop together, by count
        if variant == DDP and steps >= int(1.3 * seconds / (COMPUTE * slow)):
            break
    elapsed = time.monotonic() - begin if variant == DDP else seconds
    exchanges = run.stats["exchanges"] - before if run is not None else 0
    mine = torch.tensor([late / max(elapsed, 1e-9), exchanges / max(late, 1)], dtype=torch.float64)
    if run is not None:
        run.finish()
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    total = torch.stack(everybody)
    return {"speed": total[:, 0].sum().item(), "rate": total[:, 1].mean().item()}


class Product(nn.Module):
    """The least that touches every parameter."""

    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, factor: float) -> torch.Tensor:
        return sum(((p * factor).sum() for p in self.params), start=torch.zeros(()))


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    def speeds(megabytes: int, slow: int, variant: str, what: str = "speed") -> list[float]:
        return [
            line[what]
            for line in said
            if (line["megabytes"], line["slow"], line["variant"]) == (megabytes, slow, variant)
        ]

    rows = []
    for megabytes, variants in CASES:
        for slow in (1, SLOWER):
            base = speeds(megabytes, slow, FREE)
            for variant in (FREE, *variants):
                values = speeds(megabytes, slow, variant)
                if not values:
                    continue
                rate = (
                    ""
                    if not variant.startswith("adpsgd")
                    else f"{Spread(tuple(speeds(megabytes, slow, variant, 'rate'))).median:.3f}"
                )
                rows.append(
                    [
                        f"{megabytes} MB, " + ("equal" if slow == 1 else "one 10x slower"),
                        f"`{variant}`" if rate else variant,
                        Spread(tuple(values)).text(".0f"),
                        ratios(values, base).text(".3f"),
                        rate,
                    ]
                )
    header = [
        "model, learners",
        "variant",
        "gradients/s",
        "of no communication",
        "exchanges per step",
    ]
    return (
        f"## Gossip: four learners, {COMPUTE * 1000:.0f} ms of emulated compute, "
        f"{len(os.sched_getaffinity(0))} cores\n\n{table(header, rows)}\n\nMedian and range of "
        f"{settings['rounds']} rounds of {settings['seconds']:g} s (4 MB: twice, 32 MB: six times "
        "as long) after a warm-up; ratios within a round. Models that a learner exchanged per "
        f"step, as often as steps bear it (3 % slower at most); it answers as many. One machine, loopback. {where}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--rounds", type=int, help="instead of three")
    chosen = parser.parse_args()
    quick = chosen.quick
    settings = {"rounds": chosen.rounds or (1 if quick else 3), "seconds": 1.0 if quick else 2.0}
    where = machine()
    os.environ |= QUIET_MEMORY
    said = run_ranks(
        __file__,
        settings,
        nodes=4,
        ranks_per_node=1,
        show=lambda line: (
            f"round {line['round']}  {line['megabytes']:>2} MB  slow {line['slow']:>2}x  "
            f"{line['variant']:<28}{line['speed']:8.1f} gradients/s  {line['rate']:.3f} exchanges "
            "a step"
        ),
    )
    publish(here("gossip", where), section(said, settings, where), quick=quick)


if __name__ == "__main__":
    work() if is_rank() else main()
