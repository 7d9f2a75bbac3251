"""Test accuracy at the same number of gradients: DASO and local SGD against synchronous training,
several seeds.

    python benchmarks/accuracy.py [--quick] [--data FOLDER]

Two nodes of two ranks on the loopback (links change the time, not the result). Digits come with
scikit-learn; CIFAR-10 is read from FOLDER (train.npz and test.npz, see the vision recipe) and left
out where it is not there. Everything but the strategy is the same: network, first parameters, order
of the batches, learning rate (cosine to zero), SGD with momentum.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

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
from loosestep.recipes.vision.recipe import VisionRecipe, VisionTask

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar10"
SYNCHRONOUS = "allreduce"
# a tenth of the steps each
RAMPED = "daso:period=4,delay=1,warmup={ramp},cooldown={ramp},total={steps}"
STRATEGIES = {
    "digits": (
        SYNCHRONOUS,
        RAMPED,
        "daso:period=4,delay=1",
        "daso:period=4,delay=3",
        "localsgd:period=4,replica=rank",
    ),
    "cifar10": (SYNCHRONOUS, RAMPED),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "digits": {"width": 0.5, "batch": 32, "lr": 0.1},
    "cifar10": {"width": 0.5, "batch": 32, "lr": 0.1, "size": 16, "crop": 2},
}
TITLES = {
    "digits": "scikit-learn digits, 8x8, ResNet-20 of half width",
    "cifar10": "CIFAR-10, 20,000 training images brought to 16x16, ResNet-20 of half width",
}


# One rank -----------------------------------------------------------------------------------------


def work() -> None:
    """Every strategy with every seed, on this rank."""
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    for name, steps in settings["steps"].items():
        for seed in settings["seeds"]:
            task = build(name, settings["data"], seed)
            for strategy in STRATEGIES[name]:
                if [name, seed, strategy] in settings["known"]:
                    continue
                start = time.monotonic()
                accuracy, loss = train(task, strategy, steps)
                seconds = time.monotonic() - start
                say(
                    task=name,
                    seed=seed,
                    strategy=strategy,
                    accuracy=accuracy,
                    loss=loss,
                    seconds=seconds,
                )
    leave()


def build(name: str, data: str, seed: int) -> VisionTask:
    """The task by name."""
    return VisionRecipe().build(
        OPTIONS[name], data=None if name == "digits" else Path(data), seed=seed
    )


def train(task: VisionTask, strategy: str, steps: int) -> tuple[float, float]:
    """Accuracy and loss on the test set of the model that all ranks share in the end."""
    strategy = strategy.format(ramp=steps // 10, steps=steps)
    model = learn(task, strategy, steps, learner=dist.get_rank(), learners=dist.get_world_size())
    judged = task.evaluate(model) if dist.get_rank() == 0 else {"accuracy": 0.0, "loss": 0.0}
    dist.barrier()
    return judged["accuracy"], judged["loss"]


def learn(task: VisionTask, strategy: str, steps: int, *, learner: int, learners: int) -> nn.Module:
    """The model that this learner ends with."""
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    schedule = CosineAnnealingLR(optimizer, steps)
    batches = task.stream(learner=learner, learners=learners)
    with loosestep.attach(model, optimizer, strategy) as run:
        for _ in range(steps):
            loss = task.loss(model, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.observe(loss)
    return model


# The table ----------------------------------------------------------------------------------------


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    """The tables and what is needed to judge them."""
    parts = ["## Accuracy at the same number of gradients: two nodes of two ranks\n"]
    for name, steps in settings["steps"].items():
        labels = {
            strategy: strategy.format(ramp=steps // 10, steps=steps)
            for strategy in STRATEGIES[name]
        }
        parts += [
            f"**{TITLES[name]}; {4 * steps} gradients of batch {OPTIONS[name]['batch']}.**\n",
            rows_of([s for s in said if s["task"] == name], labels),
            "",
        ]
    parts.append(
        f"Mean and range (least-most) over {len(settings['seeds'])} seeds; the difference is "
        "taken seed by seed. Same network, first parameters, batches and learning rate; "
        "loopback. The final model is the average that `finish()` leaves on all ranks.\n"
    )
    parts.append(f"{where}.")
    return "\n".join(parts)


def rows_of(said: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """One task's table, a row for each strategy of `labels`; the difference to synchronous
    training seed by seed.
    """

    def values(strategy: str, field: str) -> list[float]:
        return [line[field] for line in said if line["strategy"] == strategy]

    rows = []
    for strategy, label in labels.items():
        accuracy = Spread(tuple(100 * value for value in values(strategy, "accuracy")))
        apart = [
            a - 100 * b
            for a, b in zip(accuracy.values, values(SYNCHRONOUS, "accuracy"), strict=True)
        ]
        difference = f"{sum(apart) / len(apart):+.1f} ({min(apart):+.1f} to {max(apart):+.1f})"
        losses = Spread(tuple(values(strategy, "loss"))).text(".3f", centre="mean")
        percent = accuracy.text(".1f", centre="mean")
        rows.append([f"`{label}`", percent, "" if strategy == SYNCHRONOUS else difference, losses])
    return table(["", "test accuracy %", "against synchronous", "test loss"], rows)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark of both tasks."""
    parser = options(doc, quick="few steps, one seed")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="CIFAR-10 as train.npz and test.npz"
    )
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--only", choices=list(OPTIONS), help="one task")
    return parser


def wanted(steps: Mapping[str, int], chosen: argparse.Namespace) -> dict[str, int]:
    """The steps of the tasks that are asked for and have data."""
    left = {name: count for name, count in steps.items() if chosen.only in (None, name)}
    if "cifar10" in left and not (chosen.data / "train.npz").exists():
        print(f"no CIFAR-10 in {chosen.data}: left out")
        del left["cifar10"]
    return left


def main() -> None:
    """Parse, run, publish."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--first", type=int, default=0, help="begin with this seed; nothing is written but --keep"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="results as JSON lines: those that are there are not computed again",
    )
    chosen = parser.parse_args()
    steps = wanted(
        {"digits": 16, "cifar10": 8} if chosen.quick else {"digits": 240, "cifar10": 720}, chosen
    )
    seeds = list(range(chosen.first, chosen.seeds or (1 if chosen.quick else 3)))
    kept = (
        [json.loads(line) for line in chosen.keep.read_text().splitlines()]
        if chosen.keep and chosen.keep.exists()
        else []
    )
    known = [
        line for line in kept if line["seed"] in seeds and line["steps"] == steps.get(line["task"])
    ]
    settings = {
        "seeds": seeds, "steps": steps, "data": str(chosen.data),
        "known": [[line["task"], line["seed"], line["strategy"]] for line in known],
    }  # fmt: skip
    where = machine()
    print(where, flush=True)
    if "cifar10" in steps:
        # decodes into the cache, once instead of on every rank
        build("cifar10", str(chosen.data), seed=0)
    torch.set_num_threads(1)
    said = run_ranks(
        __file__,
        settings,
        show=lambda s: (
            f"{s['task']:8} seed {s['seed']}  {s['strategy']:24} accuracy {s['accuracy']:.1%}  "
            f"{s['seconds']:5.1f} s"
        ),
    )
    said = [{**line, "steps": steps[line["task"]]} for line in said]
    if chosen.keep is not None:
        with chosen.keep.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in said)
    said = sorted([*known, *said], key=lambda line: int(line["seed"]))
    part = chosen.quick or chosen.only is not None or chosen.first > 0
    publish("accuracy", section(said, settings, where), quick=part)


if __name__ == "__main__":
    if is_rank():
        work()
    else:
        main()
