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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loosestep
from common import table
from loosestep.recipes.acoustic import AcousticRecipe, AcousticTask
from loosestep.recipes.schedules import OneCycle, apply
from papers.learners import RULES
from papers.page import COLOURS, plot, section

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
    for factor in (1, 10, 3):
        for name in STRATEGIES if factor == 1 else FREE:
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


# The page --------------------------------------------------------------------------------------------------------------


def stretch(name: str, factor: int) -> float:
    """How much longer a step takes with a learner that is so much slower, where everybody waits: by a
    simulation of the same cluster, with a model of the same size that learns nothing."""
    if factor == 1 or name in FREE:
        return 1.0

    def lasts(slow: int) -> float:
        def learner(rank: int) -> None:
            model = nn.Linear(400, 500)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with loosestep.attach(model, optimizer, STRATEGIES[name]):
                for _ in range(40):
                    model.weight.grad = torch.zeros_like(model.weight)
                    model(torch.zeros(1, 400)).sum().backward()
                    optimizer.step()

        cluster = loosestep.Cluster(
            bandwidth="10gbit", latency="50us", compute="100ms", jitter=0.1, slow={SLOW: slow}
        )
        made = loosestep.simulate(learner, ranks=LEARNERS, ranks_per_node=2, cluster=cluster)
        return float(made.seconds)

    return lasts(factor) / lasts(1)


def write(results: Sequence[Result]) -> None:
    """The section."""
    by = {(r["strategy"], r["slow"]): r for r in results}
    stretches = {
        (name, factor): stretch(name, factor) for name in STRATEGIES for factor in (1, 3, 10)
    }

    def of(name: str, factor: int) -> Result:
        """Collective strategies learn the same whoever is slow."""
        return by[name, factor if name in FREE else 1]

    made = [
        (name, factor)
        for name in STRATEGIES
        for factor in (1, 3, 10)
        if name not in FREE or (name, factor) in by
    ]
    changes = [
        of(name, factor)["end"]["loss"] - of(name, 1)["end"]["loss"]
        for name, factor in made
        if name in FREE and factor > 1
    ]

    def draw(axes: Any) -> None:
        for place, factor in zip(axes, (1, 3, 10), strict=True):
            for name in (name for name, other in made if other == factor):
                points = of(name, factor)["points"]
                at = [point["seconds"] * stretches[name, factor] for point in points]
                place.plot(
                    at, [100 * point["wer"] for point in points], "o-",
                    color=COLOURS[name], ms=3, lw=1.4, label=RULES[name].title.partition(",")[0],
                )  # fmt: skip
            title = "all equal" if factor == 1 else f"one of eight {factor} times slower"
            place.set(xlabel="virtual seconds", ylabel="word error rate %, AN4", title=title)
        axes[0].legend(frameon=False, fontsize=8)

    picture = plot(
        "stragglers", draw, panels=3, size=(14, 4),
        alt="Word error rate against seconds with no, a 3 times and a 10 times slower learner",
    )  # fmt: skip
    rows = []
    for name, factor in made:
        result = of(name, factor)
        seconds = result["seconds"] * stretches[name, factor]
        rows.append(
            [
                f"{RULES[name].title.partition(',')[0]}, {factor}x",
                f"{seconds:.0f}",
                f"{100 * result['end']['wer']:.1f}",
                f"{result['end']['loss']:.3f}",
                f"{result['exchanges_a_step']:.2f}",
                f"{100 * result['wer_all']:.1f}",
                f"{100 * result['wer_without_slow']:.1f}",
                f"{100 * result['wer_slow_alone']:.1f}",
                f"{100 * result['wer_fast_alone']:.1f}",
                str(result["steps"][SLOW]),
            ]
        )
    header = [
        "slowest learner",
        "seconds",
        "WER %",
        "loss",
        "exchanges a step",
        "mean of all",
        "without the slow one",
        "the slow one alone",
        "a fast one alone",
        "its steps",
    ]
    slowed = stretches["synchronous", 10]
    gossip = of("random-ring", 10)["seconds"] / of("random-ring", 1)["seconds"]
    section(
        "stragglers",
        f"""## Stragglers in what is learnt

**A slow learner delays nobody in a ring: holds.** With one of eight ten times slower, the same number of gradients takes the rings {gossip:.2f} times as long, and synchronous training, delay-by-one and DASO
about {slowed:.1f} times. **Its old model hurts: not seen.** At the same number of gradients the rings' test loss with a slow learner in them
differs from that without by {min(changes):+.3f} to {max(changes):+.3f} (one seed). **The average at the end holds**: the mean with and without the slow learner differs by at most
{100 * max(abs(r["wer_all"] - r["wer_without_slow"]) for r in results):.1f} points of WER; the rate has come down to nothing by then, and so has the disagreement.

{picture}

{table(header, rows)}

Written by `benchmarks/papers_stragglers.py`: {results[0]["total"]} gradients of batch {OPTIONS["batch"]} of all learners together, AN4, 2 bidirectional LSTM layers of {OPTIONS["cells"]} cells, CTC, SGD with momentum at {RATE} (one-cycle over the
gradients of all learners), one seed, one rate for all: not tuned, and far from trained out. Virtual cluster: four nodes of two, 10 Gbit/s, 100 ms a step, 10 % jitter. The simulator makes the exchanges that the
rate allows, whatever they would cost a processor. Collective strategies make the same steps whoever is slow, so they were trained once and their seconds stretched by a simulation of the cluster. Models
before the last exchange, in the last columns.
""",
    )


def main() -> None:
    """Run, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of a small network, nothing written"
    )
    parser.add_argument("--page", action="store_true", help="the section, from the runs there are")
    parser.add_argument("--one", action="store_true", help="make the next run only")
    parser.add_argument("--data", type=Path, default=DATA)
    chosen = parser.parse_args()
    if chosen.page:
        write([json.loads(line) for line in LINES.read_text().splitlines()])
        return
    results = run(chosen.quick, chosen.data, one=chosen.one)
    if not chosen.quick and not chosen.one:
        write(results)


if __name__ == "__main__":
    main()
