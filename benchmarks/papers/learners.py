"""Many trainings of sixteen learners at once: models lie in one tensor [trainings, learners,
parameters].

All strategies are one form, the papers': with the models of all learners as rows of X and their
updates as rows of u,

    X_{k+1} = T_k X_k + u(X_k)        u = -rate * momentum(A G(X_k))

A averages gradients inside groups (all learners: synchronous; those of a node: DASO and gossip
among nodes), T_k is what an exchange that runs beside step k does to the models. Equal learners and
a network that carries an exchange within a step are all it takes for the library to do exactly this
(`tests/benchmarks/test_papers_learners.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEARNERS = 16
NODE = 4


@dataclass(frozen=True)
class Rule:
    """A strategy: gradients are averaged among `group` learners, models of groups as `mixing`
    says, every `period` steps.
    """

    title: str
    library: str
    group: int
    mixing: str
    period: int = 1
    ranks_per_node: int = 1


RULES = {
    "synchronous": Rule("synchronous", "allreduce", LEARNERS, "none"),
    "ring": Rule("fixed ring", "adpsgd:graph=ring", 1, "ring"),
    "random-ring": Rule("randomized ring", "adpsgd:graph=random-ring", 1, "random-ring"),
    "delay-by-one": Rule("delay-by-one", "delay-by-one:replica=rank", 1, "mean"),
    "daso": Rule("DASO, 4 nodes of 4", "daso:period=4,delay=1", NODE, "mean", 4, NODE),
    "node-ring": Rule(
        "ring of 4 nodes of 4", "adpsgd:graph=ring,replica=node", NODE, "ring", 1, NODE
    ),
}


class Cell(NamedTuple):
    """One training: all learners together take `batch` examples a step."""

    task: str
    strategy: str
    batch: int
    rate: float
    seed: int


def ring(members: int) -> NDArray[np.float64]:
    """1/3 self, 1/3 left, 1/3 right."""
    eye = np.eye(members)
    return np.asarray((eye + np.roll(eye, 1, axis=1) + np.roll(eye, -1, axis=1)) / 3)


def mixing(
    rule: Rule, step: int, order: Sequence[int], learners: int = LEARNERS
) -> NDArray[np.float64]:
    """T of a step; `order` is the randomized ring of the round."""
    members = learners // rule.group
    if rule.mixing == "none" or step % rule.period or step == 0:
        small = np.eye(members)
    elif rule.mixing == "mean":
        small = np.full((members, members), 1 / members)
    else:
        small = ring(members)
        if rule.mixing == "random-ring":
            mixed = np.empty_like(small)
            mixed[np.ix_(order, order)] = small
            small = mixed
    return np.kron(small, np.eye(rule.group))


def inside(rule: Rule, learners: int = LEARNERS) -> NDArray[np.float64]:
    """A: gradients averaged among the learners of a group."""
    return np.kron(
        np.eye(learners // rule.group), np.full((rule.group, rule.group), 1 / rule.group)
    )


class Part(NamedTuple):
    """Where a parameter lies in a model's row."""

    name: str
    shape: tuple[int, ...]
    begin: int
    decays: bool


class Layout:
    """The parameters of one model, side by side."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.parts: list[Part] = []
        self.size = 0
        for name, shape in shapes.items():
            self.parts.append(Part(name, shape, self.size, len(shape) > 1))
            self.size += math.prod(shape)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters of the models that are the rows, each stacked along the first axis."""
        return {
            part.name: rows[:, part.begin : part.begin + math.prod(part.shape)].view(
                len(rows), *part.shape
            )
            for part in self.parts
        }

    def decayed(self) -> Tensor:
        """1 for what weight decay pulls at: matrices."""
        return torch.cat(
            [torch.full((math.prod(part.shape),), float(part.decays)) for part in self.parts]
        )


class Task(Protocol):
    """What is learnt, in many models at once."""

    layout: Layout
    momentum: float
    weight_decay: float
    clip: float | None

    def start(self, seed: int) -> Tensor:
        """The row of an untrained model."""

    def steps(self, batch: int) -> int:
        """Of a whole training."""

    def factor(self, step: int, steps: int) -> float:
        """On the rate."""

    def batch(self, step: int, batch: int, seeds: Sequence[int]) -> Any:
        """What all learners take in a step, [seeds, learners, ...]."""

    def losses(self, weights: Mapping[str, Tensor], batch: Any, which: Tensor) -> Tensor:
        """The loss of each model; `which`: the seed, by its place, of every training."""

    def judge(self, weights: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """The quality of each model."""


class Trainings:
    """Trainings with the same task and batch, side by side."""

    def __init__(
        self,
        task: Task,
        cells: Sequence[Cell],
        *,
        device: torch.device,
        rings: Rings,
        dtype: torch.dtype,
    ) -> None:
        self.task = task
        self.cells = cells
        self._rings = rings
        self.seeds = sorted({cell.seed for cell in cells})
        self.batch = cells[0].batch
        self.steps = task.steps(self.batch)
        count = len(cells)
        rows = torch.stack([task.start(cell.seed) for cell in cells]).to(device, dtype)
        self.models = rows[:, None].repeat(1, LEARNERS, 1)
        self._momenta = torch.zeros_like(self.models)
        self._which = torch.tensor([self.seeds.index(cell.seed) for cell in cells])
        self._rates = torch.tensor([cell.rate for cell in cells], device=device, dtype=dtype).view(
            count, 1, 1
        )
        self._decay = (task.layout.decayed() * task.weight_decay).to(device, dtype)
        self._rules = [RULES[cell.strategy] for cell in cells]
        self._inside = self._put([inside(rule) for rule in self._rules])
        self._random = torch.tensor(
            [i for i, rule in enumerate(self._rules) if rule.mixing == "random-ring"],
            device=device,
            dtype=torch.long,
        )
        self._orders = self._tables()
        periods = math.lcm(*(rule.period for rule in self._rules))
        steps = [0, *range(periods, 2 * periods)]
        self._mixings = [
            self._put([mixing(rule, step, range(LEARNERS)) for rule in self._rules])
            for step in steps
        ]

    def _put(self, matrices: Sequence[NDArray[np.float64]]) -> Tensor:
        return torch.from_numpy(np.stack(matrices)).to(self.models)

    def _tables(self) -> Tensor:
        """Where each learner stands in the randomized ring: [rounds, trainings with such a ring,
        learners].
        """
        chosen = [self.cells[i].seed for i in self._random.tolist()]
        if not chosen:
            return torch.empty(0)
        return torch.from_numpy(
            np.stack([np.argsort(self._rings(seed, self.steps), axis=1) for seed in chosen], axis=1)
        ).to(self.models.device)

    def _mixing(self, step: int) -> Tensor:
        cycle = len(self._mixings) - 1
        matrices = self._mixings[0 if step == 0 else 1 + step % cycle]
        if step and len(self._random):
            places = self._orders[step - 1]
            plain = matrices[self._random]
            matrices = matrices.clone()
            rows = torch.gather(plain, 1, places[:, :, None].expand_as(plain))
            matrices[self._random] = torch.gather(rows, 2, places[:, None, :].expand_as(plain))
        return matrices

    def step(self, step: int) -> Tensor:
        """One step of all; the losses [trainings, learners]."""
        task = self.task
        rows = self.models.view(-1, self.task.layout.size)
        weights = {
            name: view.requires_grad_() for name, view in task.layout.views(rows.detach()).items()
        }
        losses = task.losses(weights, task.batch(step, self.batch, self.seeds), self._which)
        gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
        with torch.no_grad():
            flat = torch.cat(
                [gradient.reshape(len(rows), -1) for gradient in gradients], dim=1
            ).view_as(self.models)
            flat = exactly(self._inside, flat)
            if task.clip is not None:
                norms = flat.norm(dim=2, keepdim=True)
                flat.mul_((task.clip / (norms + 1e-6)).clamp(max=1.0))
            flat.addcmul_(self.models, self._decay)
            self._momenta.mul_(task.momentum).add_(flat)
            self.models = exactly(self._mixing(step), self.models)
            self.models.addcmul_(self._momenta, self._rates, value=-task.factor(step, self.steps))
        return losses.detach().view(len(self.cells), LEARNERS)

    def distance(self) -> Tensor:
        """The root mean square distance to the mean model, of every training."""
        return (self.models - self.models.mean(1, keepdim=True)).square().sum(2).mean(1).sqrt()

    def judge(self) -> list[dict[str, float]]:
        """The mean models."""
        with torch.no_grad():
            return self.task.judge(self.task.layout.views(self.models.mean(1)))

    def train(
        self, *, points: int = 40, tell: Callable[[float], None] = lambda share: None
    ) -> list[dict[str, Any]]:
        """To the end; a result for every cell, with the curve of its training loss."""
        total = torch.zeros(len(self.cells), device=self.models.device)
        curve = []
        distances = []
        since = 0
        for step in range(self.steps):
            total += self.step(step).mean(1)
            since += 1
            if (step + 1) * points // self.steps > step * points // self.steps:
                curve.append((total / since).tolist())
                distances.append(self.distance().tolist())
                total.zero_()
                since = 0
                tell((step + 1) / self.steps)
        judged = self.judge()
        return [
            {
                **cell._asdict(),
                "steps": self.steps,
                **judged[i],
                "curve": _rounded(curve, i),
                "distance": _rounded(distances, i),
            }
            for i, cell in enumerate(self.cells)
        ]


class Rings(Protocol):
    """The randomized rings of `rounds` rounds, [rounds, learners]."""

    def __call__(self, seed: int, rounds: int) -> NDArray[np.int64]: ...


def exactly(matrices: Tensor, rows: Tensor) -> Tensor:
    """The product in full precision: models are not rounded to the matrix units' short numbers."""
    short = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.bmm(matrices, rows)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = short


def _rounded(series: Sequence[Sequence[float]], which: int) -> list[float | None]:
    return [round(values[which], 4) if math.isfinite(values[which]) else None for values in series]
