"""Becomes ranks: imports torch once, then forks a process for every command that it is sent.

    python warm_server.py FD        one end of a socket pair; the other end's process becomes the ranks' parent

A request is JSON {parent, namespace, hosts, folder, env, command} and a descriptor for the output;
the answer a pid.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
import warnings
from typing import Any

import torch._dynamo  # optimizers import it
import torch.distributed.tensor  # noqa: F401

import loosestep.training.rank  # noqa: F401
from loosestep.launch import become_rank


def serve(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """Returns in the forked processes only: what to run, and where its output goes."""
    while True:
        request, handles, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        if not request:
            os._exit(0)
        pid = _fork()
        if pid == 0:
            connection.close()
            return json.loads(request), handles[0]
        os.close(handles[0])
        connection.send(str(pid).encode())


def _fork() -> int:
    """As `os.fork`, but the new process is nobody's child any more: the kernel gives it to the
    nearest subreaper.
    """
    (told, tell) = os.pipe()
    (adopted, adopt) = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            for handle in (told, tell, adopt):
                os.close(handle)
            os.read(adopted, 1)  # returns when the other end is closed
            os.close(adopted)
            return 0
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(told, 32))
    for handle in (told, tell, adopted, adopt):
        os.close(handle)
    return pid


def run(
    *, parent: int, namespace: str, hosts: str, folder: str, env: dict[str, str], command: list[str]
) -> None:
    """Do what `become_rank.main` and a new interpreter would do."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    become_rank.enter(parent, namespace, hosts)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a new interpreter has them
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    _, *words = command
    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    first = folder if is_module else os.path.dirname(words[0])
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    gc.freeze()
    asked, output = serve(socket.socket(fileno=int(sys.argv[1])))
    for handle in (1, 2):
        os.dup2(output, handle)
    os.close(output)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    run(**asked)
