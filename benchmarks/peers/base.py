"""What a peer gives the harness: a trainer, with which every benchmark makes its steps."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

CLONE_NEWUTS = 0x04000000


class Work(Protocol):
    """What a peer may ask of the work: its optimizer, also for some of the parameters, and
    whether gradients are clipped.
    """

    clip: float
    batch: int

    def make_optimizer(self, parameters: Any) -> Optimizer: ...


class Trainer:
    """`model` is what the loop calls; `step` takes the loss and does the rest of a step as the
    peer's documentation shows it.

    As it stands, this is the plain loop of one process.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, work: Work) -> None:
        self.model = model
        self.optimizer = optimizer
        self.clip = work.clip
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]

    def step(self, loss: Tensor) -> None:
        """Backward, update, exchange, and gradients cleared."""
        loss.backward()
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def exchanges(self) -> float | None:
        """Models exchanged so far by this rank; None: one every period of the peer's schedule."""
        return None

    def clip_gradients(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.clip)


def own_address() -> str:
    """The address under which the other nodes reach this one: that of the way to the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


def take_node_name() -> None:
    """Give this process the host name of its node, which the lab's /etc/hosts knows; else all nodes
    have this machine's.

    For peers that find their own address by the host name, as every machine of a real cluster lets
    them.
    """
    name = f"node{os.environ['GROUP_RANK']}"
    try:
        socket.gethostbyname(name)
    except OSError:
        return  # no emulated network: the machine's own name is right
    name_this_node(name)


def name_this_node(name: str) -> None:
    """A host name for this process and what it starts; nothing changes where that is not
    allowed.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(CLONE_NEWUTS) == 0:
        libc.sethostname(name.encode(), len(name))
