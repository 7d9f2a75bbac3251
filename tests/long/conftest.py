"""Tests with the launchers themselves, which take minutes and install what they need: `make
test-long`, or `pytest tests/long`. They are collected only when they are asked for.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
PACKAGES = {
    "srun": "slurm-wlm",
    "slurmd": "slurmd",
    "slurmctld": "slurmctld",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
    "ip": "iproute2",
}


def pytest_ignore_collect(collection_path, config):
    asked = any(
        Path(arg).resolve() == HERE or HERE in Path(arg).resolve().parents for arg in config.args
    )
    return None if asked else True


def need(*programs):
    """Skip a test unless these programs are there, after trying to install them."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs Linux and root: hosts are namespaces")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing and shutil.which("apt-get"):
        packages = sorted({PACKAGES[name] for name in missing})
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *command], env=environment, capture_output=True, timeout=600)
        missing = [name for name in missing if shutil.which(name) is None]
    if missing:
        pytest.skip(f"cannot install {', '.join(missing)} on this system")


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, n1 and n2."""
    from hosts import Hosts

    need("ip")
    with Hosts(["n1", "n2"], tmp_path) as made:
        yield made


@pytest.fixture
def slurm(hosts, tmp_path):
    """Slurm on two hosts: `slurm(command, host="n1")` gives the exit code and the output."""
    from slurm import start_slurm

    need("srun", "slurmd", "slurmctld", "munged")
    environment = start_slurm(hosts, tmp_path)

    def run(command, *, host="n1", timeout=90.0, **more):
        return hosts.run(host, command, timeout=timeout, env={**environment, **more})

    return run
