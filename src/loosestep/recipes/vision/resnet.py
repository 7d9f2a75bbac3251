"""Residual networks: ResNet-20 for small images (He et al., section 4.2), ResNet-18 and ResNet-50.

GroupNorm or BatchNorm: GroupNorm has no running statistics on which replicas that learn on their
own could disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

NormKind = Literal["group", "batch"]
Norm = Callable[[int], nn.Module]


def make_norm(kind: NormKind) -> Norm:
    """A constructor of normalisation layers by number of channels; up to 8 groups."""
    if kind == "batch":
        return nn.BatchNorm2d
    return lambda channels: nn.GroupNorm(math.gcd(8, channels), channels)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class _Residual(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(
        self, body: nn.Sequential, inputs: int, outputs: int, stride: int, norm: Norm
    ) -> None:
        super().__init__()
        self.body = body
        changes = stride != 1 or inputs != outputs
        self.shortcut = (
            nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))
            if changes
            else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)
        last = body[-1]
        nn.init.zeros_(last.weight)  # type: ignore[arg-type]  # every block begins as the identity

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.body(images) + self.shortcut(images)
        out: Tensor = self.relu(total)
        return out


def basic_block(inputs: int, width: int, stride: int, norm: Norm) -> tuple[nn.Module, int]:
    """Two 3x3 convolutions; returns the block and how many channels it gives."""
    body = nn.Sequential(
        _conv(inputs, width, 3, stride), norm(width), nn.ReLU(inplace=True),
        _conv(width, width, 3), norm(width),
    )  # fmt: skip
    return _Residual(body, inputs, width, stride, norm), width


def bottleneck_block(inputs: int, width: int, stride: int, norm: Norm) -> tuple[nn.Module, int]:
    """1x1, 3x3 and 1x1 to four times the width."""
    outputs = 4 * width
    body = nn.Sequential(
        _conv(inputs, width, 1), norm(width), nn.ReLU(inplace=True),
        _conv(width, width, 3, stride), norm(width), nn.ReLU(inplace=True),
        _conv(width, outputs, 1), norm(outputs),
    )  # fmt: skip
    return _Residual(body, inputs, outputs, stride, norm), outputs


class ResNet(nn.Module):
    """Stem, stages of residual blocks (each after the first halves the image), mean over the
    image, linear.
    """

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        block: Callable[[int, int, int, Norm], tuple[nn.Module, int]],
        norm: NormKind = "group",
        large_images: bool = False,
    ) -> None:
        super().__init__()
        layer = make_norm(norm)
        width = widths[0]
        stem: list[nn.Module] = [
            _conv(channels, width, 7, 2) if large_images else _conv(channels, width, 3)
        ]
        stem += [layer(width), nn.ReLU(inplace=True)]
        if large_images:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        stages: list[nn.Module] = []
        at = width
        for stage, (stage_width, count) in enumerate(zip(widths, blocks, strict=True)):
            for i in range(count):
                made, at = block(at, stage_width, 2 if stage > 0 and i == 0 else 1, layer)
                stages.append(made)
        self.stem = nn.Sequential(*stem)
        self.stages = nn.Sequential(*stages)
        self.output = nn.Linear(at, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.output(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return scores


def resnet(
    name: str,
    *,
    channels: int,
    classes: int,
    width: float = 1.0,
    norm: NormKind = "group",
    large_images: bool = False,
) -> ResNet:
    """`resnet8`, `resnet20`, `resnet18` or `resnet50`; `width` multiplies the channels (.5: half
    as many).
    """
    shapes = {
        "resnet8": ((16, 32, 64), (1, 1, 1), basic_block),
        "resnet20": ((16, 32, 64), (3, 3, 3), basic_block),
        "resnet18": ((64, 128, 256, 512), (2, 2, 2, 2), basic_block),
        "resnet50": ((64, 128, 256, 512), (3, 4, 6, 3), bottleneck_block),
    }
    if name not in shapes:
        raise ValueError(f"model must be one of {', '.join(shapes)}, got {name!r}")
    widths, blocks, block = shapes[name]
    return ResNet(
        channels=channels,
        classes=classes,
        widths=[max(1, round(w * width)) for w in widths],
        blocks=blocks,
        block=block,
        norm=norm,
        large_images=large_images,
    )
