"""Who is where and who talks to whom: nodes, lanes, launchers' variables, graphs and mixing
matrices.
"""

from loosestep.topology.nodes import Topology

__all__ = ["Topology"]
