"""What started this process: the variables of torchrun, Slurm and Open MPI, and where rank 0 listens."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process: `node` is a name that only the ranks of one node share."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    node: str


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Read the variables of torchrun, Slurm or Open MPI; plain `python` is a world of one rank.

    Two torchrun agents on one machine are two nodes: the agent's group rank is the name of the node.
    """
    env = os.environ if env is None else env
    host = socket.gethostname()
    if "RANK" in env and "WORLD_SIZE" in env:
        agent = env.get("GROUP_RANK", env.get("NODE_RANK"))
        return Launch(
            launcher="torchrun",
            rank=_number(env, "RANK"),
            world=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK", 0),
            node=host if agent is None else f"agent {agent}",
        )
    # srun sets the variables of a step; a plain `python` inside sbatch or salloc has only those of the job.
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return Launch(
            launcher="slurm",
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(env, "SLURM_LOCALID", 0),
            node=f"slurm node {env.get('SLURM_NODEID', host)}",
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        return Launch(
            launcher="openmpi",
            rank=_number(env, "OMPI_COMM_WORLD_RANK"),
            world=_number(env, "OMPI_COMM_WORLD_SIZE"),
            local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            node=host,
        )
    return Launch(launcher="none", rank=0, world=1, local_rank=0, node=host)


def find_master(launch: Launch, env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """The address and port where rank 0 listens: MASTER_ADDR and MASTER_PORT, or what Slurm or Open MPI let us infer."""
    env = os.environ if env is None else env
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], _number(env, "MASTER_PORT", 29500)
    if launch.launcher == "slurm":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if nodes:
            return first_host(nodes), 20000 + _number(env, "SLURM_JOB_ID", 0) % 20000
    if launch.launcher == "openmpi" and env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env.get("OMPI_COMM_WORLD_SIZE"):
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "0"
        return "127.0.0.1", 20000 + sum(job.encode()) * 7919 % 20000
    raise RuntimeError(
        f"this process was started by {launch.launcher} as rank {launch.rank} of {launch.world}, but MASTER_ADDR is not set; "
        "export MASTER_ADDR (a host name of rank 0 that every node can reach) and MASTER_PORT, the same on every rank"
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list such as `gpu[03-05,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    if match is None:
        raise ValueError(
            f"cannot read a host name from the Slurm node list {nodelist!r}; set MASTER_ADDR and MASTER_PORT"
        )
    return match.group(1) + (match.group(2) or "")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text):
        raise ValueError(
            f"the environment variable {name} must be a whole number, got {text!r}; check how the job was started"
        )
    return int(text)
