"""Asynchronous, decentralised data-parallel training for PyTorch."""

from loosestep.attach import attach
from loosestep.comm.base import CommError, LostPeer
from loosestep.run import Run
from loosestep.strategies import ADPSGD, DASO, AllReduce, DelayByOne, LocalSGD, Strategy, strategy
from loosestep.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "DASO",
    "AllReduce",
    "CommError",
    "DelayByOne",
    "LocalSGD",
    "LostPeer",
    "Run",
    "Strategy",
    "Topology",
    "attach",
    "strategy",
]
