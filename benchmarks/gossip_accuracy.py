"""Test accuracy of the gossip strategies against synchronous training at the same number of
gradients: digits, eight learners.

    python benchmarks/gossip_accuracy.py [--quick]

Eight nodes of one rank on the loopback. Everything but the strategy is the same:
network, first parameters, order of the batches, learning rate (cosine to zero), SGD with momentum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accuracy import SYNCHRONOUS, rows_of, train
from common import is_rank, leave, machine, options, publish, run_ranks, say, settings_of_rank
from loosestep.recipes.vision.recipe import VisionRecipe

LEARNERS = 8
OPTIONS: dict[str, Any] = {"width": 0.5, "batch": 16, "lr": 0.1}
STRATEGIES = (
    SYNCHRONOUS,
    "adpsgd:slowdown=1.0",
    "adpsgd:graph=random-ring,slowdown=1.0",
    "adpsgd:graph=pairs,slowdown=1.0",
    "delay-by-one",
)


def work() -> None:
    """Every strategy with every seed, on this rank."""
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    for seed in range(settings["seeds"]):
        task = VisionRecipe().build(OPTIONS, seed=seed)
        for strategy in STRATEGIES:
            accuracy, loss = train(task, strategy, settings["steps"])
            say(seed=seed, strategy=strategy, accuracy=accuracy, loss=loss)
    leave()


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    """The table and what is needed to judge it."""
    return (
        "## Accuracy of gossip: digits, eight learners\n\n"
        f"{rows_of(said, {strategy: strategy for strategy in STRATEGIES})}\n\nscikit-learn "
        f"digits, 8x8, ResNet-20 of half width with GroupNorm; {LEARNERS * settings['steps']} "
        f"gradients of batch {OPTIONS['batch']}; mean and range (least-most) over "
        f"{settings['seeds']} seeds, the difference seed by seed. Gossip depends on timing: the "
        f"ranks shared the machine's cores.\n\n{where}."
    )


def main() -> None:
    """Parse, run, publish."""
    chosen = options(__doc__, quick="few steps, one seed").parse_args()
    settings = {"seeds": 1, "steps": 10} if chosen.quick else {"seeds": 3, "steps": 150}
    where = machine()
    print(where, flush=True)
    torch.set_num_threads(1)
    said = run_ranks(
        __file__,
        settings,
        nodes=LEARNERS,
        ranks_per_node=1,
        show=lambda s: f"seed {s['seed']}  {s['strategy']:42} accuracy {s['accuracy']:.1%}",
    )
    publish("gossip accuracy", section(said, settings, where), quick=chosen.quick)


if __name__ == "__main__":
    if is_rank():
        work()
    else:
        main()
