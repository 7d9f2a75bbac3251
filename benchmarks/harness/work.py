"""What a step computes. All peers get the same work: model, optimizer, batches, loss."""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LAYERS = 8


class Pace:
    """How many times longer than usual this rank's compute takes: a slow rank, jitter from step
    to step.
    """

    def __init__(self, *, slower: float = 1.0, jitter: float = 0.0, seed: int = 0) -> None:
        self.slower = slower
        self.jitter = jitter
        self.factor = slower
        self._random = random.Random(seed)

    def next(self) -> None:
        """Draw the next step's factor: 1 plus an exponential variable of mean `jitter`."""
        drawn = self._random.expovariate(1 / self.jitter) if self.jitter else 0.0
        self.factor = self.slower * (1 + drawn)


class Sleep(torch.autograd.Function):
    """The identity; takes so many seconds forward, so many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, pace: Pace) -> Tensor:
        ctx.backward_seconds = seconds * 2 / 3 * pace.factor
        time.sleep(seconds / 3 * pace.factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None


def slow_down(model: nn.Module, seconds: float, pace: Pace) -> None:
    """A step of this model sleeps for so many seconds, one third forward, spread over its linear
    layers and convolutions.

    The sleeping stands for an accelerator at work: the CPU is free, and what overlaps backward may.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for layer in layers:
        layer.register_forward_hook(
            lambda _m, _i, out: Sleep.apply(out, seconds / len(layers), pace)
        )


class Work(ABC):
    """One rank's share of a benchmark's work."""

    pace: Pace
    clip: float = 0.0
    batch: int = 1

    @abstractmethod
    def make_model(self) -> nn.Module: ...

    @abstractmethod
    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """For all of the model's parameters, or for some: peers that update bucket by bucket
        want several.
        """

    @abstractmethod
    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """One loss per step, without end."""


class Layers(Work):
    """Equal layers on random data. `seconds` > 0: emulated compute; 0: only what the layers
    really cost.
    """

    def __init__(
        self, *, megabytes: float, seconds: float, batch: int, pace: Pace, seed: int, rank: int
    ) -> None:
        self.width = round(math.sqrt(megabytes * 1e6 / 4 / LAYERS))
        self.seconds = seconds
        self.batch = batch
        self.pace = pace
        self.seed = seed
        self.rank = rank

    def make_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        pairs = [(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(LAYERS)]
        model = nn.Sequential(*[module for pair in pairs for module in pair])
        if self.seconds:
            slow_down(model, self.seconds, self.pace)
        return model

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.rank)
        x, y = (torch.randn(self.batch, self.width, generator=generator) for _ in range(2))
        while True:
            yield nn.functional.mse_loss(model(x), y)


def make_work(settings: Mapping[str, Any], *, pace: Pace, seed: int, rank: int, world: int) -> Work:
    """`{"kind": "layers", "megabytes": 4, "seconds": 0.1}` or `{"kind": "task", "name":
    "digits", ...}`.
    """
    kind = settings["kind"]
    options = {key: value for key, value in settings.items() if key != "kind"}
    if kind == "layers":
        return Layers(**{"batch": 4, **options}, pace=pace, seed=seed, rank=rank)
    if kind == "task":
        from harness.tasks import TaskWork  # late: reads data

        return TaskWork(**options, pace=pace, seed=seed, rank=rank, world=world)
    raise ValueError(f"unknown work {kind!r}: expected layers or task")
