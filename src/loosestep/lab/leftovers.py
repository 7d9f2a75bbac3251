"""What a killed lab may leave: processes that left their rank behind, and the networks that these
keep alive.

Namespaces and interfaces vanish with the last process that uses them, and ranks die with their lab;
only a process that a rank sent off on its own can stay. Every process of a lab carries the lab's
mark in its environment: the owner's pid and start time, and the namespace in which that pid is one:
from outside of a container its pids mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

MARK = "LOOSESTEP_LAB"


@dataclass(frozen=True)
class Leftover:
    """A process whose lab is gone."""

    pid: int
    owner: int
    command: str


def new_mark() -> str:
    """Identifies the lab of this process: pid, the time it started since pids are reused, and
    whose pids these are.
    """
    return f"{os.getpid()}.{_start_time(os.getpid())}.{_pid_namespace()}"


def find() -> list[Leftover]:
    """The processes whose lab is gone; those of a lab in a container can be judged in there
    only.
    """
    found = []
    ours = re.compile(rf"{MARK}=(\d+)\.(\d+)\.{_pid_namespace()}".encode())
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked, or is another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            mark = next(filter(None, map(ours.fullmatch, variables)), None)
            if mark is None:
                continue
            owner = int(mark[1])
            started = mark[2].decode()
            if _start_time(owner) != started:
                command = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                found.append(Leftover(int(folder.name), owner, command))
    return [leftover for leftover in found if leftover.pid != os.getpid()]


def clean() -> list[Leftover]:
    """End the leftovers; with them go their networks."""
    leftovers = find()
    for leftover in leftovers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leftover.pid, signal.SIGKILL)
    return leftovers


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which a process started; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _pid_namespace() -> int:
    """Within which pids are unique; 0 where there are no such namespaces."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
