"""Stragglers in what is learnt: eight learners, one of them slower, error rate against seconds.

    python benchmarks/papers_stragglers.py [--quick] [--page] [--task an4] [--data AN4]

Virtual learners: gradients are computed and exchanged by the library for real, seconds are those of
a virtual cluster (100 ms a step, 10 % jitter, 10 Gbit/s). All strategies spend the same number of
gradients of all learners together. In the end every learner's own model is kept, so that the
average can be taken with and without the slow one. Two tasks: a network of one hidden layer on
scikit-learn's digits at a constant rate, so that learners still disagree in the end, three seeds;
and AN4 with an LSTM, whose rate comes down to nothing, one seed.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import loosestep
from common import Spread, table
from loosestep.recipes.acoustic import AcousticRecipe
from loosestep.recipes.schedules import Constant, OneCycle, Schedule, apply
from papers.learners import RULES
from papers.page import COLOURS, plot, section
from simulated_learners import digits

LINES = Path(__file__).with_name("results") / "papers-stragglers.jsonl"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "an4"
LEARNERS = 8
SLOW = 7
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
# where a slow learner delays nobody; elsewhere it stretches every step, and changes nothing else
FREE = ("ring", "random-ring")
Result = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """What is learnt: `judge` gives an error rate and a loss."""

    make: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    judge: Callable[[nn.Module], dict[str, float]]
    schedule: Callable[[int], Schedule]
    rate: float
    total: int  # gradients of all learners


def on_digits(seed: int, steps: int) -> Problem:
    """One hidden layer, batches of four."""
    x, y, test_x, test_y = digits()

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def batches(rank: int) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield torch.randint(len(y), (4,), generator=draw)

    @torch.no_grad()
    def judge(model: nn.Module) -> dict[str, float]:
        scores = model(test_x)
        wrong = float((scores.argmax(1) != test_y).double().mean())
        return {"error": wrong, "loss": float(nn.functional.cross_entropy(scores, test_y))}

    def loss(model: nn.Module, chosen: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x[chosen]), y[chosen])

    return Problem(make, batches, loss, judge, lambda total: Constant(), 0.1, steps * LEARNERS)


def on_speech(data: Path) -> Problem:
    """AN4, two bidirectional layers, batches of eight."""
    task = AcousticRecipe().build(OPTIONS, data=data, seed=0)

    def judge(model: nn.Module) -> dict[str, float]:
        found = task.evaluate(model)
        return {"error": found["wer"], "loss": found["loss"]}

    total = 18 * task.order.batches_per_epoch // LEARNERS * LEARNERS
    return Problem(
        task.make_model,
        lambda rank: task.stream(learner=rank, learners=LEARNERS),
        task.loss,
        judge,
        OneCycle,
        0.6,
        total,
    )


def train(problem: Problem, name: str, factor: int) -> Result:
    """One run: quality on the way and in the end, seconds, exchanges a step."""
    points: list[dict[str, float]] = []
    last: dict[int, dict[str, Tensor]] = {}
    exchanges: dict[int, tuple[int, int]] = {}
    total = problem.total

    def learner(rank: int) -> dict[str, float]:
        model = problem.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=problem.rate, momentum=0.9)
        schedule = problem.schedule(total)
        batches = problem.batches(rank)
        every = max(1, total // LEARNERS // 10)
        with loosestep.attach(model, optimizer, STRATEGIES[name]) as run:
            step = 0
            while run.global_steps < total:
                apply(schedule, optimizer, lr=problem.rate, gradients=run.global_steps)
                loss = problem.loss(model, next(batches))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                step += 1
                if step % every == 0 and (rank == 0 or name not in FREE):
                    seconds = run.trace.clock()
                    with run.consensus():
                        if rank == 0:
                            points.append({"seconds": seconds, **problem.judge(model)})
            last[rank] = copy.deepcopy(model.state_dict())
            exchanges[rank] = run.stats["exchanges"], step
        return problem.judge(model) if rank == 0 else {}

    cluster = loosestep.Cluster(
        bandwidth="10gbit", latency="50us", compute="100ms", jitter=0.1, slow={SLOW: factor}
    )
    ran = loosestep.simulate(learner, ranks=LEARNERS, ranks_per_node=2, cluster=cluster)

    def judge(ranks: list[int]) -> float:
        model = problem.make()
        mean = {key: sum(last[rank][key] for rank in ranks) / len(ranks) for key in last[0]}
        model.load_state_dict(mean)
        return problem.judge(model)["error"]

    steps = sum(made for _, made in exchanges.values())
    return {
        "strategy": name, "slow": factor, "total": total, "seconds": ran.seconds, "points": points,
        "end": ran.results[0], "steps": [exchanges[rank][1] for rank in range(LEARNERS)],
        "exchanges_a_step": sum(count for count, _ in exchanges.values()) / steps,
        "all": judge(list(range(LEARNERS))),
        "without_slow": judge([rank for rank in range(LEARNERS) if rank != SLOW]),
        "slow_alone": judge([SLOW]), "fast_alone": judge([0]),
    }  # fmt: skip


def run(task: str, data: Path, *, quick: bool) -> None:
    """All runs of a task; those known already are not made again."""
    torch.set_num_threads(1)
    known = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    for seed in (0, 1, 2) if task == "digits" and not quick else (0,):
        problem = on_speech(data) if task == "an4" else on_digits(seed, 40 if quick else 400)
        for factor in (1, 10, 3):
            for name in STRATEGIES if factor == 1 else FREE:
                wanted = {"task": task, "seed": seed, "strategy": name, "slow": factor}
                if not quick and any(wanted.items() <= line.items() for line in known):
                    continue
                result = {"task": task, "seed": seed, **train(problem, name, factor)}
                print(
                    task, seed, name, factor, result["end"], f"{result['seconds']:.1f}", flush=True
                )
                if not quick:
                    with LINES.open("a") as file:
                        file.write(json.dumps(result) + "\n")


# The page -----------------------------------------------------------------------------------------


def stretch(name: str, factor: int) -> float:
    """How much longer a step takes with a learner that is so much slower, where everybody waits: by
    a simulation of the same cluster, with a model that learns nothing.
    """
    if factor == 1 or name in FREE:
        return 1.0

    def lasts(slow: int) -> float:
        def learner(rank: int) -> None:
            model = nn.Linear(64, 32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with loosestep.attach(model, optimizer, STRATEGIES[name]):
                for _ in range(60):
                    model(torch.zeros(1, 64)).sum().backward()
                    optimizer.step()

        cluster = loosestep.Cluster(
            bandwidth="10gbit", latency="50us", compute="100ms", jitter=0.1, slow={SLOW: slow}
        )
        made = loosestep.simulate(learner, ranks=LEARNERS, ranks_per_node=2, cluster=cluster)
        return float(made.seconds)

    return lasts(factor) / lasts(1)


def write(results: Sequence[Result]) -> None:
    """The section."""
    stretches = {
        (name, factor): stretch(name, factor) for name in STRATEGIES for factor in (1, 3, 10)
    }

    def of(task: str, name: str, factor: int) -> list[Result]:
        """Collective strategies learn the same whoever is slow."""
        real = factor if name in FREE else 1
        return [r for r in results if (r["task"], r["strategy"], r["slow"]) == (task, name, real)]

    def draw(axes: Any) -> None:
        for place, factor in zip(axes, (1, 3, 10), strict=True):
            for name in STRATEGIES:
                runs = of("digits", name, factor)
                count = min(len(run["points"]) for run in runs)
                each = [[run["points"][i] for run in runs] for i in range(count)]
                at = [
                    sum(point["seconds"] for point in point_of)
                    / len(runs)
                    * stretches[name, factor]
                    for point_of in each
                ]
                middle = [100 * sum(p["error"] for p in points) / len(runs) for points in each]
                place.plot(
                    at, middle, "o-", color=COLOURS[name], ms=3, lw=1.4,
                    label=RULES[name].title.partition(",")[0],
                )  # fmt: skip
                low = [100 * min(p["error"] for p in points) for points in each]
                high = [100 * max(p["error"] for p in points) for points in each]
                place.fill_between(at, low, high, color=COLOURS[name], alpha=0.12, lw=0)
            title = "all equal" if factor == 1 else f"one of eight {factor} times slower"
            place.set(xlabel="virtual seconds", ylabel="error rate %, digits", title=title)
            place.set_ylim(0, 16)
        axes[0].legend(frameon=False, fontsize=8)

    picture = plot(
        "stragglers", draw, panels=3, size=(14, 4),
        alt="Error rate against seconds with no, a 3 times and a 10 times slower learner",
    )  # fmt: skip
    rows = []
    for task in ("digits", "an4"):
        for name in STRATEGIES:
            for factor in (1, 3, 10):
                runs = of(task, name, factor)
                if not runs or (task == "an4" and factor > 1 and name not in FREE):
                    continue

                def told(values: list[float], form: str = ".1f") -> str:
                    return Spread(tuple(values)).text(form, centre="mean")

                rows.append(
                    [
                        f"{task}, {RULES[name].title.partition(',')[0]}, {factor}x",
                        told([run["seconds"] * stretches[name, factor] for run in runs], ".0f"),
                        told([100 * run["end"]["error"] for run in runs]),
                        told([run["end"]["loss"] for run in runs], ".3f"),
                        told([run["exchanges_a_step"] for run in runs], ".2f"),
                        told([100 * run["without_slow"] for run in runs]),
                        told([100 * run["slow_alone"] for run in runs]),
                        told([100 * run["fast_alone"] for run in runs]),
                        told([run["steps"][SLOW] for run in runs], ".0f"),
                    ]
                )
    header = [
        "task, strategy, slowest learner", "seconds", "error %", "loss", "exchanges a step",
        "mean without the slow one", "the slow one alone", "a fast one alone", "its steps",
    ]  # fmt: skip

    def mean(name: str, factor: int, *path: str) -> float:
        found = of("digits", name, factor)
        values = [run[path[0]] if len(path) == 1 else run[path[0]][path[1]] for run in found]
        return float(sum(values) / len(values))

    changes = [
        100 * (mean(name, factor, "end", "error") - mean(name, 1, "end", "error"))
        for name in FREE
        for factor in (3, 10)
    ]
    without = [
        100 * (mean(name, factor, "without_slow") - mean(name, factor, "all"))
        for name in FREE
        for factor in (3, 10)
    ]
    alone = [100 * mean(name, 10, "slow_alone") for name in FREE]
    ends = [100 * mean(name, 10, "end", "error") for name in FREE]
    gossip = max(mean(name, 10, "seconds") / mean(name, 1, "seconds") for name in FREE)
    section(
        "stragglers",
        f"""## Stragglers in what is learnt

**A slow learner delays nobody in a ring: holds.** With one of eight ten times slower the same number of gradients takes the rings {gossip:.2f} times as long, and synchronous
training, delay-by-one and DASO {stretches["synchronous", 10]:.1f} times. **Does its old model hurt? No.** At the same number of gradients the rings' error with a slow learner in them differs by
{min(changes):+.1f} to {max(changes):+.1f} points from that without (digits, three seeds; their spread is below). **Does the average at the end hold? Yes.** Leaving the slow learner out of it changes
{min(without):+.1f} to {max(without):+.1f} points; its model alone, averaged with others until the last moment, has {min(alone):.1f} to {max(alone):.1f} % where the mean of all has {min(ends):.1f} to {max(ends):.1f} %.

{picture}

{table(header, rows)}

Written by `benchmarks/papers_stragglers.py`: mean (least-most) of the seeds. Virtual cluster: four nodes of two, 10 Gbit/s, 100 ms a step, 10 % jitter; the simulator makes the exchanges that `rate=1` allows,
whatever they would cost a processor. Digits: one hidden layer of 32, batches of four, SGD with momentum at a constant .1, 3,200 gradients of all learners. AN4: two bidirectional LSTM layers of 64 cells, batches of
eight, SGD at .6 (one-cycle over everybody's gradients), 2,136 gradients, one seed, far from trained out, and only the runs for which there was time. Collective strategies make the same steps whoever
is slow: they were trained once, and their seconds stretched by a simulation of the cluster. Last columns: models before the last exchange.
""",
    )


def main() -> None:
    """Run, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, nothing written")
    parser.add_argument("--page", action="store_true", help="the section, from the runs there are")
    parser.add_argument("--task", choices=("digits", "an4"), default="digits")
    parser.add_argument("--data", type=Path, default=DATA)
    chosen = parser.parse_args()
    if not chosen.page:
        run(chosen.task, chosen.data, quick=chosen.quick)
    if not chosen.quick:
        write([json.loads(line) for line in LINES.read_text().splitlines()])


if __name__ == "__main__":
    main()
