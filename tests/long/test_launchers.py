"""Runs under the launchers themselves, on two emulated hosts."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import need

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "cluster" / "starter.py"
PYTHON = f"{sys.executable} {SCRIPT}"
TRAIN = f"{PYTHON} train --steps 20 --deadline 20"
KEY = "a key for long tests"
COMMON = {
    "PYTHONPATH": f"{ROOT / 'src'}:{SCRIPT.parent}",
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "LOOSESTEP_KEY": KEY,
}
ENVIRONMENT = {**os.environ, **COMMON}


def reports(text):
    """What ranks said, as JSON, wherever their launcher put it: also two on a line."""
    found = []
    for begin in re.finditer(r'{"', text):
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.JSONDecoder().raw_decode(text, begin.start())[0])
    return found


def require_one_run(result, *, ranks, nodes):
    """All ranks trained together, on the nodes that they are on, and ended with one model."""
    code, text = result
    said = reports(text)
    assert code == 0, text
    begun = [each for each in said if "ready" in each]
    assert sorted(each["ready"] for each in begun) == list(range(ranks)), text
    assert {each["world"] for each in begun} == {ranks}
    assert sorted(map(len, begun[0]["nodes"])) == sorted(nodes)
    models = [each["model"] for each in said if "model" in each]
    assert len(models) == ranks
    assert all(model == models[0] for model in models)


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("-N2 --ntasks-per-node=2", [2, 2]),
        ("-N2 -n4 -m arbitrary -w n2,n1,n1,n1", [3, 1]),  # rank 0 is not on the first host
        ("-n2 -N1 -w n2", [2]),
    ],
)
@pytest.mark.parametrize("strategy", ["daso:period=2", "adpsgd"])
def test_srun(slurm, options, nodes, strategy):
    result = slurm(f"srun {options} {TRAIN} --strategy {strategy}", **COMMON)
    require_one_run(result, ranks=sum(nodes), nodes=nodes)


def test_a_heterogeneous_job_of_slurm(slurm):
    """Its node list is sorted, so the first host is not that of rank 0."""
    result = slurm(f"srun -n2 -N1 -w n2 {TRAIN} : -n1 -N1 -w n1 {TRAIN}", **COMMON)
    require_one_run(result, ranks=3, nodes=[2, 1])


def test_two_steps_of_one_job_do_not_meet(slurm, tmp_path):
    first, second = (f"srun --exact --overlap -N2 -n2 {TRAIN} > {tmp_path}/{n} 2>&1" for n in "12")
    code, _text = slurm(
        f"salloc -N2 --ntasks-per-node=2 sh -c '{first} & {second} & wait'", **COMMON
    )
    for name in "12":
        require_one_run((code, (tmp_path / name).read_text()), ranks=2, nodes=[1, 1])


def test_two_jobs_with_one_address_and_port_do_not_mix(slurm, tmp_path):
    meeting = "MASTER_ADDR=n1 MASTER_PORT=23456"
    one, other = (
        f"{meeting} srun --overlap -N2 -n2 {PYTHON} train --deadline 20 --steps {steps} > {tmp_path}/{name} 2>&1"
        for name, steps in (("one", 800), ("other", 5))
    )
    slurm(f"salloc -N2 --ntasks-per-node=2 sh -c '{one} & sleep 6; {other}; wait'", **COMMON)
    require_one_run((0, (tmp_path / "one").read_text()), ranks=2, nodes=[1, 1])
    refused = " ".join(each.get("error", "") for each in reports((tmp_path / "other").read_text()))
    assert "cannot listen at n1:23456" in refused
    assert "belongs to another run" in refused


def test_python_in_an_allocation_is_told_to_use_srun(slurm):
    code, text = slurm(f"salloc -N2 --ntasks-per-node=2 {TRAIN}", **COMMON)
    assert code == 3, text
    assert "srun python SCRIPT" in text


def test_sigterm_before_the_time_limit_ends_in_order(slurm, tmp_path):
    script = tmp_path / "job.sh"
    output = tmp_path / "job.out"
    lines = ["#!/bin/sh", f"srun --kill-on-bad-exit=0 {PYTHON} train --deadline 20"]
    script.write_text("\n".join(lines) + "\n")
    options = f"--nodes=2 --ntasks-per-node=2 --time=1 --signal=TERM@50 --output={output}"
    slurm(f"sbatch --wait {options} {script}", timeout=150, **COMMON)
    text = output.read_text()
    stopped = [each["stopped"] for each in reports(text) if "stopped" in each]
    assert stopped == [True] * 4, text
    require_one_run((0, text), ranks=4, nodes=[2, 2])


MPIRUN = "mpirun.openmpi --allow-run-as-root --oversubscribe"


def test_open_mpi_on_one_host():
    need("mpirun.openmpi")
    done = subprocess.run(
        f"{MPIRUN} -np 3 {TRAIN}",
        shell=True,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    require_one_run((done.returncode, done.stdout + done.stderr), ranks=3, nodes=[3])


def test_open_mpi_inside_a_job_of_slurm_is_one_world(slurm):
    need("mpirun.openmpi")
    passed = " ".join(f"-x {name}" for name in COMMON)
    result = slurm(
        f"salloc -N2 --ntasks-per-node=2 {MPIRUN} {passed} -x MASTER_ADDR=n1 -np 4 {TRAIN}",
        **COMMON,
    )
    require_one_run(result, ranks=4, nodes=[2, 2])


def test_open_mpi_inside_a_step_of_slurm_is_one_world(slurm):
    need("mpirun.openmpi")
    require_one_run(slurm(f"srun -n1 {MPIRUN} -np 2 {TRAIN}", **COMMON), ranks=2, nodes=[2])


def test_mpich_on_one_host():
    need("mpiexec.hydra")
    done = subprocess.run(
        f"mpiexec.hydra -n 3 {TRAIN}",
        shell=True,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    require_one_run((done.returncode, done.stdout + done.stderr), ranks=3, nodes=[3])


def test_a_host_whose_name_leads_to_loopback(tmp_path):
    """As Debian's installer writes it: `127.0.1.1 n1` on n1."""
    need("ip")
    from hosts import Hosts

    with Hosts(["n1", "n2"], tmp_path, own_line="127.0.1.1 {name}") as hosts:
        for strategy in ("daso:period=2", "adpsgd"):
            ranks = []
            for rank, name in enumerate(hosts.names):
                own = {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "n1",
                    "MASTER_PORT": "23456",
                }
                command = f"exec {TRAIN} --strategy {strategy}"
                ranks.append(hosts.start(name, command, env={**ENVIRONMENT, **own}))
            texts = []
            for rank in ranks:
                try:
                    texts.append(rank.communicate(timeout=60)[0])
                except subprocess.TimeoutExpired:
                    rank.kill()
                    texts.append(rank.communicate()[0])
            code = max(rank.returncode for rank in ranks)
            require_one_run((code, "\n".join(texts)), ranks=2, nodes=[1, 1])


def test_torchrun_restarts_both_agents(tmp_path):
    """A worker that fails once: all are started again, and meet in the same store."""
    need("ip")
    from hosts import Hosts

    flag = tmp_path / "failed"
    script = tmp_path / "once.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"if os.environ['RANK'] == '1' and not os.path.exists({str(flag)!r}):\n"
        "    import torch, loosestep\n"
        "    from little import linear, sgd, one_step\n"
        "    model = linear(); optimizer = sgd(model)\n"
        "    loosestep.attach(model, optimizer, 'daso:period=2', deadline=60)\n"
        f"    open({str(flag)!r}, 'w').close(); os._exit(7)\n"
        f"sys.argv = ['starter.py', 'train', '--steps', '20', '--deadline', '60']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    with Hosts(["n1", "n2"], tmp_path) as hosts:
        agents = []
        for name in hosts.names:
            command = (
                f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3 "
                f"--rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id long {script}"
            )
            agents.append(hosts.start(name, command, env=ENVIRONMENT))
        texts = [agent.communicate(timeout=400)[0] for agent in agents]
    assert flag.exists(), "\n".join(texts)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(texts)
    models = [each["model"] for each in reports("\n".join(texts)) if "model" in each]
    assert len(models) == 2
    assert models[0] == models[1]
