"""torchrun as the launcher of each node of a lab: its agent ends a node when one of its ranks
dies.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from loosestep import launch
from loosestep.lab.network import Network
from loosestep.launch import RankCommand

PORT = 29500
"""Free in a namespace that nobody else uses."""


def require_even(counts: Sequence[int]) -> None:
    """Raise for what torchrun cannot start."""
    if len(set(counts)) > 1:
        raise ValueError(
            f"torchrun starts the same number of ranks on every node, got {list(counts)}"
        )


def places(
    command: Sequence[str], counts: Sequence[int], network: Network | None
) -> list[RankCommand]:
    """One agent a node; each starts the node's ranks."""
    require_even(counts)
    address, port = ("127.0.0.1", _free_port()) if network is None else (network.address(0), PORT)
    rendezvous = [f"--nnodes={len(counts)}", f"--master-addr={address}", f"--master-port={port}"]
    env = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "LOOSESTEP_KEY": launch.run_key(),
    }
    agent = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    return [
        RankCommand(
            f"n{node}",
            [*agent, f"--node-rank={node}", f"--nproc-per-node={count}", "--no-python", *command],
            env,
            node,
        )
        for node, count in enumerate(counts)
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
