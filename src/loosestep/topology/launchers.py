"""What the launcher's variables say: which rank this process is, of how many, in which run, and
where they meet.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# below the ports that systems give to anybody who asks; those that one run tries
PORTS = range(20000, 32000)
BLOCK = 16


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process: `node` is a name that only the ranks of one node share,
    `job` one that only those of one run share, as far as the launcher has one.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    node: str
    job: str = ""

    @property
    def tells(self) -> bool:
        """Whether the launcher tells of ranks that end before the others have met them: ours
        does.
        """
        return self.job.startswith("torchrun loosestep-")


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet: rank 0 listens at the first free port of its host;
    `hosted`: the launcher does.
    """

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    hosted: bool = False

    def __str__(self) -> str:
        ports = f"{self.ports[0]}" if len(self.ports) == 1 else f"{self.ports[0]}-{self.ports[-1]}"
        return f"{','.join(self.hosts)}:{ports}"


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Read the variables of torchrun, Open MPI, MPICH (and Intel MPI) or Slurm; plain `python` is a
    world of one rank.

    Two torchrun agents on one machine are two nodes: the agent's group rank is the name of the
    node. MPI's launchers may run inside a step of Slurm, whose variables then speak of them and not
    of their ranks, so MPI's are looked at first.
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
            job=_torchrun_job(env),
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        return Launch(
            launcher="openmpi",
            rank=_number(env, "OMPI_COMM_WORLD_RANK"),
            world=_number(env, "OMPI_COMM_WORLD_SIZE"),
            local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            node=host,
            job=f"mpirun {job}" if job else "",
        )
    # A plain `python` inside sbatch or salloc has the variables of the job, not those of a step.
    step = "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env
    if (
        "PMI_RANK" in env
        and "PMI_SIZE" in env
        and not (step and env["PMI_SIZE"] == env["SLURM_STEP_NUM_TASKS"])
    ):
        return Launch(
            launcher="mpich",
            rank=_number(env, "PMI_RANK"),
            world=_number(env, "PMI_SIZE"),
            local_rank=_number(env, "MPI_LOCALRANKID", 0),
            node=host,
            job=_hydra_job() if _on_one_host(env) else "",
        )
    if step:
        return Launch(
            launcher="slurm",
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(env, "SLURM_LOCALID", 0),
            node=f"slurm node {env.get('SLURM_NODEID', host)}",
            job=_slurm_job(env),
        )
    return Launch(launcher="none", rank=0, world=1, local_rank=0, node=host)


def require_company(launch: Launch, env: Mapping[str, str] | None = None) -> None:
    """Raise where a process would train alone although its surroundings speak of several."""
    env = os.environ if env is None else env
    if launch.launcher != "none":
        return
    for name, advice in _COMPANY.items():
        several = re.findall(r"\d+", env.get(name, ""))
        if several and max(map(int, several)) > 1:
            raise RuntimeError(
                f"{name}={env[name]} speaks of several processes, but this one knows of no other "
                f"and would train alone; {advice}. If it is meant to be alone, start it with "
                "RANK=0 WORLD_SIZE=1"
            )
    if "MASTER_ADDR" in env and any(name.startswith("ACCELERATE_") for name in env):
        raise RuntimeError(
            "accelerate has started one process and not said which of how many it is, so it would "
            "train alone; start it with `torchrun --nproc-per-node N SCRIPT` or `accelerate "
            "launch --multi_cpu`. If it is meant to be alone, start it with RANK=0 WORLD_SIZE=1"
        )


_SRUN = "inside a job start the ranks with `srun python SCRIPT`"
_TORCHRUN = "start the ranks of this pod with `torchrun SCRIPT`, which reads the PET_ variables"
_COMPANY = {  # variables that count processes or nodes, and what to do about them
    "PMI_SIZE": "PMI_RANK is missing: start it with MPICH's or Intel MPI's mpiexec",
    "WORLD_SIZE": "set RANK too, or start it with torchrun",
    "SLURM_NTASKS": _SRUN,
    "SLURM_NNODES": _SRUN,
    "PET_NNODES": _TORCHRUN,
    "PET_NPROC_PER_NODE": _TORCHRUN,
}


def find_master(launch: Launch, env: Mapping[str, str] | None = None) -> Rendezvous:
    """Where rank 0 listens: MASTER_ADDR and MASTER_PORT, or what Slurm or an MPI on one host let
    us infer.
    """
    env = os.environ if env is None else env
    ports = _ports(launch.job) if launch.job else (29500,)
    if "MASTER_ADDR" in env:
        hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        given = (_number(env, "MASTER_PORT", 29500),)
        return Rendezvous(
            (env["MASTER_ADDR"],), given if hosted or "MASTER_PORT" in env else ports, hosted
        )
    if launch.launcher == "slurm":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if nodes:
            hosts = hosts_of(nodes)
            # The list is sorted; tasks may be laid out otherwise, and then rank 0 is on any of its
            # hosts.
            anywhere = (
                env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or "SLURM_HET_SIZE" in env
            )
            return Rendezvous(tuple(hosts) if anywhere else (hosts[0],), ports)
    if launch.job and _on_one_host(env):
        return Rendezvous(("127.0.0.1",), ports)
    raise RuntimeError(
        f"this process was started by {launch.launcher} as rank {launch.rank} of {launch.world}, "
        "but MASTER_ADDR is not set; export MASTER_ADDR (a host name of rank 0 that every node "
        "can reach) and MASTER_PORT, the same on every rank"
    )


def hosts_of(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list such as `gpu[03-05,9],rack[1-2]n[03-04],login1`, in its
    order.
    """
    hosts = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist):
        texts = [[text] for text in re.split(r"\[[^\]]*\]", entry)]
        numbers = [_numbers(text) for text in re.findall(r"\[([^\]]*)\]", entry)]
        mixed = [
            part for pair in itertools.zip_longest(texts, numbers, fillvalue=[""]) for part in pair
        ]
        hosts += ["".join(parts) for parts in itertools.product(*mixed)]
    if not hosts:
        raise ValueError(
            f"cannot read host names from the Slurm node list {nodelist!r}; set MASTER_ADDR and "
            "MASTER_PORT"
        )
    return hosts


def _numbers(text: str) -> list[str]:
    """`03-05,9` as 03, 04, 05, 9."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found


def _ports(job: str) -> tuple[int, ...]:
    """The block of ports that belongs to a run's name, the same on every host."""
    first = PORTS.start + zlib.crc32(job.encode()) % (len(PORTS) // BLOCK) * BLOCK
    return tuple(range(first, first + BLOCK))


def _torchrun_job(env: Mapping[str, str]) -> str:
    """The run id of an agent; where somebody else has set torchrun's variables, the step of
    Slurm if it is the whole run.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return f"torchrun {env['TORCHELASTIC_RUN_ID']}"
    return _slurm_job(env) if env.get("SLURM_STEP_NUM_TASKS") == env["WORLD_SIZE"] else ""


def _slurm_job(env: Mapping[str, str]) -> str:
    """Job, step, and how often the job was put back into the queue."""
    job, step, restarts = (
        env.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
    )
    return f"slurm job {job} step {step}" + (f" restart {restarts}" if restarts != "0" else "")


def _hydra_job() -> str:
    """The process that has started the ranks of this host: each leads a session of its own,
    whatever is around it.
    """
    try:
        stat = Path(f"/proc/{os.getsid(0)}/stat").read_text()
        return f"mpiexec {int(stat.rpartition(')')[2].split()[1])}"
    except OSError:  # another system
        return f"mpiexec {os.getppid()}"


def _on_one_host(env: Mapping[str, str]) -> bool:
    """Whether an MPI says that all ranks are on this host."""
    pairs = (
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
    )
    return any(local in env and env[local] == env.get(everywhere) for local, everywhere in pairs)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text):
        raise ValueError(
            f"the environment variable {name} must be a whole number, got {text!r}; check how the "
            "job was started"
        )
    return int(text)
