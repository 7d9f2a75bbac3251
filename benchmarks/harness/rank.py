"""A rank of the cluster: waits for orders and runs every block in a fork of itself.

`python -m harness.rank` with LOOSESTEP_ORDERS naming a pipe. A fork starts in milliseconds with
everything imported, has its own memory and CPU clock, and dies alone: whatever a peer leaves behind
(threads, sockets, a stuck collective, a daemon) goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

PR_SET_PDEATHSIG = 1
MARK = "@block "
MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "psutil",
    "loosestep",
    "harness.block",
    "harness.work",
    "peers.ours",
)
"""What every block would import; the first optimizer of a process imports dynamo, which takes
seconds.
"""


def tell(**fields: Any) -> None:
    """One line to the cluster, whole: ranks and their threads may speak at the same time."""
    sys.stdout.flush()
    os.write(1, f"{MARK}{json.dumps(fields)}\n".encode())


def main() -> None:
    """Import what costs time, then obey."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, without a word
    for module in [*MODULES, *filter(None, os.environ.get("LOOSESTEP_PRELOAD", "").split(","))]:
        importlib.import_module(module)
    if threading.active_count() > 1:
        raise RuntimeError(
            f"an import started a thread ({threading.enumerate()}): this process can no longer "
            "fork safely"
        )
    # also for writing: then it never ends
    pipe = os.open(os.environ["LOOSESTEP_ORDERS"], os.O_RDWR)
    tell(ready=True)
    child: int | None = None
    handle = number = -1
    orders = _orders(pipe)
    while True:
        ready, _, _ = select.select([pipe, *([handle] if child is not None else [])], [], [])
        if child is not None and handle in ready:
            tell(block=number, exited=_bury(child))
            os.close(handle)
            child = None
        if pipe not in ready:
            continue
        for order in next(orders):
            if order["do"] == "begin":
                number = order["number"]
                child = _fork(order)
                handle = os.pidfd_open(child)
            elif child is not None:  # "kill" and "end" differ in what the cluster makes of it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)


def _orders(pipe: int) -> Iterator[list[dict[str, Any]]]:
    """The whole lines of every read."""
    rest = b""
    while True:
        *lines, rest = (rest + os.read(pipe, 1 << 16)).split(b"\n")
        yield [json.loads(line) for line in lines]


def _fork(order: dict[str, Any]) -> int:
    """A process group of its own for the block, that ends with this process."""
    parent = os.getpid()
    child = os.fork()
    if child:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(child, child)
        return child
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    from harness.block import run

    run(order, tell)
    os._exit(0)


def _bury(child: int) -> int:
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it had started
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
