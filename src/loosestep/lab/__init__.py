"""An emulated cluster on one machine: network namespaces, links with limited bandwidth, slow
ranks, faults.
"""

from loosestep.lab.emulation import Lab, LabError
from loosestep.lab.grammar import Fault, Kill, Partition, Stop
from loosestep.lab.leftovers import Leftover, clean

__all__ = ["Fault", "Kill", "Lab", "LabError", "Leftover", "Partition", "Stop", "clean"]
