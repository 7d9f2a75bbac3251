"""Become a rank: die with the launcher, enter the node's network, then turn into the command.

Run as `python -I -S become_rank.py PARENT NAMESPACE HOSTS COMMAND...` (a path, lines for
/etc/hosts; "-" for none). A program of its own because none of this may run between fork and exec
of a process with threads, as every one with torch is.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
MNT_DETACH = 2


def add_hosts(lines: str) -> None:
    """An /etc/hosts for this thread, kept in no file: names for the nodes, or torch warns about
    every connection.

    Where mounting is not allowed, the nodes have no names and that is all.
    """
    libc = ctypes.CDLL(None)
    with open("/etc/hosts") as hosts:
        text = hosts.read()
    if (
        libc.unshare(CLONE_NEWNS) != 0
        or libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None) != 0
    ):
        return
    if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0:
        with open("/mnt/hosts", "w") as own:
            own.write(f"{text}\n{lines}")
        libc.mount(b"/mnt/hosts", b"/etc/hosts", None, MS_BIND, None)
        libc.umount2(b"/mnt", MNT_DETACH)


def enter(parent: int, namespace: str, hosts: str) -> None:
    """Everything but the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before the line above
        sys.exit(1)
    if namespace != "-":
        handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            sys.exit(
                f"loosestep: cannot enter the network {namespace}: "
                f"{os.strerror(ctypes.get_errno())}"
            )
    if hosts != "-":
        add_hosts(hosts)
    # Python ignores the first two, a shell in the background the third: a rank must hear them all.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(ignored, signal.SIG_DFL)


def main(parent: int, namespace: str, hosts: str, command: list[str]) -> None:
    enter(parent, namespace, hosts)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"loosestep: cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
