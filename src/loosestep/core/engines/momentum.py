"""The momentum of optimizers, for strategies that average it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


def momentum(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The momentum of SGD, Adam or AdamW, made now where the optimizer has none yet. Asked for anew
    at every use: `load_state_dict` replaces it.
    """
    return [
        _momentum_of(param, optimizer.state[param], group, adam=isinstance(optimizer, Adam | AdamW))
        for optimizer in optimizers
        for group in _checked(optimizer)
        for param in group["params"]
        if param.requires_grad
    ]


def _checked(optimizer: Optimizer) -> list[dict[str, Any]]:
    for group in optimizer.param_groups:
        plain = isinstance(optimizer, SGD) and group["momentum"] and not group["dampening"]
        if not plain and not isinstance(optimizer, Adam | AdamW):
            raise ValueError(
                "average_momentum needs SGD with momentum and without dampening, Adam or AdamW; "
                f"got {type(optimizer).__name__}"
            )
    return optimizer.param_groups


def _momentum_of(
    param: torch.Tensor, state: dict[str, Any], group: dict[str, Any], *, adam: bool
) -> torch.Tensor:
    name = "exp_avg" if adam else "momentum_buffer"
    if adam and not state:  # what the first step of Adam makes
        on_device = group["capturable"] or group["fused"]
        state["step"] = torch.zeros((), device=param.device if on_device else "cpu")
        state["exp_avg_sq"] = _zeros(param)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = _zeros(param)
    if state.get(name) is None:
        state[name] = _zeros(param)
    found: torch.Tensor = state[name]
    return found


def _zeros(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(param, memory_format=torch.preserve_format)
