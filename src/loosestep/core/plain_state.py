"""Nested plain state (dicts, lists, numbers, strings, tensors) as one JSON text and a list of
tensors.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch


def flatten(state: Any) -> tuple[str, list[torch.Tensor]]:
    """The structure as JSON, in which tensor number i is `{"$tensor": i}`, and the tensors
    (contiguous, on the CPU).
    """
    tensors: list[torch.Tensor] = []

    def encode(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"$tensor": len(tensors) - 1}
        if isinstance(value, dict):
            return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"$tuple": [encode(item) for item in value]}
        if isinstance(value, list):
            return [encode(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(
            "a state may hold dicts, lists, tuples, numbers, strings, dtypes and tensors, got "
            f"{type(value).__name__}"
        )

    structure = encode(state)
    described = [
        [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors
    ]
    return json.dumps({"structure": structure, "tensors": described}), tensors


def unflatten(text: str, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `flatten`."""

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if isinstance(value, dict):
            ((tag, content),) = value.items()
            if tag == "$tensor":
                return tensors[content]
            if tag == "$dtype":
                return getattr(torch, content)
            if tag == "$tuple":
                return tuple(decode(item) for item in content)
            return {decode(key): decode(item) for key, item in content}
        return value

    return decode(json.loads(text)["structure"])
