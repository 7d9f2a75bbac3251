"""Stragglers in what is learnt: eight learners, one of them slower, word error rate against seconds.

    python benchmarks/papers_stragglers.py [--quick] [--page] [--data AN4]

Virtual learners: gradients are computed and exchanged by the library for real, seconds are those of a virtual cluster
(100 ms a step, 10 % jitter, 10 Gbit/s). AN4, LSTM, SGD with momentum; all strategies spend the same number of gradients of
all learners together, and the rate follows that number. In the end every learner's own model is kept, so that the average
can be taken with and without the slow one.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loosestep
from loosestep.recipes.acoustic import AcousticRecipe, AcousticTask
from loosestep.recipes.schedules import OneCycle, apply

LINES = Path(__file__).with_name("results") / "papers-stragglers.jsonl"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "an4"
LEARNERS, SLOW = 8, 7
OPTIONS = {
    "layers": 2, "cells": 64, "dropout": 0.1, "noise": 0.2, "optimizer": "sgd", "batch": 8,
    "weight_decay": 1e-4, "stack": 4,
}  # fmt: skip
STRATEGIES = {
    "synchronous": "allreduce",
    "delay-by-one": "delay-by-one:replica=rank",
    "daso": "daso:period=4,delay=1",
    "ring": "adpsgd:graph=ring",
    "random-ring": "adpsgd:graph=random-ring",
}
FREE = (
    "ring",
    "random-ring",
)  # a slow learner delays nobody; elsewhere it stretches every step, and changes nothing else
RATE = 0.6
Result = dict[str, Any]


def train(task: AcousticTask, name: str, factor: int, total: int) -> Result:
    """One run: quality on the way and in the end, seconds, exchanges a step."""
    points: list[dict[str, float]] = []
    last: dict[int, dict[str, torch.Tensor]] = {}
    exchanges: dict[int, tuple[int, int]] = {}

    def learner(rank: int) -> dict[str, float]:
        model = task.make_model()
        optimizer = task.training.make_optimizer(model, lr=RATE)
        schedule = OneCycle(total)
        stream = task.stream(learner=rank, learners=LEARNERS)
        every = total // LEARNERS // 8
        with loosestep.attach(model, optimizer, STRATEGIES[name]) as run:
            step = 0
            while run.global_steps < total:
                apply(schedule, optimizer, lr=RATE, gradients=run.global_steps)
                loss = task.loss(model, next(stream))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                step += 1
                if step % every == 0 and (rank == 0 or name not in FREE):
                    made = run.global_steps
                    with run.consensus():
                        if rank == 0:
                            judged = task.evaluate(model)
                            points.append(
                                {"seconds": run.trace.clock(), "gradients": made, **judged}
                            )
            last[rank] = copy.deepcopy(model.state_dict())
            exchanges[rank] = run.stats["exchanges"], step
        return task.evaluate(model) if rank == 0 else {}

    cluster = loosestep.Cluster(
        bandwidth="10gbit", latency="50us", compute="100ms", jitter=0.1, slow={SLOW: factor}
    )
    ran = loosestep.simulate(learner, ranks=LEARNERS, ranks_per_node=2, cluster=cluster)

    def judge(ranks: list[int]) -> float:
        model = task.make_model()
        mean = {key: sum(last[rank][key] for rank in ranks) / len(ranks) for key in last[0]}
        model.load_state_dict(mean)
        return task.evaluate(model)["wer"]

    others = [rank for rank in range(LEARNERS) if rank != SLOW]
    steps = sum(made for _, made in exchanges.values())
    return {
        "strategy": name, "slow": factor, "total": total, "seconds": ran.seconds, "points": points, "end": ran.results[0],
        "steps": [exchanges[rank][1] for rank in range(LEARNERS)],
        "exchanges_a_step": sum(count for count, _ in exchanges.values()) / steps,
        "wer_all": judge(list(range(LEARNERS))), "wer_without_slow": judge(others),
        "wer_slow_alone": judge([SLOW]), "wer_fast_alone": judge([0]),
    }  # fmt: skip


def run(quick: bool, data: Path, *, one: bool = False) -> list[Result]:
    """All runs, or the next one; those known already are not made again."""
    torch.set_num_threads(1)
    task = AcousticRecipe().build(
        {**OPTIONS, **({"cells": 16} if quick else {})}, data=data, seed=0
    )
    total = 24 * LEARNERS if quick else 18 * task.order.batches_per_epoch // LEARNERS * LEARNERS
    known = (
        [json.loads(line) for line in LINES.read_text().splitlines()]
        if LINES.exists() and not quick
        else []
    )
    for name in STRATEGIES:
        for factor in (1, 3, 10) if name in FREE else (1,):
            wanted = {"strategy": name, "slow": factor, "total": total}
            if any(wanted.items() <= line.items() for line in known):
                continue
            result = train(task, name, factor, total)
            known.append(result)
            shown = {key: value for key, value in result.items() if key not in ("points", "steps")}
            print(json.dumps(shown), flush=True)
            if not quick:
                with LINES.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            if one:
                return known
    return known


def main() -> None:
    """Run, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of a small network, nothing written"
    )
    parser.add_argument("--one", action="store_true", help="make the next run only")
    parser.add_argument("--data", type=Path, default=DATA)
    chosen = parser.parse_args()
    run(chosen.quick, chosen.data, one=chosen.one)


if __name__ == "__main__":
    main()
