"""Who has come to the rendezvous: a rank has, when it or a process that it started holds a
connection to the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ESTABLISHED = "01"


def has_met(pid: int, port: int) -> bool:
    """Whether the session of process `pid` holds a connection to that port, on whatever address
    of its network.
    """
    wanted = _connections(pid, port)
    return bool(wanted) and any(
        not wanted.isdisjoint(_open_files(folder)) for folder in _session(pid)
    )


def _connections(pid: int, port: int) -> set[str]:
    """Of the whole network that the process is in, as /proc/PID/fd names them."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # it has ended, or there is no IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, _, remote, state, *_, inode = line.split()[:10]
                if state == ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{inode}]")
    return found


def _session(pid: int) -> Iterator[Path]:
    """The processes of the session that `pid` leads."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[3] == str(pid):
                yield folder


def _open_files(process: Path) -> set[str]:
    found = set()
    with suppress(OSError):
        for handle in os.scandir(process / "fd"):
            with suppress(OSError):
                found.add(os.readlink(handle.path))
    return found
