"""Plain surroundings for tensors of our own, whatever the caller's code has set around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def plain_torch() -> AbstractContextManager[None]:
    """Make new tensors ordinary ones on the host: no inference mode, no default device."""
    if torch.is_inference_mode_enabled() or torch.get_default_device().type != "cpu":
        return _plain()
    return nullcontext()


@contextmanager
def _plain() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


def in_plain_torch(function: Callable[P, R]) -> Callable[P, R]:
    """Run all of a function in such surroundings."""

    @wraps(function)
    def plainly(*args: P.args, **kwargs: P.kwargs) -> R:
        with plain_torch():
            return function(*args, **kwargs)

    return plainly
