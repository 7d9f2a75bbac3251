"""Codecs: what they cost, what they lose, and what is learned with them at the same number of
gradients.

    python benchmarks/codec_quality.py [--quick] [--data FOLDER] [--only TASK] [--keep FILE]

Prices: one thread writes and reads 100 MB of float32, heavy-tailed, in units of 4 M values, as an
exchange does. Quality: four virtual learners on nodes of their own (`loosestep.simulate`): real
gradients, the codes of the real thing; network, first parameters, order of the batches, learning
rate (cosine to zero) and SGD with momentum are the same for all. With `--keep` every result is
written down as it comes, and what is there already is not computed again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import loosestep
from accuracy import OPTIONS, learn
from common import Spread, machine, options, publish, table
from loosestep.codecs import codec
from loosestep.core.collectives.coded import UNIT
from loosestep.recipes.acoustic import AcousticRecipe
from loosestep.recipes.vision.recipe import VisionRecipe

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LEARNERS = 4
CODECS = ("none", "bf16", "int8", "int8:block=256", "qsgd")
STRATEGIES = ("allreduce:codec={}", "delay-by-one:replica=rank,codec={}", "daso:codec={}")
LEARNED_WITH = ("none", "bf16", "int8")
TITLES = {
    "digits": "scikit-learn digits, ResNet-20 of half width: error rate, %",
    "cifar10": "CIFAR-10 at 16x16, ResNet-20 of half width: error rate, %",
    "an4": "AN4, characters, CTC: character error rate, %",
}
STEPS = {"digits": 150, "cifar10": 150, "an4": 150}
SPEECH = {"layers": 2, "cells": 64, "stack": 4, "batch": 8, "optimizer": "adamw", "lr": 2e-3}
Result = dict[str, Any]


# Prices -------------------------------------------------------------------------------------------


def price(name: str, repetitions: int) -> list[str]:
    """Milliseconds to write and to read 100 MB, the error, bits a value."""
    way = codec(name)
    values = torch.randn(1, UNIT, generator=torch.Generator().manual_seed(0)).pow(3)
    codes = way.memory(1, UNIT, values.device)
    back = torch.empty_like(values)
    megabytes = UNIT * 4 / 1e6
    written = []
    read = []
    for _ in range(repetitions):
        start = time.perf_counter()
        way.encode(values, codes)
        half = time.perf_counter()
        way.decode(codes, back)
        written.append((half - start) * 1e3 * 100 / megabytes)
        read.append((time.perf_counter() - half) * 1e3 * 100 / megabytes)
    error = float((back - values).norm() / values.norm())
    bits = 8 * way.bytes_per_value
    return [
        f"`{way}`",
        Spread(tuple(written)).text(".0f"),
        Spread(tuple(read)).text(".0f"),
        f"{error:.4f}",
        f"{bits:.2f}",
    ]


# Quality ------------------------------------------------------------------------------------------


def build(name: str, data: Path, seed: int) -> Any:
    """A task with its seed."""
    if name == "an4":
        return AcousticRecipe().build(SPEECH, data=data / "an4", seed=seed)
    folder = None if name == "digits" else data / name
    return VisionRecipe().build(OPTIONS[name], data=folder, seed=seed)


def train(task: Any, strategy: str, steps: int) -> float:
    """The error of the model that all learners share in the end, in per cent."""

    def learner(rank: int) -> dict[str, float]:
        model = learn(task, strategy, steps, learner=rank, learners=LEARNERS)
        judged: dict[str, float] = task.evaluate(model) if rank == 0 else {}
        return judged

    judged = loosestep.simulate(learner, ranks=LEARNERS).results[0]
    return 100 * (judged["cer"] if "cer" in judged else 1 - judged["accuracy"])


def quality(tasks: dict[str, int], seeds: int, data: Path, keep: Path | None) -> list[Result]:
    """One run after another; those that are known already at once."""
    known: list[Result] = []
    if keep is not None and keep.exists():
        known = [json.loads(line) for line in keep.read_text().splitlines()]
    found = []
    for name, steps in tasks.items():
        for seed in range(seeds):
            task = None
            for strategy in STRATEGIES:
                for way in LEARNED_WITH:
                    asked = {"task": name, "steps": steps, "seed": seed}
                    asked |= {"strategy": strategy, "codec": way}
                    line = next((line for line in known if asked.items() <= line.items()), None)
                    if line is None:
                        task = task or build(name, data, seed)
                        line = {**asked, "error": train(task, strategy.format(way), steps)}
                        if keep is not None:
                            with keep.open("a") as file:
                                file.write(json.dumps(line) + "\n")
                    print(
                        f"  {name} {seed} {strategy.format(way)}: {line['error']:.1f}", flush=True
                    )
                    found.append(line)
    return found


def compared(lines: list[Result]) -> str:
    """A row for each strategy, a column for each codec, and how far apart the seeds are."""
    rows = []
    for strategy in STRATEGIES:
        errors = {
            way: [
                line["error"]
                for line in lines
                if (line["strategy"], line["codec"]) == (strategy, way)
            ]
            for way in LEARNED_WITH
        }
        apart = max(errors["none"]) - min(errors["none"])
        cells = [
            Spread(tuple(values)).text(".1f", centre="mean")
            + ("" if way == "none" else f", {mean(values) - mean(errors['none']):+.1f}")
            for way, values in errors.items()
        ]
        rows.append([f"`{strategy.partition(':')[0]}`", *cells, f"{apart:.1f}"])
    return table(["", *LEARNED_WITH, "seeds apart"], rows)


def main() -> None:
    """Prices, then quality."""
    parser = options(__doc__, quick="digits, a few steps, one seed")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with cifar10 and an4")
    parser.add_argument("--only", choices=list(TITLES), help="one task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    where = machine()
    prices = table(
        ["", "write ms/100 MB", "read ms/100 MB", "relative error", "bits a value"],
        [price(name, 5 if chosen.quick else 15) for name in CODECS[1:]],
    )
    print(prices, flush=True)
    tasks = {"digits": 10} if chosen.quick else STEPS
    if chosen.only:
        tasks = {chosen.only: STEPS[chosen.only]}
    lines = quality(tasks, 1 if chosen.quick else chosen.seeds, chosen.data, chosen.keep)
    parts = ["## Codecs\n", where + "\n", "One thread, median (least-most).\n", prices, ""]
    for name, steps in tasks.items():
        parts += [f"**{TITLES[name]}; {LEARNERS} learners, {steps} steps each; mean (spread).**\n"]
        parts += [compared([line for line in lines if line["task"] == name]), ""]
    publish("codecs", "\n".join(parts), quick=chosen.quick or bool(chosen.only))


if __name__ == "__main__":
    main()
