"""A task from what a PyTorch script already has: a model, a dataset, a loss and an evaluation.

# mine.py                                       loosestep train mine.py:recipe --set width=64
from loosestep.recipes import DatasetTask, Training

def recipe(options, *, data, seed, device, progress):
    width = int(options.get("width", 32))
    return DatasetTask(make_model=lambda: Net(width), dataset=..., loss=..., evaluate=...,
                       training=Training(lr=.05), seed=seed, device=device)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .base import Quality, Task, Training
from .errors import RecipeError
from .order import Order


class SizedDataset(Protocol):
    """Any map-style dataset: torch.utils.data.Dataset with a length, a list of tuples, ..."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetTask(Task[Any]):
    """`loss(model, batch)` and `evaluate(model)` are the script's own; batches are collated as a
    DataLoader would.
    """

    def __init__(
        self,
        *,
        make_model: Callable[[], nn.Module],
        dataset: SizedDataset,
        loss: Callable[[nn.Module, Any], Tensor],
        evaluate: Callable[[nn.Module], dict[str, float]],
        quality: Quality | None = None,
        training: Training | None = None,
        batch: int = 32,
        seed: int = 0,
        device: torch.device | str = "cpu",
        name: str = "own",
    ) -> None:
        self.name = name
        self.quality = quality or Quality("accuracy", "higher")
        self.training = training or Training()
        self.seed = seed
        self.device = torch.device(device)
        self.order = Order(len(dataset), batch=batch, seed=seed)
        self._make_model = make_model
        self._dataset = dataset
        self._loss = loss
        self._evaluate = evaluate

    def build_model(self) -> nn.Module:
        return self._make_model()

    def load(self, number: int) -> Any:
        batch = torch.utils.data.default_collate(
            [self._dataset[int(i)] for i in self.order[number]]
        )
        return _moved(batch, self.device)

    def batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        training = model.training
        model.eval()
        with torch.no_grad():
            metrics = self._evaluate(model)
        model.train(training)
        if not isinstance(metrics, dict) or self.quality.name not in metrics:
            raise RecipeError(
                f"evaluate must return a dict with {self.quality.name!r}, got {metrics!r}; "
                "what to judge by is DatasetTask(quality=Quality(name, better), ...)"
            )
        return metrics


def _moved(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
