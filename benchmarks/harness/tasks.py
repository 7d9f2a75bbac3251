"""Three small tasks that really learn: digits, CIFAR-10 and AN4, with models of 4 MB (AN4: 1 MB).

The compute is real; on top, a step sleeps for a while inside its layers (`seconds`), so that four
ranks on two cores leave each other room, as ranks with accelerators of their own would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.work import Pace, Work, slow_down
from loosestep.recipes.acoustic.recipe import AcousticRecipe
from loosestep.recipes.base import Task
from loosestep.recipes.vision.data import Pictures
from loosestep.recipes.vision.recipe import VisionRecipe, VisionTask

JUDGED = 2000
"""Test images at the most: every run is judged dozens of times."""
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
OPTIONS: dict[str, dict[str, Any]] = {
    "digits": {"batch": 16, "crop": 0, "flip": False},
    "cifar10": {"batch": 32, "size": 16, "crop": 2},
    "an4": {"preset": "tiny", "layers": 1, "cells": 96, "stack": 4, "batch": 4},
}
FOLDERS = {"digits": None, "cifar10": "cifar10", "an4": "an4"}
RATES = {"digits": 0.05, "cifar10": 0.05, "an4": 0.01}
"""Where the search for a peer's learning rate begins."""
QUALITY = {"digits": "accuracy", "cifar10": "accuracy", "an4": "loss"}
TITLES = {
    "digits": "scikit-learn digits, a perceptron of 4 MB",
    "cifar10": "CIFAR-10 (20,000 images brought to 16x16), a convolutional network of 4 MB",
    "an4": "AN4 speech, a bidirectional LSTM with CTC of 1 MB, judged by the test loss",
}


def data_of(name: str) -> Path | None:
    """The folder with the task's data; None for digits, which come with scikit-learn."""
    folder = FOLDERS[name]
    return None if folder is None else DATA / folder


def missing(name: str) -> str | None:
    """Why the task cannot run here, if it cannot."""
    folder = data_of(name)
    return None if folder is None or folder.is_dir() else f"no data in ../shared/data/{folder.name}"


class SmallVision(VisionTask):
    """The vision recipe's data with a network that has more parameters per multiplication than a
    ResNet.
    """

    def build_model(self) -> nn.Module:  # type: ignore[override]
        _, channels, size, _ = self.dataset.train.images.shape
        classes = len(self.dataset.classes)
        if size <= 8:
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(channels * size * size, 960),
                nn.ReLU(),
                nn.Linear(960, 960),
                nn.ReLU(),
                nn.Linear(960, classes),
            )
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 960), nn.ReLU(), nn.Linear(960, classes),
        )  # fmt: skip


def build(name: str, seed: int) -> Task[Any]:
    """The task by name; the data are the same for every seed, the order of the batches and the
    first parameters are not.
    """
    if name == "an4":
        return AcousticRecipe().build(OPTIONS[name], data=data_of(name), seed=seed)
    task = VisionRecipe().build(OPTIONS[name], data=data_of(name), seed=seed)
    test = Pictures(task.dataset.test.images[:JUDGED], task.dataset.test.labels[:JUDGED])
    return SmallVision(
        task.options, replace(task.dataset, test=test), seed=seed, device=task.device
    )


class TaskWork(Work):
    """One rank's share of a task: its own batches, the same model for every peer."""

    def __init__(
        self, *, name: str, seconds: float, lr: float, pace: Pace, seed: int, rank: int, world: int
    ) -> None:
        self.task = build(name, seed)
        self.lr = lr
        self.seconds = seconds
        self.pace = pace
        self.rank = rank
        self.world = world
        self.clip = self.task.training.clip or 0.0
        self.batch = OPTIONS[name]["batch"]

    def make_model(self) -> nn.Module:
        model = self.task.make_model()
        if self.seconds:
            slow_down(model, self.seconds, self.pace)
        return model

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """As the recipe trains: SGD with momentum for images, AdamW for speech; constant rate,
        no decay.
        """
        if self.task.training.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.01)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        for batch in self.task.stream(learner=self.rank, learners=self.world):
            yield self.task.loss(model, batch)


def judge(name: str, seed: int, files: Sequence[Path], *, count: int) -> list[float]:
    """The quality of the ranks' average at `count` moments: of the newest models that each rank had
    kept by then.

    nan where a rank had none yet.
    """
    task = build(name, seed)
    model = task.make_model()
    ranks = [{int(key): vector for key, vector in load_file(file).items()} for file in files]
    qualities: list[float] = []
    last: list[int] = []
    for number in range(1, count + 1):
        newest = [max((key for key in kept if key <= number), default=0) for kept in ranks]
        if newest == last:
            qualities.append(qualities[-1])
        elif 0 in newest:
            qualities.append(float("nan"))
        else:
            vectors = [kept[key] for kept, key in zip(ranks, newest, strict=True)]
            unflatten(model, torch.stack(vectors).mean(dim=0))
            qualities.append(task.evaluate(model)[QUALITY[name]])
        last = newest
    return qualities


def unflatten(model: nn.Module, vector: Tensor) -> None:
    """The inverse of `block.flat`."""
    state = model.state_dict()
    position = 0
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.copy_(vector[position : position + tensor.numel()].view_as(tensor))
            position += tensor.numel()
