"""A rank that was forked from the warm server is like one that was started: what tests find out
holds for both.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import warm
from loosestep import launch
from loosestep.launch.processes import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server needs Linux")
SCRIPT = """
import os, signal, sys, warnings
print("argv", sys.argv, "first", sys.path[0], "folder", os.getcwd(), "main", __name__)
print("session", os.getsid(0) == os.getpid(), "parent", os.getppid(), "rank", os.environ["RANK"])
print("signals", [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
try:
    warnings.warn("mind")
except UserWarning:
    print("a warning is an error")
if sys.argv[1] == "wait":
    print("ready")
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def start(argument: str) -> Job:
    return launch.start(
        [sys.executable, "-W", "error", str(Path("script.py").resolve()), argument], nodes=2
    )


def test_it_says_what_a_started_rank_says_and_ends_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []
    for spawn in (Job._spawn, warm.spawn):
        monkeypatch.setattr(Job, "_spawn", spawn)
        with start("7") as job:
            assert job.wait(timeout=60).returncodes == (7, 7)
        told.append([rank.output for rank in job.ranks])
    assert told[1] == told[0]
    assert told[1][1][1] == f"session True parent {os.getpid()} rank 1"
    assert told[1][1][3] == "a warning is an error"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(Job, "_spawn", warm.spawn)
    with start("wait") as job:
        for rank in job.ranks:
            rank.expect("ready")
        job.ranks[1].kill(number)
        assert job.ranks[1].wait(timeout=10) == -number
        assert job.ranks[0].returncode is None
