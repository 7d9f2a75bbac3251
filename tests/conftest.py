"""Shared by all tests: helpers are importable by name; one thread computes, as on the ranks that
results are compared with.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
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

# What stands here starts processes, and so does what is marked `processes` elsewhere.
PROCESSES = (
    "benchmarks/test_cluster.py",
    "cli/test_bad_input.py",
    "cli/test_compare.py",
    "cli/test_demo.py",
    "cli/test_lab.py",
    "cli/test_launch.py",
    "cli/test_replay.py",
    "cli/test_resume.py",
    "cli/test_train.py",
    "cluster/",
    "cuda/",
    "integrations/",
    "lab/",
    "launch/",
    "long/",
    "recipes/acoustic/test_synth.py",
    "test_warm.py",
    "training/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes; run again only what is marked as racing with the machine."""
    for item in items:
        if item.path.relative_to(HERE).as_posix().startswith(PROCESSES):
            item.add_marker("processes")
        for mark in item.iter_markers("races"):
            reason = mark.kwargs.get("reason")
            assert reason, f"{item.nodeid}: races(reason=...) says with what"
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=3))


@pytest.fixture(autouse=True)
def no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not marked `processes` starts none: `make test-quick` relies on it."""
    if request.node.get_closest_marker("processes") is None:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("this test starts a process: mark it with `processes`")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(BaseProcess, "start", refuse)
        monkeypatch.setattr(os, "fork", refuse)


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
