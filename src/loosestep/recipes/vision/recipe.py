"""The vision recipe: options, presets, and the task that trains and judges a residual network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import (
    Example,
    Option,
    Progress,
    Quality,
    Task,
    Training,
    list_options,
    no_progress,
    option,
    parse_options,
)
from ..cache import cache_folder
from ..errors import require
from ..order import Order, mix
from ..schedules import NAMES
from .augment import random_crop, random_flip
from .data import Dataset, Pictures, digits, read_images
from .resnet import resnet
from .scenes import scenes
from .unet import UNet


@dataclass(frozen=True)
class VisionOptions:
    """What `--set` can change. The training settings are the DASO authors' unless said
    otherwise.
    """

    preset: str = option(
        "digits", "defaults for the size of the problem", ("digits", "small", "paper", "scenes")
    )
    model: str = option(
        "resnet20", "the network", ("resnet8", "resnet20", "resnet18", "resnet50", "unet")
    )
    width: float = option(1.0, "multiplies the channels")
    norm: str = option("group", "normalisation layers", ("group", "batch"))
    batch: int = option(32, "images per gradient")
    size: int = option(32, "images are brought to this many pixels each way")
    crop: int = option(4, "training images are shifted by up to this many pixels")
    flip: bool = option(True, "training images are mirrored at random")
    lr: float = option(0.025, "learning rate of one learner with this batch (SGD)")
    momentum: float = option(0.9, "of SGD")
    weight_decay: float = option(1e-4, "of SGD")
    schedule: str = option("plateau", "learning-rate rule", NAMES)
    epochs: float = option(30.0, "how long to train when nothing else is said")

    def __post_init__(self) -> None:
        for name in ("batch", "size"):
            require(
                getattr(self, name) >= 1,
                f"option {name} must be at least 1, got {getattr(self, name)}",
            )
        require(self.crop >= 0, f"option crop must be at least 0, got {self.crop}")
        for name in ("width", "lr", "epochs"):
            require(
                getattr(self, name) > 0,
                f"option {name} must be positive, got {getattr(self, name)}",
            )


SCENES = "scenes"  # every pixel has a class: generated pictures, a U-Net
PRESETS: dict[str, dict[str, Any]] = {
    SCENES: {
        "model": "unet",
        "norm": "batch",
        "width": 0.5,
        "crop": 0,
        "flip": False,
        "lr": 0.1,
        "batch": 16,
        "epochs": 20.0,
    },
    "digits": {"width": 0.5, "size": 8, "crop": 0, "flip": False, "lr": 0.1, "epochs": 10.0},
    "small": {},
    "paper": {
        "model": "resnet50",
        "norm": "batch",
        "size": 224,
        "crop": 16,
        "batch": 64,
        "epochs": 90.0,
    },
}


class VisionRecipe:
    name = "vision"

    def options(
        self, given: Mapping[str, Any] | None = None, *, data: Path | None = None
    ) -> list[Option]:
        return list_options(self._choose(given or {}, data))

    def _choose(self, given: Mapping[str, Any], data: Path | None) -> VisionOptions:
        """What was given, on top of its preset: `small` for pictures of the user's own."""
        preset = {} if data is None else {"preset": "small"}
        return parse_options(VisionOptions, {**preset, **given}, PRESETS)

    def build(
        self,
        options: Mapping[str, Any],
        *,
        data: Path | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress = no_progress,
    ) -> VisionTask:
        """A task on the pictures in `data` (preset `small` unless said otherwise), or on the
        digits.
        """
        chosen = self._choose(options, data)
        if chosen.preset == SCENES:
            require(data is None, "preset scenes makes its own pictures; leave data out")
            require(
                chosen.model == "unet" and chosen.crop == 0 and not chosen.flip,
                "preset scenes takes model=unet, crop=0 and flip=false: classes are those of pixels",
            )
            return SceneTask(chosen, scenes(chosen.size), seed=seed, device=torch.device(device))
        require(chosen.model != "unet", "model unet classifies pixels; it takes preset scenes")
        if data is None:
            dataset = digits(chosen.size)
        else:
            dataset = read_images(
                Path(data), size=chosen.size, cache=cache_folder(), progress=progress
            )
        return VisionTask(chosen, dataset, seed=seed, device=torch.device(device))


class VisionTask(Task[Pictures]):
    """Images to classes by cross-entropy, judged by accuracy."""

    name = "vision"
    quality = Quality("accuracy", "higher")

    def __init__(
        self, options: VisionOptions, dataset: Dataset, *, seed: int, device: torch.device
    ) -> None:
        self.options = options
        self.seed = seed
        self.device = device
        self.dataset = dataset
        self.training = Training(
            optimizer="sgd",
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            schedule=options.schedule,
            epochs=options.epochs,
        )
        self.order = Order(len(dataset.train.labels), batch=options.batch, seed=seed)
        self._train = Pictures(dataset.train.images.to(device), dataset.train.labels.to(device))
        self._mean, self._deviation = _channel_statistics(dataset.train.images, device)

    def build_model(self) -> nn.Module:
        _, channels, height, _ = self.dataset.train.images.shape
        return resnet(
            self.options.model,
            channels=channels,
            classes=len(self.dataset.classes),
            width=self.options.width,
            norm=self.options.norm,  # type: ignore[arg-type]
            large_images=height > 64,
        )

    def load(self, number: int) -> Pictures:
        which = torch.from_numpy(self.order[number]).to(self.device)
        generator = torch.Generator().manual_seed(mix(self.seed, "augment", number))
        images = random_crop(self._train.images[which], self.options.crop, generator)
        if self.options.flip:
            images = random_flip(images, generator)
        return Pictures(self._normalised(images), self._train.labels[which])

    def batch_loss(self, model: nn.Module, batch: Pictures) -> Tensor:
        return F.cross_entropy(model(batch.images), batch.labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`accuracy` and `loss`."""
        scores = self._scores(model, self.dataset.test.images)
        labels = self.dataset.test.labels
        right = int((scores.argmax(dim=1) == labels).sum())
        return {"accuracy": right / len(labels), "loss": float(F.cross_entropy(scores, labels))}

    def examples(self, model: nn.Module, count: int = 10) -> list[Example]:
        step = max(1, len(self.dataset.test.labels) // count)
        best = self._scores(model, self.dataset.test.images[::step][:count]).argmax(dim=1).tolist()
        labels = self.dataset.test.labels[::step][:count].tolist()
        names = self.dataset.classes
        return [
            Example(f"test image {i * step}", names[label], names[found])
            for i, (label, found) in enumerate(zip(labels, best, strict=True))
        ]

    def describe(self) -> dict[str, str | int | float]:
        return {
            "data": self.dataset.name,
            "training images": len(self.dataset.train.labels),
            "test images": len(self.dataset.test.labels),
            "classes": len(self.dataset.classes),
        }

    @torch.no_grad()
    def _scores(self, model: nn.Module, images: Tensor, size: int = 500) -> Tensor:
        """The model's scores on the CPU, in its evaluation mode."""
        training = model.training
        model.eval()
        parts = [
            model(self._normalised(part.to(self.device))).float().cpu()
            for part in torch.split(images, size)
        ]
        model.train(training)
        return torch.cat(parts)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._deviation


class SceneTask(VisionTask):
    """Pixels to classes by cross-entropy, judged by the mean intersection over union."""

    quality = Quality("iou", "higher")

    def build_model(self) -> nn.Module:
        return UNet(
            channels=self.dataset.train.images.shape[1],
            classes=len(self.dataset.classes),
            width=max(1, round(16 * self.options.width)),
            norm=self.options.norm,  # type: ignore[arg-type]
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`iou`, the mean over the classes of pixels in both over pixels in either; `loss`."""
        scores = self._scores(model, self.dataset.test.images)
        labels = self.dataset.test.labels
        return {
            "iou": mean_iou(scores.argmax(dim=1), labels, len(self.dataset.classes)),
            "loss": float(F.cross_entropy(scores, labels)),
        }

    def examples(self, model: nn.Module, count: int = 10) -> list[Example]:
        """None: a scene is no line of text."""
        return []


def mean_iou(found: Tensor, labels: Tensor, classes: int) -> float:
    """Over the classes that are in either."""
    shares = []
    for number in range(classes):
        ours = found == number
        theirs = labels == number
        either = int((ours | theirs).sum())
        if either:
            shares.append(int((ours & theirs).sum()) / either)
    return sum(shares) / len(shares)


def _channel_statistics(images: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel, ready for broadcasting; in pieces, to stay
    small.
    """
    total = torch.zeros(images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in torch.split(images, 1024):
        total += part.double().sum(dim=(0, 2, 3))
        squares += (part.double() ** 2).sum(dim=(0, 2, 3))
    count = images.numel() / images.shape[1]
    mean = total / count
    deviation = (squares / count - mean**2).clamp_min(1.0).sqrt()
    return mean.float().view(1, -1, 1, 1).to(device), deviation.float().view(1, -1, 1, 1).to(device)
