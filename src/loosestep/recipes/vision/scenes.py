"""Scenes for segmentation: shapes on a ground, drawn from a seed; every pixel has a class."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..order import mix
from .data import Dataset, Pictures

CLASSES = ("ground", "disc", "box", "triangle", "bar")
COLOURS = ((0, 0, 0), (190, 90, 90), (90, 190, 90), (90, 90, 190), (160, 160, 80))


def scenes(size: int = 32, *, train: int = 800, test: int = 200) -> Dataset:
    """Pictures of three to six shapes that hide each other, in colours that hint at which."""
    parts = []
    for name, count in (("train", train), ("test", test)):
        draw = np.random.default_rng(mix(0, "scenes", size, name))
        images, labels = zip(*(_scene(draw, size) for _ in range(count)), strict=True)
        parts.append(Pictures(torch.stack(images), torch.stack(labels)))
    return Dataset("generated scenes", parts[0], parts[1], CLASSES)


def _scene(draw: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Three channels of bytes, and a class for every pixel."""
    image = np.broadcast_to(draw.uniform(0, 255, 3), (size, size, 3)).copy()
    labels = np.zeros((size, size), np.int64)
    for _ in range(int(draw.integers(3, 7))):
        kind = int(draw.integers(1, len(CLASSES)))
        inside = _shape(kind, draw, size)
        image[inside] = COLOURS[kind] + draw.normal(0, 35, 3)
        labels[inside] = kind
    image += draw.normal(0, 25, image.shape)
    pixels = torch.from_numpy(image.clip(0, 255).astype(np.uint8)).permute(2, 0, 1)
    return pixels, torch.from_numpy(labels)


def _shape(kind: int, draw: np.random.Generator, size: int) -> NDArray[np.bool_]:
    """The pixels of a shape, at a random place, turned at random."""
    x, y = np.meshgrid(np.arange(size), np.arange(size))
    turn = draw.uniform(0, 2 * np.pi)
    radius = draw.uniform(0.15, 0.3) * size
    across = x - draw.uniform(0, size)
    down = y - draw.uniform(0, size)
    u = across * np.cos(turn) + down * np.sin(turn)
    v = down * np.cos(turn) - across * np.sin(turn)
    if kind == 1:
        return np.asarray(u**2 + v**2 < radius**2)
    if kind == 2:
        return np.asarray(np.maximum(abs(u), abs(v)) < 0.85 * radius)
    if kind == 3:
        return np.asarray((v > -0.6 * radius) & (v < 1.2 * radius - 1.8 * abs(u)))
    return np.asarray((abs(u) < 1.8 * radius) & (abs(v) < 0.25 * radius))
