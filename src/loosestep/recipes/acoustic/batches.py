"""Utterances as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import features
from .corpus import Labels
from .features import Frames

PADDING = -100


@dataclass(frozen=True)
class Batch:
    """`frames` [batch, longest, features]; lengths on the CPU, where cuDNN and CTC want them.

    `targets` are the transcripts' units one after another, or [batch, longest] frame labels,
    PADDING past the end.
    """

    frames: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


def collate(
    frames: Sequence[Frames],
    *,
    units: Sequence[Sequence[int]] | None,
    labels: Sequence[Labels] | None,
    stack: int,
    device: torch.device,
) -> Batch:
    """Stack and pad; `units` for CTC, `labels` for frame cross-entropy (a stacked frame has its
    middle frame's).
    """
    stacked = [features.stack(f, stack) for f in frames]
    lengths = torch.tensor([len(f) for f in stacked])
    padded = np.zeros((len(stacked), int(lengths.max()), stacked[0].shape[1]), np.float32)
    for row, utterance in zip(padded, stacked, strict=True):
        row[: len(utterance)] = utterance
    if units is not None:
        targets = torch.tensor([unit for text in units for unit in text])
        target_lengths = torch.tensor([len(text) for text in units])
    else:
        targets = _padded_labels(labels or (), stack, padded.shape[1])
        target_lengths = lengths
    return Batch(
        torch.from_numpy(padded).to(device, non_blocking=True),
        lengths,
        targets.to(device, non_blocking=True),
        target_lengths,
    )


def _padded_labels(labels: Sequence[Labels], stack: int, longest: int) -> Tensor:
    padded = torch.full((len(labels), longest), PADDING)
    for row, sequence in zip(padded, labels, strict=True):
        length = -(-len(sequence) // stack)
        middle = np.minimum(np.arange(length) * stack + stack // 2, len(sequence) - 1)
        row[:length] = torch.from_numpy(sequence[middle])
    return padded
