"""A task of the user's own that trains in no time: two clouds of points, a small network, a
schedule with a memory.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loosestep.recipes import DatasetTask, Progress, RecipeError, Training


def recipe(
    options: dict[str, Any], *, data: Any, seed: int, device: torch.device, progress: Progress
) -> DatasetTask:
    if "wrong" in options:
        raise RecipeError("option wrong is wrong")
    points = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    labels = (points.sum(1) > 0).long()
    hidden = int(options.get("hidden", 8))
    scale = math.nan if options.get("breaks") == str(seed) else float(options.get("scale", 1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(float(options.get("pause", 0)))  # computing, as far as the others can see
        if Path(options.get("fails", "")).is_file():
            raise RecipeError("the flag is set")
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * scale

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float((model(points).argmax(1) == labels).double().mean())}

    return DatasetTask(
        make_model=lambda: nn.Sequential(
            nn.Linear(4, hidden), nn.Dropout(0.2), nn.ReLU(), nn.Linear(hidden, 2)
        ),
        dataset=list(zip(points, labels, strict=True)),
        loss=loss,
        evaluate=evaluate,
        training=Training(
            lr=0.3,
            optimizer=options.get("optimizer", "sgd"),
            schedule=str(options.get("schedule", "plateau")),
        ),
        batch=int(options.get("batch", 8)),
        seed=seed,
        device=device,
        name="tiny",
    )
