"""Parameters of which this rank holds a part: DTensors, as `fully_shard` and tensor parallelism
make them.

An exchange works on what a rank holds (`local`) and never gathers. Importing torch's DTensor takes
seconds, so nothing here imports it: where nobody has, there is no DTensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is spread over a device mesh."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of a plain one, its shard of a DTensor. Asked for anew
    at every use, for `fully_shard` replaces it when it pads or pins.
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        held: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held


def mesh_ranks(tensor: Any) -> list[int]:
    """The ranks over which a DTensor is spread."""
    return sorted(tensor.device_mesh.mesh.flatten().tolist())


def pieces(tensor: Any) -> int:
    """Into how many different parts a DTensor is cut: as many as ranks if each holds its own, 1
    if all hold all of it.
    """
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def describe(tensor: Any) -> str:
    """How a DTensor is cut, and which piece is here: what must be the same on the same local
    rank of every node.
    """
    mesh = tensor.device_mesh
    piece = tuple(local(tensor).shape)
    placements = ", ".join(map(repr, tensor.placements))
    return f"{placements} over {tuple(mesh.shape)} ranks, at {mesh.get_coordinate()}: {piece}"


def sharding_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    return (
        []
        if module is None
        else [part for part in model.modules() if isinstance(part, module.FSDPModule)]
    )


def reshard(modules: Sequence[Any]) -> None:
    """Drop parameters that `fully_shard` keeps gathered after a forward without a backward: they
    would be stale.
    """
    for module in modules:
        module.reshard()


def localise(state: Any) -> Any:
    """A nested state with what this rank holds in the place of every DTensor."""
    return each_tensor(state, local)


def each_tensor(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A nested state with every tensor changed."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return {key: each_tensor(value, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(each_tensor(value, change) for value in state)
    return state


def load_localised(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict that was localised on the same local rank of another node."""
    optimizer.load_state_dict(state)
    for param, held in optimizer.state.items():
        if is_dtensor(param):
            for name, value in held.items():
                if (
                    isinstance(value, torch.Tensor)
                    and name != "step"
                    and value.shape == local(param).shape
                ):
                    held[name] = _like(value, param)


def _like(shard: torch.Tensor, whole: Any) -> torch.Tensor:
    wrapped: torch.Tensor = type(whole).from_local(
        shard,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return wrapped
