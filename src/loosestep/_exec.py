"""Become a rank: die with the launcher, enter the node's network, then turn into the command.

Run as `python -I -S _exec.py PARENT NAMESPACE COMMAND...` (NAMESPACE is a path, or "-" for none). A program of its own
because none of this may run between fork and exec of a process that has threads, as every process with torch has.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def main(parent: int, namespace: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before the line above
        sys.exit(1)
    if namespace != "-":
        handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            sys.exit(f"loosestep: cannot enter the network {namespace}: {os.strerror(ctypes.get_errno())}")
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"loosestep: cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
