"""A small network for segmentation: down, up again, with what was there before beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .resnet import NormKind, make_norm


class UNet(nn.Module):
    """Two convolutions a level (Ronneberger et al., 2015); a level has half the pixels each way and
    twice the channels of the one above. Scores [batch, classes, height, width].
    """

    def __init__(
        self, *, channels: int, classes: int, width: int, levels: int = 3, norm: NormKind = "batch"
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        pairs = list(zip([channels, *widths], widths, strict=False))
        self.down = nn.ModuleList(_two(inputs, outputs, norm) for inputs, outputs in pairs)
        self.up = nn.ModuleList(
            _two(deep + flat, flat, norm)
            for flat, deep in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.output = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        passed = []
        for number, part in enumerate(self.down):
            images = part(F.max_pool2d(images, 2) if number else images)
            passed.append(images)
        for part, beside in zip(self.up, passed[-2::-1], strict=True):
            larger = F.interpolate(images, beside.shape[-2:], mode="nearest")
            images = part(torch.cat([larger, beside], dim=1))
        scores: Tensor = self.output(images)
        return scores


def _two(inputs: int, outputs: int, norm: NormKind) -> nn.Sequential:
    layer = make_norm(norm)
    parts: list[nn.Module] = []
    for before in (inputs, outputs):
        convolution = nn.Conv2d(before, outputs, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        parts += [convolution, layer(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)
