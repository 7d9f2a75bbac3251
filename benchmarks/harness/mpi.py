"""Blocks of peers that need MPI: mpirun in the lab's first node, which reaches the other nodes
through their namespaces.

`python -m harness.mpi head` becomes mpirun; `agent HOST COMMAND...` is what mpirun uses instead of
ssh; `rank` is one process of the block.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loosestep.lab import Lab
from loosestep.launch.become_rank import CLONE_NEWNET, PR_SET_PDEATHSIG, add_hosts
from loosestep.launch.processes import Job, RankCommand
from peers.base import name_this_node

SIGKILL = 9


def start(
    lab: Lab, order: Mapping[str, Any], env: Mapping[str, str], output: Callable[..., None]
) -> Job:
    """The block `order` on all ranks of the lab, by mpirun; ends with the job."""
    assert lab.network is not None
    nodes = {f"node{node}": lab.network.namespace(node) for node in range(len(lab.counts))}
    settings = {
        "LOOSESTEP_ORDER": json.dumps(order),
        "LOOSESTEP_NODES": json.dumps(nodes),
        "LOOSESTEP_HOSTS": lab.network.hosts(),
        "LOOSESTEP_COUNTS": json.dumps(lab.counts),
    }
    command = [sys.executable, "-m", "harness.mpi", "head"]
    place = RankCommand(
        "mpi", command, {**env, **settings}, 0, lab.network.namespace(0), lab.network.hosts()
    )
    return Job([place], output=output)


def head() -> None:
    """Become mpirun."""
    name_this_node("node0")
    counts = json.loads(os.environ["LOOSESTEP_COUNTS"])
    hosts = ",".join(f"node{node}:{count}" for node, count in enumerate(counts))
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = (
        str(beside)
        if beside.exists()
        else shutil.which("mpirun") or sys.exit("no mpirun: make peers")
    )
    settings = [
        "--prtemca",
        "plm_ssh_agent",
        f"{sys.executable} -m harness.mpi agent",
        "--prtemca",
        "plm_ssh_no_tree_spawn",
        "1",
    ]
    network = [
        "--mca",
        "btl",
        "tcp,self,sm",
        "--mca",
        "pml",
        "ob1",
        "--mca",
        "btl_tcp_if_include",
        "eth0",
    ]
    given = [
        f
        for name in os.environ
        if name.startswith(("LOOSESTEP", "PYTHON", "MASTER", "OMP_N", "GLOO"))
        for f in ("-x", name)
    ]
    ranks = [sys.executable, "-m", "harness.mpi", "rank"]
    every = ["--allow-run-as-root", "--bind-to", "none", "--host", hosts, "-np", str(sum(counts))]
    os.execv(mpirun, [mpirun, *every, *settings, *network, *given, *ranks])


def agent(host: str, command: list[str]) -> None:
    """What ssh would do: run the command on that host."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    handle = os.open(json.loads(os.environ["LOOSESTEP_NODES"])[host], os.O_RDONLY)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        sys.exit(f"cannot enter the network of {host}")
    add_hosts(os.environ["LOOSESTEP_HOSTS"])
    name_this_node(host)
    os.execvp("sh", ["sh", "-c", " ".join(command)])


def rank() -> None:
    """One process of the block, with the variables that the others have from our launcher."""
    number, local, size = (
        os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "LOCAL_RANK", "SIZE")
    )
    counts = json.loads(os.environ["LOOSESTEP_COUNTS"])
    node = [n for n, count in enumerate(counts) for _ in range(count)][int(number)]
    os.environ |= {"RANK": number, "LOCAL_RANK": local, "WORLD_SIZE": size}
    os.environ |= {"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(counts[node])}
    from harness.block import run
    from harness.rank import tell

    run(
        json.loads(os.environ["LOOSESTEP_ORDER"]), lambda **fields: tell(rank=int(number), **fields)
    )
    os._exit(0)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    {"head": head, "agent": lambda: agent(rest[0], rest[1:]), "rank": rank}[what]()
