"""Processes on this machine: one per rank, with torchrun's variables, and no killing of siblings
when one dies.
"""

from loosestep.launch.launcher import (
    MOST_RANKS,
    command_for,
    local_places,
    places,
    ranks_of_nodes,
    run_key,
    start,
    variables_of_ranks,
)
from loosestep.launch.processes import Job, Output, Rank, RankCommand, Result, describe

__all__ = [
    "MOST_RANKS",
    "Job",
    "Output",
    "Rank",
    "RankCommand",
    "Result",
    "command_for",
    "describe",
    "local_places",
    "places",
    "ranks_of_nodes",
    "run_key",
    "start",
    "variables_of_ranks",
]
