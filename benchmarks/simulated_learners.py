"""Many learners in one process: convergence and consensus at 128 learners, contraction, a slow
learner, large batches.

    python benchmarks/simulated_learners.py [--quick]

Every learner draws its own random batches of scikit-learn's digits (1437 images to train, 360 to
test); the model is a network of one hidden layer. Gradients are computed, only time is virtual.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import loosestep
from common import SIMULATED, Spread, machine, publish, table
from loosestep.sim.driver import Simulation

CLUSTER = {"bandwidth": "10gbit", "latency": "50us", "compute": "120ms", "jitter": 0.1}
CLAIM = ("synchronous", "randomized ring")
STRATEGIES = {
    "synchronous": "allreduce",
    "delay-by-one": "delay-by-one:replica=rank",
    "fixed ring": "adpsgd:graph=ring",
    "randomized ring": "adpsgd:graph=random-ring",
}


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training and test data, every fifth image to test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)
    y = torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    _, _, x, y = digits()
    return float((model(x).argmax(1) == y).double().mean())


@dataclass(frozen=True)
class Learning:
    """What every learner does."""

    strategy: str
    steps: int
    batch: int
    lr: float
    warmup: int = 0
    evaluate_at: tuple[int, ...] = ()
    seed: int = 0

    def __call__(self, rank: int) -> dict[int, float]:
        """Accuracy of the mean model after so many steps of a learner, as rank 0 sees it; the
        final one last.
        """
        x, y, _, _ = digits()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        batches = torch.Generator().manual_seed(1000 * self.seed + rank)
        curve: dict[int, float] = {}
        with loosestep.attach(model, optimizer, self.strategy) as run:
            for step in range(1, self.steps + 1):
                optimizer.param_groups[0]["lr"] = self.lr * min(1.0, step / max(1, self.warmup))
                chosen = torch.randint(len(y), (self.batch,), generator=batches)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
                if step in self.evaluate_at and (rank == 0 or not run.strategy.gossip):
                    with run.consensus():
                        curve[step] = accuracy(model) if rank == 0 else 0.0
        return {**curve, self.steps: accuracy(model) if rank == 0 else 0.0}


def run(learning: Learning, ranks: int, ranks_per_node: int = 4, **cluster: object) -> Simulation:
    described = loosestep.Cluster(**{**CLUSTER, "seed": learning.seed, **cluster})  # type: ignore[arg-type]
    return loosestep.simulate(
        learning, ranks=ranks, ranks_per_node=ranks_per_node, cluster=described
    )


# Convergence --------------------------------------------------------------------------------------


def convergence(ranks: int, steps: int) -> str:
    """Curves of accuracy and of the consensus distance."""
    marks = tuple(sorted({steps // 15, steps // 6, steps // 3, 2 * steps // 3}))
    rows = []
    distances = []
    for name, strategy in STRATEGIES.items():
        began = time.process_time()
        done = run(Learning(strategy, steps, batch=4, lr=0.1, evaluate_at=marks), ranks)
        seen = done.results[0]
        rows.append(
            [
                name,
                *(f"{seen[mark]:.1%}" for mark in marks),
                f"{seen[steps]:.1%}",
                f"{done.gradients_per_second:.0f}",
                f"{done.waiting_share:.1%}",
                f"{done.bytes_between_nodes / sum(done.steps) / 1e3:.1f}",
            ]
        )
        distances.append([name, *distances_at(done, marks)])
        print(f"  {name}: {rows[-1][1:]}, {time.process_time() - began:.0f} s of CPU", flush=True)
    heads = [f"after {mark} steps" for mark in marks]
    return "\n\n".join(
        [
            f"### {ranks} learners: accuracy of the mean model\n\n{ranks // 4} nodes of 4, batch "
            f"4 a learner, SGD with momentum 0.9, learning rate 0.1, {steps} steps of every "
            "learner; virtual cluster: 10 Gbit/s uplinks, 50 us, 120 ms a step with 10 % jitter.",
            table(
                ["", *heads, "at the end", "gradients/s", "waiting", "kB/gradient between nodes"],
                rows,
            ),
            "Root mean square distance of the learners to their mean, before what is in flight "
            "lands (gossip: as sampled every ten steps; - before the first):",
            table(["", *heads], distances),
        ]
    )


def distances_at(done: Simulation, marks: Sequence[int]) -> list[str]:
    """The consensus distance last known when all learners together had made so many steps; all
    are one in lockstep.
    """
    kinds = {event.kind for event in done.events}
    steps = 0
    latest = "-" if "fold" in kinds else "0.000"
    found = []
    for event in done.events:
        steps += event.kind == "step"
        if event.kind == "distance":
            latest = f"{event.fields['value']:.3f}"
        while len(found) < len(marks) and steps >= marks[len(found)] * done.ranks:
            found.append(latest)
    return found


# Contraction --------------------------------------------------------------------------------------


def contraction(n: int, topology: str, rounds: int) -> float:
    """What a lockstep round leaves of the squared distance to the mean: of the slowest mode of a
    fixed ring, of all directions alike for a randomized one.
    """
    before: dict[int, list[torch.Tensor]] = defaultdict(list)
    after: dict[int, list[torch.Tensor]] = defaultdict(list)
    size = 2048 if topology == "random-ring" else 1

    def mix(rank: int) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=torch.float64))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        generator = torch.Generator().manual_seed(rank)
        (w,) = model.parameters()
        with loosestep.attach(model, optimizer, f"adpsgd:graph={topology},lockstep=true"):
            for number in range(rounds):
                noise = torch.randn(size, generator=generator, dtype=torch.float64)
                w.grad = noise if size > 1 else torch.full_like(w, np.cos(2 * np.pi * rank / n))
                before[number].append(w.detach() - w.grad)
                optimizer.step()
                after[number].append(w.detach().clone())

    loosestep.simulate(mix, ranks=n)

    def square(vectors: list[torch.Tensor]) -> float:
        stacked = torch.stack(vectors)
        return float((stacked - stacked.mean(0)).square().sum())

    return float(
        np.mean([square(after[number]) / square(before[number]) for number in range(rounds)])
    )


def contractions(sizes: Sequence[int]) -> str:
    rows = []
    for n in sizes:
        fixed = contraction(n, "ring", 2)
        expected = ((1 + 2 * np.cos(2 * np.pi / n)) / 3) ** 2
        mixed = contraction(n, "random-ring", 5)
        predicted = 1 / 3 - (2 / 3) / (n - 1)
        error = max(abs(fixed / expected - 1), abs(mixed / predicted - 1))
        rows.append(
            [
                str(n),
                f"{fixed:.3f}",
                f"{expected:.3f}",
                f"{mixed:.3f}",
                f"{predicted:.3f}",
                f"{error:.1%}",
            ]
        )
        print(f"  contraction: {rows[-1]}", flush=True)
    heads = [
        "learners",
        "fixed ring",
        "((1+2cos(2pi/n))/3)^2",
        "randomized ring",
        "1/3-(2/3)/(n-1)",
        "largest error",
    ]
    return "\n\n".join(
        [
            "### Contraction of the squared disagreement per round\n\nLockstep rounds of the real "
            "protocol, against theory.",
            table(heads, rows),
        ]
    )


# One slow learner ---------------------------------------------------------------------------------


def slow_learner(ranks: int, steps: int) -> str:
    """Speed of the others when one learner is ten times slower. It makes a tenth of the steps
    where it may.
    """
    rows = []
    for name, strategy in STRATEGIES.items():
        gossip = strategy.startswith("adpsgd")
        even, uneven = (
            others_speed(strategy, ranks, steps, slow, gossip) for slow in ({}, {3: 10.0})
        )
        rows.append([name, f"{even:.2f}", f"{uneven:.2f}", f"{uneven / even:.0%}"])
        print(f"  one slow learner: {rows[-1]}", flush=True)
    return "\n\n".join(
        [
            f"### One of {ranks} learners ten times slower\n\nSteps per second of each of the "
            "others.",
            table(["", "all equal", "one slow", "left"], rows),
        ]
    )


def others_speed(
    strategy: str, ranks: int, steps: int, slow: dict[int, float], gossip: bool
) -> float:
    full = Learning(strategy, steps, batch=4, lr=0.05)
    short = Learning(strategy, max(1, steps // 10), batch=4, lr=0.05)
    described = loosestep.Cluster(**{**CLUSTER, "slow": slow})  # type: ignore[arg-type]
    done = loosestep.simulate(
        lambda rank: (short if gossip and rank in slow else full)(rank),
        ranks=ranks,
        ranks_per_node=4,
        cluster=described,
    )
    stepped = [event for event in done.events if event.kind == "step" and event.rank not in {3}]
    return len(stepped) / (ranks - 1) / max(event.time for event in stepped)


# Large batches ------------------------------------------------------------------------------------


def large_batches(ranks: int, images: int, seeds: Sequence[int]) -> str:
    """A fixed number of images, ever larger batches, the learning rate in proportion to the
    batch and beyond.
    """
    rows = []
    medians = []
    for batch in (16, 64, 256):
        steps = images // (ranks * batch)
        for scale in (1, 4, 16):
            lr = 0.04 * scale * batch / 16
            cells = [
                [100 * final_accuracy(name, ranks, steps, batch, lr, seed) for seed in seeds]
                for name in CLAIM
            ]
            spreads = [Spread(tuple(cell)) for cell in cells]
            medians.append((ranks * batch, lr, *(spread.median for spread in spreads)))
            rows.append(
                [
                    str(ranks * batch),
                    f"{lr:.2f}",
                    str(steps),
                    *(spread.text(".1f") for spread in spreads),
                ]
            )
            print(f"  large batches: {rows[-1]}", flush=True)
    return "\n\n".join(
        [
            f"### Large batches: {ranks} learners, {images} images in all\n\nAccuracy in % of the "
            f"final mean model, median (least-most) of {len(seeds)} seeds; 10 % is guessing. The "
            "learning rate grows with the batch and is warmed up over a fifth of the steps; each "
            "batch also at 4 and 16 times that rate.",
            table(["batch of all", "learning rate", "steps", *CLAIM], rows),
            verdict(medians),
        ]
    )


def verdict(medians: Sequence[tuple[int, float, float, float]]) -> str:
    """What became of the claim: batches at which synchronous SGD fails and gossip does not."""

    def name(rows: Sequence[tuple[int, float, float, float]]) -> str:
        return ", ".join(f"{batch} at {lr:g}" for batch, lr, _, _ in rows) or "none"

    works = [max(row[2:]) for row in medians]
    saved = [row for row in medians if row[2] < 80 <= row[3]]
    better = [row for row in medians if row[3] > row[2] + 1]
    worse = [row for row in medians if row[3] < row[2] - 1]
    both = [row for row, best in zip(medians, works, strict=True) if best < 80]
    return (
        f"Synchronous SGD fails (below 80 %) and the randomized ring does not: {name(saved)}. "
        f"Both fail: {name(both)}. The randomized ring is better by more than a point: "
        f"{name(better)}; worse: {name(worse)}."
    )


def final_accuracy(name: str, ranks: int, steps: int, batch: int, lr: float, seed: int) -> float:
    """Of the mean of all learners; guessing for parameters that are no numbers any more."""
    learning = Learning(STRATEGIES[name], steps, batch=batch, lr=lr, warmup=steps // 5, seed=seed)
    try:
        return float(run(learning, ranks).results[0][steps])
    except loosestep.CommError:  # NaN or Inf: nothing is exchanged
        return 0.1


def main() -> None:
    quick = "--quick" in sys.argv
    torch.set_num_threads(1)
    began = time.process_time()
    where = machine()
    parts = [
        "## Simulated learners",
        convergence(16 if quick else 128, 30 if quick else 90),
        contractions((8, 16) if quick else (8, 16, 32, 64, 128)),
        slow_learner(8 if quick else 16, 20),
        large_batches(4 if quick else 16, 8192 if quick else 49152, (0,) if quick else (0, 1)),
    ]
    parts.append(f"{where}. {time.process_time() - began:.0f} s of CPU on one core.")
    publish("simulated-learners", "\n\n".join(parts), quick=quick, path=SIMULATED)


if __name__ == "__main__":
    main()
