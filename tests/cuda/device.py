"""What the tests of this folder share: the device, or the reason why they are skipped."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, anything that makes this process wait for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def keep_busy(seconds: float = 0.3) -> None:
    """Give the current stream something that takes a while."""
    torch.cuda._sleep(int(1.5e9 * seconds))
