"""When learners exchange, with whom, and how they fold what arrives: one algorithm a file.

A new one is a new file: a frozen dataclass that inherits from `Strategy[Exchanges]` (all replicas
exchange together) or `Strategy[Gossiping]` (learners average in pairs), with a `name` and a
one-line `summary`. Nothing else is edited: it is known by its name to `strategy`, to the commands
and their help, in simulations and predictions.
"""

from loosestep.strategies.adpsgd import ADPSGD
from loosestep.strategies.allreduce import AllReduce
from loosestep.strategies.base import Exchanges, Gossiping, GossipPlan, State, Strategy, strategy
from loosestep.strategies.daso import DASO
from loosestep.strategies.delaybyone import DelayByOne
from loosestep.strategies.diloco import DiLoCo
from loosestep.strategies.localsgd import LocalSGD
from loosestep.strategies.registry import STRATEGIES

__all__ = [
    "ADPSGD",
    "DASO",
    "STRATEGIES",
    "AllReduce",
    "DelayByOne",
    "DiLoCo",
    "Exchanges",
    "GossipPlan",
    "Gossiping",
    "LocalSGD",
    "State",
    "Strategy",
    "strategy",
]
