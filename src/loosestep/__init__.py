"""Asynchronous, decentralised data-parallel training for PyTorch."""

from typing import TYPE_CHECKING, Any

from loosestep.attach import attach
from loosestep.core.errors import CommError, LostPeer
from loosestep.mesh import node_mesh
from loosestep.run import Run
from loosestep.strategies import ADPSGD, DASO, AllReduce, DelayByOne, DiLoCo, LocalSGD, Strategy, strategy
from loosestep.topology import Topology
from loosestep.version import __version__

if TYPE_CHECKING:
    from loosestep import lab as lab
    from loosestep.sim.cluster import Cluster
    from loosestep.sim.driver import simulate

__all__ = [
    "ADPSGD",
    "DASO",
    "AllReduce",
    "Cluster",
    "CommError",
    "DelayByOne",
    "DiLoCo",
    "LocalSGD",
    "LostPeer",
    "Run",
    "Strategy",
    "Topology",
    "__version__",
    "attach",
    "node_mesh",
    "simulate",
    "strategy",
]

_LAZY = {"Cluster": "loosestep.sim.cluster", "simulate": "loosestep.sim.driver"}


def __getattr__(name: str) -> Any:
    """The simulator and the lab are imported when they are asked for."""
    from importlib import import_module

    if name == "lab":
        return import_module("loosestep.lab")
    if name not in _LAZY:
        raise AttributeError(f"module 'loosestep' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
