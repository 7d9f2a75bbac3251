"""Test accuracy of eight learners at the same number of gradients, every strategy against
synchronous training.

    python benchmarks/simulated_accuracy.py [--quick] [--data FOLDER] [--keep FILE]

The learners are virtual (`loosestep.simulate`): gradients are computed for real, the mixing is that
of the strategies, and nothing depends on how busy this machine is. Four nodes of two learners;
network, first parameters, order of the batches, learning rate (cosine to zero) and SGD with
momentum are the same for all. With `--keep` every result is written down as it comes, and what is
there already is not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import loosestep
from accuracy import OPTIONS, SYNCHRONOUS, TITLES, arguments, learn, rows_of, wanted
from common import machine, publish
from loosestep.recipes.vision.recipe import VisionRecipe, VisionTask

LEARNERS = 8
CLUSTER = loosestep.Cluster(bandwidth="10gbit", latency="50us", compute="100ms", jitter=0.1)
STRATEGIES = (
    SYNCHRONOUS,
    "adpsgd:graph=ring",
    "adpsgd:graph=random-ring",
    "delay-by-one:replica=rank",
    "daso:period=4,delay=1",
)
Result = dict[str, Any]


def train(task: VisionTask, strategy: str, steps: int) -> tuple[float, float]:
    """Accuracy and loss on the test set of the model that all learners share in the end."""

    def learner(rank: int) -> dict[str, float]:
        model = learn(task, strategy, steps, learner=rank, learners=LEARNERS)
        return task.evaluate(model) if rank == 0 else {}

    judged = loosestep.simulate(learner, ranks=LEARNERS, ranks_per_node=2, cluster=CLUSTER).results[
        0
    ]
    return judged["accuracy"], judged["loss"]


def results(tasks: dict[str, int], seeds: int, data: Path, keep: Path | None) -> Iterator[Result]:
    """One after another; those that are known already at once."""
    known = (
        [json.loads(line) for line in keep.read_text().splitlines()]
        if keep and keep.exists()
        else []
    )
    for name, steps in tasks.items():
        for seed in range(seeds):
            task = None
            for strategy in STRATEGIES:
                wanted = {"task": name, "steps": steps, "seed": seed, "strategy": strategy}
                found = next((line for line in known if wanted.items() <= line.items()), None)
                if found is None:
                    folder = None if name == "digits" else data
                    task = task or VisionRecipe().build(OPTIONS[name], data=folder, seed=seed)
                    accuracy, loss = train(task, strategy, steps)
                    found = {**wanted, "accuracy": accuracy, "loss": loss}
                    if keep:
                        with keep.open("a") as file:
                            file.write(json.dumps(found) + "\n")
                print(
                    f"  {name:8} seed {seed}  {strategy:30} accuracy {found['accuracy']:.1%}",
                    flush=True,
                )
                yield found


def main() -> None:
    """Parse, run, publish."""
    parser = arguments(__doc__)
    parser.add_argument("--keep", type=Path, help="results as JSON lines, to go on with later")
    chosen = parser.parse_args()
    tasks = wanted(
        {"digits": 8, "cifar10": 4} if chosen.quick else {"digits": 200, "cifar10": 360}, chosen
    )
    seeds = chosen.seeds or (1 if chosen.quick else 3)
    torch.set_num_threads(1)
    where = machine()
    said = list(results(tasks, seeds, chosen.data, chosen.keep))
    parts = ["## Accuracy at the same number of gradients: eight virtual learners\n"]
    for name, steps in tasks.items():
        batch = OPTIONS[name]["batch"]
        rows = rows_of(
            [line for line in said if line["task"] == name],
            {strategy: strategy for strategy in STRATEGIES},
        )
        parts += [f"**{TITLES[name]}; {LEARNERS * steps} gradients of batch {batch}.**\n", rows, ""]
    parts.append(
        f"Mean and range (least-most) over {seeds} seeds; the difference is taken seed by seed. "
        "Four nodes of two learners on a virtual cluster (10 Gbit/s, 100 ms a step with 10 % "
        "jitter); SGD with momentum, the same learning rate for all, cosine to zero. Computed by "
        f"the simulator: real gradients, virtual time.\n\n{where}."
    )
    publish("simulated accuracy", "\n".join(parts), quick=chosen.quick)


if __name__ == "__main__":
    main()
