"""One process per rank on this machine, with torchrun's variables, and no killing of siblings when
one dies.

    with launch.start([sys.executable, "train.py"], nodes=2, ranks_per_node=2) as job:
        job.ranks[3].expect("ready")
        job.ranks[3].kill(signal.SIGKILL)
        result = job.wait(timeout=60)

The launcher hosts the rendezvous store itself (as torchrun's agent does), so no rank, not even rank
0, is needed by the others to find each other. A rank dies with the launcher, and whatever a rank
started dies with the rank.
"""

from __future__ import annotations

import importlib.machinery
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from loosestep.core.store import host_store
from loosestep.launch.processes import Job, Output, RankCommand

MOST_RANKS = 256


def start(
    command: Sequence[str],
    *,
    nodes: int = 1,
    ranks_per_node: int | Sequence[int] = 1,
    env: Mapping[str, str] | None = None,
    output: Output | None = None,
) -> Job:
    """Start `command` once per rank: `nodes` x `ranks_per_node` (a list for uneven nodes), all on
    this machine.

    `env` is added to the environment of every rank; `output(rank, line)` is called for every line,
    from a thread.
    """
    places, store = local_places(command, ranks_of_nodes(nodes, ranks_per_node), env=env)
    return Job(places, output=output, store=store)


def local_places(
    command: Sequence[str], counts: Sequence[int], *, env: Mapping[str, str] | None = None
) -> tuple[list[RankCommand], object]:
    """Where the ranks run when all nodes share this machine's loopback, and the store in which
    they meet.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    return places(command, counts, address, port, env=env), host_store(listener)


def run_key() -> str:
    """The user's key for gossip, or a new one."""
    return os.environ.get("LOOSESTEP_KEY") or secrets.token_hex(16)


def places(
    command: Sequence[str],
    counts: Sequence[int],
    address: str,
    port: int,
    *,
    env: Mapping[str, str] | None = None,
) -> list[RankCommand]:
    """One place for each rank, in rank order; the ranks meet at the store at `address` and
    `port`.
    """
    return [
        RankCommand(
            label=f"n{node} r{variables['RANK']}",
            command=command,
            env={**variables, **(env or {})},
            node=node,
        )
        for node, variables in variables_of_ranks(counts, address, port)
    ]


def ranks_of_nodes(nodes: int, ranks_per_node: int | Sequence[int]) -> list[int]:
    """How many ranks each node has, checked."""
    counts = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else list(ranks_per_node)
    if nodes < 1 or any(count < 1 for count in counts):
        raise ValueError(
            f"nodes and ranks per node must be at least 1, got {nodes} and {ranks_per_node}"
        )
    if len(counts) != nodes:
        raise ValueError(
            f"{len(counts)} numbers of ranks ({ranks_per_node}) for {nodes} nodes: give one per "
            "node, or one"
        )
    if sum(counts) > MOST_RANKS:
        raise ValueError(f"{sum(counts)} ranks on one machine; at most {MOST_RANKS} make sense")
    return counts


def variables_of_ranks(
    counts: Sequence[int], address: str, port: int
) -> list[tuple[int, dict[str, str]]]:
    """(node, torchrun's variables) of every rank, in rank order; what the user has set himself
    (threads, key) stays.
    """
    world = sum(counts)
    shared = {
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": len(counts),
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": f"loosestep-{os.getpid()}-{port}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
        "GLOO_SOCKET_IFNAME": os.environ.get(
            "GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
        ),
        "LOOSESTEP_KEY": run_key(),
    }
    positions = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    own = [
        {
            "RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": local,
            "GROUP_RANK": node,
            "NODE_RANK": node,
        }
        | {"LOCAL_WORLD_SIZE": counts[node]}
        for rank, (node, local) in enumerate(positions)
    ]
    return [
        (node, {name: str(value) for name, value in {**shared, **mine}.items()})
        for (node, _), mine in zip(positions, own, strict=True)
    ]


def command_for(script: str, arguments: Sequence[str], *, module: bool = False) -> list[str]:
    """What to run for SCRIPT ARGS: Python for a .py file or a module, else an executable. Raises
    FileNotFoundError.
    """
    if module:
        if (
            importlib.machinery.PathFinder.find_spec(script.partition(".")[0], ["", *sys.path])
            is None
        ):
            raise FileNotFoundError(f"no module named {script}")
        return [sys.executable, "-m", script, *arguments]
    if script.endswith(".py"):
        if not Path(script).is_file():
            raise FileNotFoundError(f"no script {script}")
        return [sys.executable, script, *arguments]
    if shutil.which(script) is None:
        raise FileNotFoundError(f"no script or executable {script}")
    return [script, *arguments]
