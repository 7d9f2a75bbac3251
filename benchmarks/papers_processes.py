"""One cell of the large-batch grid on four real processes: a small and a large batch, synchronous and the randomized ring.

    python benchmarks/papers_processes.py [--quick] [--data AN4]

AN4 as in `papers_large_batches.py` with a network of half the cells and half the epochs, for processors: two nodes of two ranks
on the loopback. Every run is a call of its own; those in the lines already are not made again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import loosestep
from common import is_rank, leave, options, run_ranks, say, settings_of_rank
from loosestep.recipes.acoustic import AcousticRecipe

LINES = Path(__file__).with_name("results") / "papers-processes.jsonl"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "an4"
OPTIONS = {"layers": 2, "cells": 64, "dropout": 0.1, "optimizer": "sgd", "weight_decay": 1e-4}
EPOCHS = 20
CELLS = (
    (16, 0.4),
    (64, 1.6),
)  # total batch and rate, of which the first eighth of the training is warm-up
STRATEGIES = {"synchronous": "allreduce", "random-ring": "adpsgd:graph=random-ring"}


def work() -> None:
    """One run, on this rank."""
    settings: dict[str, Any] = settings_of_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    given = {**OPTIONS, "batch": settings["batch"] // world}
    task = AcousticRecipe().build(given, data=Path(settings["data"]), seed=0)
    total = round(settings["epochs"] * task.order.batches_per_epoch)
    model = task.make_model()
    optimizer = task.training.make_optimizer(model, lr=settings["rate"])
    batches = task.stream(learner=rank, learners=world)
    dist.barrier()
    start = time.monotonic()
    with loosestep.attach(model, optimizer, STRATEGIES[settings["strategy"]]) as run:
        while run.global_steps < total:
            optimizer.param_groups[0]["lr"] = settings["rate"] * factor(run.global_steps / total)
            optimizer.param_groups[-1]["lr"] = optimizer.param_groups[0]["lr"]
            loss = task.loss(model, next(batches))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        exchanges = run.stats["exchanges"] / max(1, run.stats["steps"])
    seconds = time.monotonic() - start
    judged = task.evaluate(model) if rank == 0 else {}
    dist.barrier()
    say(**settings, exchanges_a_step=exchanges, seconds=seconds, **judged)
    leave()


def factor(at: float) -> float:
    """Ten sixteenths of the training up to the rate, then 1/sqrt(2) every further sixteenth."""
    return 1 / 16 + 15 / 16 * at / 0.625 if at < 0.625 else float(2 ** (-(at - 0.625) * 8))


def main() -> None:
    """The runs that are missing."""
    parser = options(__doc__, quick="half an epoch")
    parser.add_argument("--data", type=Path, default=DATA)
    chosen = parser.parse_args()
    known = (
        [json.loads(line) for line in LINES.read_text().splitlines()]
        if LINES.exists() and not chosen.quick
        else []
    )
    for batch, rate in CELLS:
        for strategy in STRATEGIES:
            wanted = {
                "batch": batch,
                "rate": rate,
                "strategy": strategy,
                "epochs": 0.5 if chosen.quick else EPOCHS,
            }
            if any(wanted.items() <= line.items() for line in known):
                continue
            said = run_ranks(__file__, {**wanted, "data": str(chosen.data)})
            said[0].pop("data")
            if not chosen.quick:
                with LINES.open("a") as file:
                    file.write(json.dumps(said[0]) + "\n")


if __name__ == "__main__":
    if is_rank():
        work()
    else:
        main()
