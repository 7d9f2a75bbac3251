"""Shared by all tests: helpers are importable by name; one thread computes, as on the ranks that
results are compared with.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loosestep.launch.processes import Job

HERE = Path(__file__).parent
for folder in (HERE, HERE / "cluster", HERE / "core" / "gossip"):
    sys.path.insert(0, str(folder))
torch.set_num_threads(1)
# torch asks for the name of every address it connects to: one second where a name server does not
# answer, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="module")
def warm_ranks() -> Iterator[None]:
    """The ranks that this module's tests launch are forked from a server that has imported
    torch; see warm.py.
    """
    if sys.platform != "linux":
        yield
        return
    import warm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "_spawn", warm.spawn)
        yield
