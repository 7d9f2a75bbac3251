"""Processes that start at once: forked from a server that has imported torch and all that
optimizers pull in.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver

import torch._dynamo
import torch.distributed.tensor  # noqa: F401

import loosestep  # noqa: F401

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["forks"])


def start_server() -> None:
    """The server looks for the modules to load in its environment, not in our sys.path (before
    Python 3.13).
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
