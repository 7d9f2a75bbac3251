"""A few numbers of every rank that ride at the end of a vector, so that adding it up also tells them.

Each rank writes its own in its place and zeros elsewhere; the sum is everybody's. Numbers are
written as whole numbers of sixteen bits, which no sum with zeros rounds.
"""

from __future__ import annotations

import numpy as np
import torch

PARTS = 4  # of sixteen bits, in a number


def room_for(ranks: int, numbers: int) -> int:
    """How many elements so many numbers of so many ranks need."""
    return ranks * numbers * PARTS


def write_rows(room: torch.Tensor, rows: torch.Tensor, *, place: int, places: int) -> None:
    """Put rows into their place, and zeros into those of others."""
    parts = torch.from_numpy(rows.contiguous().numpy().view(np.uint16).astype(np.float32))
    room.zero_().view(places, -1)[place].copy_(parts.flatten())


def read_rows(room: torch.Tensor, numbers: int) -> torch.Tensor:
    """Everybody's rows, in the order of their places."""
    parts = room.numpy().astype(np.uint16)
    return torch.from_numpy(parts.view(np.float64).reshape(-1, numbers))
