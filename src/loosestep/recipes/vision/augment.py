"""Random crops and flips of a whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift every image [batch, channels, height, width] by up to `padding` pixels each way,
    edges repeated.
    """
    if padding == 0:
        return images
    batch, _, height, width = images.shape
    padded = F.pad(images.float(), (padding,) * 4, mode="replicate").to(images.dtype)
    down, right = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=generator).to(
        images.device
    )
    rows = down + torch.arange(height, device=images.device)
    columns = right + torch.arange(width, device=images.device)
    which = torch.arange(batch, device=images.device)[:, None, None]
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror every second image, left to right."""
    flip = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return torch.where(flip[:, None, None, None], images.flip(3), images)
