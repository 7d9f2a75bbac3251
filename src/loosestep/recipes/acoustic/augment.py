"""Variations of one utterance's features: speed, phase of the frames, masks. Noise is added on
the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .corpus import Labels
from .features import Frames


@dataclass(frozen=True)
class Augmentation:
    """`speed` .1: 10 % slower to faster; masks: how many, and how wide at most (frames, mel
    bins).
    """

    speed: float = 0.0
    time_masks: int = 0
    time_width: int = 0
    bin_masks: int = 0
    bin_width: int = 0
    bins: int = 0
    phase: int = 1

    def __call__(
        self, frames: Frames, labels: Labels | None, draw: np.random.Generator
    ) -> tuple[Frames, Labels | None]:
        if self.phase > 1 and len(frames) > self.phase:
            first = int(draw.integers(self.phase))  # stacked frames begin anywhere
            frames = frames[first:]
            labels = None if labels is None else labels[first:]
        if self.speed:
            frames, labels = self._at_other_speed(
                frames, labels, draw.uniform(1 - self.speed, 1 + self.speed)
            )
        if self.time_masks or (self.bin_masks and self.bins):
            frames = self._masked(frames.copy(), draw)
        return frames, labels

    def _at_other_speed(
        self, frames: Frames, labels: Labels | None, factor: float
    ) -> tuple[Frames, Labels | None]:
        """Linear interpolation between frames at  t_i = i * factor."""
        at = np.arange(max(1, round(len(frames) / factor))) * factor
        at = np.minimum(at, len(frames) - 1)
        left = at.astype(np.int64)
        right = np.minimum(left + 1, len(frames) - 1)
        weight = (at - left).astype(np.float32)[:, None]
        mixed = frames[left] + weight * (frames[right] - frames[left])
        return mixed, None if labels is None else labels[np.rint(at).astype(np.int64)]

    def _masked(self, frames: Frames, draw: np.random.Generator) -> Frames:
        """Zero (the mean) in some stretches of time and some bands; never more than a fifth of
        the time at once.
        """
        for _ in range(self.time_masks):
            width = int(draw.integers(0, min(self.time_width, len(frames) // 5) + 1))
            start = int(draw.integers(0, len(frames) - width + 1))
            frames[start : start + width] = 0.0
        for _ in range(self.bin_masks if self.bins else 0):
            width = int(draw.integers(0, min(self.bin_width, self.bins) + 1))
            start = int(draw.integers(0, self.bins - width + 1))
            # the same bins of the energies and their derivatives
            bands = frames.reshape(len(frames), -1, self.bins)
            bands[:, :, start : start + width] = 0.0
        return frames
