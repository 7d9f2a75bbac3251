"""Ranks that start in milliseconds: forked from a server that has imported torch, instead of
importing it anew each.

Everything else is as ever: a process of its own per rank, with a session, signals, environment and
network of its own. For tests of what ranks do; how they are started is tested without
(tests/test_launch.py and others).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from loosestep.launch.processes import Job, Rank, RankCommand

PR_SET_CHILD_SUBREAPER = 36
_cold_spawn = Job._spawn
_one_at_a_time = threading.Lock()


@functools.cache
def server() -> socket.socket:
    """The line to the server, which ends when this process does."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("warm_server.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    atexit.register(process.wait, 10)
    atexit.register(ours.close)  # first, and with it the server ends
    return ours


def is_a_script(command: Sequence[str]) -> bool:
    """Whether it is Python with a file or a module, all that the server can do."""
    words = list(command[3:] if command[1:2] == ["-W"] else command[1:])
    return (
        command[0] == sys.executable
        and bool(words)
        and (words[0] == "-m" or words[0].endswith(".py"))
    )


def spawn(job: Job, rank: Rank) -> int:
    """In place of `Job._spawn`."""
    place = rank.place
    if not is_a_script(place.command):
        return _cold_spawn(job, rank)
    request = {
        "parent": os.getpid(),
        "namespace": place.namespace,
        "hosts": place.hosts,
        "folder": os.getcwd(),
        "env": {"PYTHONUNBUFFERED": "1", **os.environ, **place.env},
        "command": list(place.command),
    }
    read, write = os.pipe()
    os.set_blocking(read, False)
    prctl = ctypes.CDLL(None).prctl
    with _one_at_a_time:
        # what the server orphans becomes our child, for us to reap
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server(), [json.dumps(request).encode()], [write])
            rank.pid = int(server().recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            os.close(write)
    return read


def command(*arguments: object) -> Job:
    """`loosestep ARGUMENTS` as a process of its own, `job.ranks[0]`; the ranks that it starts
    import torch themselves.
    """
    return Job(
        [RankCommand("loosestep", [sys.executable, "-m", "loosestep.cli", *map(str, arguments)])]
    )
