"""The vision recipe's residual network with many models at once, on CIFAR-10.

A convolution is a product of matrices: neighbourhoods laid side by side, times the weights, model
by model. `prepare` reads the pictures with the recipe; after that nothing but torch and numpy is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from papers.learners import LEARNERS, Layout

OPTIONS = {"model": "resnet8", "size": 16, "crop": 2}
CROP = 2
EPOCHS = 21  # 102 steps with the largest batch


class Shown(NamedTuple):
    """`images` [seeds, learners, batch, height, width, channels]."""

    images: Tensor
    labels: Tensor


# Many convolutions --------------------------------------------------------------------------------


def neighbourhoods(images: Tensor, size: int, stride: int) -> Tensor:
    """[models, batch, height, width, channels] -> [models, pixels, size * size * channels],
    edges filled with zeros.
    """
    models, batch, height, width, channels = images.shape
    if size > 1:
        images = F.pad(images, (0, 0, *(size // 2,) * 4))
    images = images.contiguous()
    of_model, of_image, of_row, of_pixel, _ = images.stride()
    views = images.as_strided(
        (models, batch, -(-height // stride), -(-width // stride), size, size * channels),
        (of_model, of_image, stride * of_row, stride * of_pixel, of_row, 1),
    )
    return views.reshape(models, -1, size * size * channels)


def columns(weight: Tensor) -> Tensor:
    """[models, outputs, channels, size, size] -> [models, outputs, size * size * channels]"""
    return weight.permute(0, 1, 3, 4, 2).flatten(2)


class Convolution(torch.autograd.Function):
    """`weight` [models, outputs, channels, size, size]. Neighbourhoods are laid out again in
    backward: memory is scarcer.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(images, weight)
        ctx.stride = stride
        models, batch, height, width, _ = images.shape
        flat = torch.bmm(
            neighbourhoods(images, weight.shape[-1], stride), columns(weight).transpose(1, 2)
        )
        return flat.view(models, batch, -(-height // stride), -(-width // stride), -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor, None]:
        images, weight = ctx.saved_tensors
        stride = ctx.stride
        size = weight.shape[-1]
        slope = upstream[0].contiguous()
        flat = slope.flatten(1, 3)
        grown = torch.bmm(flat.transpose(1, 2), neighbourhoods(images, size, stride))
        models, outputs, channels = weight.shape[:3]
        grown = grown.view(models, outputs, size, size, channels).permute(0, 1, 4, 2, 3)
        if not ctx.needs_input_grad[0]:
            return None, grown, None
        if stride > 1:
            apart = slope.new_zeros(*images.shape[:4], slope.shape[-1])
            apart[:, :, ::stride, ::stride] = slope
            slope = apart
        turned = weight.flip(3, 4).transpose(1, 2)
        back = torch.bmm(neighbourhoods(slope, size, 1), columns(turned).transpose(1, 2))
        return back.view_as(images), grown, None


def group_norm(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Up to eight groups, as the recipe has it."""
    channels = images.shape[-1]
    groups = math.gcd(8, channels)
    split = images.unflatten(-1, (groups, channels // groups))
    variance, mean = torch.var_mean(split, dim=(2, 3, 5), keepdim=True, correction=0)
    normal = ((split - mean) * torch.rsqrt(variance + 1e-5)).flatten(-2)
    shape = (len(images), 1, 1, 1, channels)
    return torch.addcmul(bias.view(shape), normal, weight.view(shape))


def block(images: Tensor, weights: Mapping[str, Tensor], name: str, stride: int) -> Tensor:
    """relu(body(x) + shortcut(x))"""

    def part(inputs: Tensor, convolution: str, norm: str, by: int) -> Tensor:
        out = Convolution.apply(inputs, weights[f"{name}.{convolution}.weight"], by)
        return group_norm(out, weights[f"{name}.{norm}.weight"], weights[f"{name}.{norm}.bias"])

    inner = F.relu(part(images, "body.0", "body.1", stride))
    total = part(inner, "body.3", "body.4", 1)
    changes = f"{name}.shortcut.0.weight" in weights
    return F.relu(total + (part(images, "shortcut.0", "shortcut.1", stride) if changes else images))


def scores(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """[models, batch, classes] of [models, batch, height, width, channels]."""
    images = Convolution.apply(images, weights["stem.0.weight"], 1)
    images = F.relu(group_norm(images, weights["stem.1.weight"], weights["stem.1.bias"]))
    blocks = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("stages"))
    for number in range(blocks):
        halves = f"stages.{number}.shortcut.0.weight" in weights
        images = block(images, weights, f"stages.{number}", 2 if halves else 1)
    return torch.baddbmm(
        weights["output.bias"][:, None],
        images.mean((2, 3)),
        weights["output.weight"].transpose(1, 2),
    )


# The task -----------------------------------------------------------------------------------------


class Pictures:
    """CIFAR-10 out of `prepare`'s arrays."""

    momentum = 0.9
    weight_decay = 1e-4
    clip = None
    warm_up = 5.0

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], *, device: torch.device, epochs: float = EPOCHS
    ) -> None:
        self.device = device
        self.epochs = epochs
        names = [str(name) for name in arrays["names"]]
        shapes = [tuple(int(side) for side in str(shape).split("x")) for shape in arrays["shapes"]]
        self.layout = Layout(dict(zip(names, shapes, strict=True)))
        self._starts = torch.from_numpy(arrays["starts"])
        # [count, channels, height, width], bytes
        self._images = torch.from_numpy(arrays["images"]).to(device)
        self._labels = torch.from_numpy(arrays["labels"].astype(np.int64)).to(device)
        self._test = int(arrays["test"])
        self._train = len(self._labels) - self._test
        self._mean = torch.from_numpy(arrays["mean"]).to(device)
        self._deviation = torch.from_numpy(arrays["deviation"]).to(device)
        self._orders: dict[int, Tensor] = {}

    def start(self, seed: int) -> Tensor:
        return self._starts[seed]

    def steps(self, batch: int) -> int:
        return int(self.epochs * self._train / batch)

    def factor(self, step: int, steps: int) -> float:
        """Five epochs from a sixteenth of the rate up to it, then a cosine to zero."""
        warm = self.warm_up / self.epochs * steps
        if step < warm:
            return 1 / LEARNERS + (1 - 1 / LEARNERS) * step / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))

    def batch(self, step: int, batch: int, seeds: Sequence[int]) -> Shown:
        """Shifted and mirrored at random, drawn on the device."""
        which = torch.stack(
            [self._order(seed)[step * batch : (step + 1) * batch] for seed in seeds]
        )
        images = self._images[which.flatten()]
        count, channels, height, width = images.shape
        down, right = torch.randint(-CROP, CROP + 1, (2, count, 1), device=self.device)
        flip = torch.rand(count, 1, device=self.device) < 0.5
        rows = (torch.arange(height, device=self.device) + down).clamp(0, height - 1)
        columns = (torch.arange(width, device=self.device) + right).clamp(0, width - 1)
        columns = torch.where(flip, columns.flip(1), columns)
        at = torch.arange(count, device=self.device)[:, None, None]
        images = images.permute(0, 2, 3, 1)[at, rows[:, :, None], columns[:, None, :]]
        shape = (len(seeds), LEARNERS, batch // LEARNERS)
        return Shown(
            self._normal(images).view(*shape, height, width, channels),
            self._labels[which].view(shape),
        )

    def _order(self, seed: int) -> Tensor:
        if seed not in self._orders:
            draw = np.random.default_rng([seed, 3])
            epochs = math.ceil(self.epochs)
            order = np.concatenate([draw.permutation(self._train) for _ in range(epochs)])
            self._orders[seed] = torch.from_numpy(order).to(self.device)
        return self._orders[seed]

    def _normal(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._deviation

    def losses(self, weights: Mapping[str, Tensor], batch: Shown, which: Tensor) -> Tensor:
        images = batch.images[which].flatten(0, 1)
        labels = batch.labels[which].flatten(0, 1)
        found = scores(weights, images.to(weights["output.bias"].dtype))
        return (
            F.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="none")
            .view(labels.shape)
            .mean(1)
        )

    def judge(self, weights: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Accuracy and loss on the test set, of every model."""
        models = len(weights["output.bias"])
        right = torch.zeros(models, device=self.device)
        loss = torch.zeros(models, device=self.device, dtype=weights["output.bias"].dtype)
        for at in torch.arange(self._train, self._train + self._test, device=self.device).split(
            500
        ):
            images = self._normal(self._images[at].permute(0, 2, 3, 1)).to(
                weights["output.bias"].dtype
            )
            labels = self._labels[at].expand(models, -1)
            found = scores(weights, images.expand(models, *images.shape))
            right += (found.argmax(-1) == labels).sum(1)
            each = F.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="none")
            loss += each.view(labels.shape).sum(1)
        return [
            {"accuracy": hit / self._test, "loss": value / self._test}
            for hit, value in zip(right.tolist(), loss.tolist(), strict=True)
        ]


def prepare(data: Path, seeds: int) -> dict[str, NDArray[Any]]:
    """The pictures and untrained models as arrays."""
    from loosestep.recipes.vision.recipe import VisionRecipe

    tasks = [VisionRecipe().build(OPTIONS, data=data, seed=seed) for seed in range(seeds)]
    dataset = tasks[0].dataset
    pixels = dataset.train.images.double()
    states = [other.make_model().state_dict() for other in tasks]
    return {
        "images": torch.cat([dataset.train.images, dataset.test.images]).numpy(),
        "labels": torch.cat([dataset.train.labels, dataset.test.labels]).numpy().astype(np.int16),
        "test": np.array(len(dataset.test.labels)),
        "mean": pixels.mean((0, 2, 3)).float().numpy(),
        "deviation": pixels.std((0, 2, 3), correction=0).clamp_min(1).float().numpy(),
        "names": np.array(list(states[0])),
        "shapes": np.array(["x".join(map(str, tensor.shape)) for tensor in states[0].values()]),
        "starts": np.stack(
            [torch.cat([t.flatten() for t in state.values()]).numpy() for state in states]
        ),
    }
