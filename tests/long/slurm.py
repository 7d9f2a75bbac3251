"""A Slurm of our own on emulated hosts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hosts import Hosts

CONF = """
ClusterName=long
SlurmctldHost={first}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=200000,requeue_delay=0
KillWait=5
NodeName={names} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def start_slurm(hosts: Hosts, folder: Path) -> dict[str, str]:
    """Start munge, the controller on the first host and a daemon on each; the environment of its commands."""
    first = hosts.names[0]
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(first=first, names=",".join(hosts.names), folder=folder))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(conf)}
    hosts.do(
        first,
        f"munged --force --socket={folder}/munge.sock --key-file={key} --pid-file={folder}/munge.pid "
        f"--log-file={folder}/munge.log --seed-file={folder}/munge.seed >/dev/null 2>&1",
    )
    hosts.do(first, f"SLURM_CONF={conf} slurmctld >/dev/null 2>&1")
    for name in hosts.names:
        hosts.do(
            name,
            f"mkdir -p {folder}/spool.{name}; SLURM_CONF={conf} slurmd -N {name} >/dev/null 2>&1",
        )
    until = time.monotonic() + 30
    while (
        "idle" not in (out := hosts.run(first, "sinfo -h -o %T", env=env)[1])
        or len(out.split()) > 1
    ):
        assert time.monotonic() < until, (
            f"no nodes: {out}\n" + (folder / "slurmctld.log").read_text()[-3000:]
        )
        time.sleep(0.2)
    return env
