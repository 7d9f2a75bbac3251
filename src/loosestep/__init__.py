"""Asynchronous, decentralised data-parallel training for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loosestep.version import __version__

if TYPE_CHECKING:
    from loosestep import codecs as codecs
    from loosestep import lab as lab
    from loosestep.attachment import attach
    from loosestep.core.errors import CommError, LostPeer
    from loosestep.mesh import node_mesh
    from loosestep.run import Run
    from loosestep.sim.cluster import Cluster
    from loosestep.sim.driver import simulate
    from loosestep.strategies import (
        ADPSGD,
        DASO,
        AllReduce,
        DelayByOne,
        DiLoCo,
        LocalSGD,
        Strategy,
        strategy,
    )
    from loosestep.topology import Topology

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

_HOMES = {
    "attachment": ["attach"],
    "core.errors": ["CommError", "LostPeer"],
    "mesh": ["node_mesh"],
    "run": ["Run"],
    "sim.cluster": ["Cluster"],
    "sim.driver": ["simulate"],
    "strategies": [
        "ADPSGD",
        "DASO",
        "AllReduce",
        "DelayByOne",
        "DiLoCo",
        "LocalSGD",
        "Strategy",
        "strategy",
    ],
    "topology": ["Topology"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A name is imported when it is asked for: what needs no torch starts without it."""
    if name in ("codecs", "lab"):
        return import_module(f"loosestep.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'loosestep' has no attribute {name!r}")
    value = getattr(import_module(f"loosestep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
