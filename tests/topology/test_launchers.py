"""What launchers say about a process, as they were seen to say it."""

import socket

import pytest

from loosestep import Topology
from loosestep.topology.launchers import (
    BLOCK,
    detect_launch,
    find_master,
    hosts_of,
    require_company,
)

SLURM_STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_plain_python_is_a_world_of_one():
    launch = detect_launch({})
    require_company(launch, {})
    assert (launch.rank, launch.world) == (0, 1)


def test_two_torchrun_agents_on_one_machine_are_two_nodes():
    base = {"WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    names = [
        detect_launch({**base, "RANK": str(r), "GROUP_RANK": str(r // 2)}).node for r in range(4)
    ]
    assert Topology.from_names(names).nodes == ((0, 1), (2, 3))


def test_a_pod_that_only_knows_its_rank_is_a_node_of_its_host_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "train-worker-1")
    launch = detect_launch({"RANK": "1", "WORLD_SIZE": "2"})
    assert (launch.rank, launch.world, launch.local_rank, launch.node) == (
        1,
        2,
        0,
        "train-worker-1",
    )


def test_slurm_step_variables_are_read():
    launch = detect_launch(SLURM_STEP)
    assert (launch.launcher, launch.rank, launch.world, launch.local_rank) == ("slurm", 5, 8, 1)
    assert launch.node == "slurm node 2"


def test_open_mpi_variables_are_read():
    launch = detect_launch(OPEN_MPI)
    assert (launch.launcher, launch.rank, launch.world, launch.local_rank) == ("openmpi", 2, 4, 0)


def test_mpich_variables_are_read():
    launch = detect_launch(HYDRA)
    assert (launch.launcher, launch.rank, launch.world, launch.local_rank) == ("mpich", 1, 4, 1)


@pytest.mark.parametrize("inner", [OPEN_MPI, HYDRA])
def test_an_mpi_inside_a_step_of_slurm_counts_its_own_ranks(inner):
    """srun starts one daemon a host for it, whose variables every rank inherits."""
    outer = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    assert detect_launch(outer | inner).world == 4


def test_a_slurm_that_speaks_pmi_too_names_its_nodes():
    assert detect_launch({**SLURM_STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}).node == "slurm node 2"


def test_torchrun_inside_slurm_wins():
    env = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect_launch(env).launcher == "torchrun"


@pytest.mark.parametrize(
    ("env", "advice"),
    [
        # python in an sbatch script
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, "srun"),
        ({"SLURM_NTASKS": "2", "SLURM_NNODES": "2"}, "srun"),  # in an salloc
        ({"PMI_SIZE": "4"}, "mpiexec"),
        ({"WORLD_SIZE": "4"}, "set RANK"),
        # Trainer v2, PyTorchJob
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"}, "torchrun"),
        ({"PET_NNODES": "1:3"}, "torchrun"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, "torchrun"),
        (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "True"},
            "torchrun",
        ),
    ],
)
def test_training_alone_among_several_is_refused_with_the_way_to_start(env, advice):
    with pytest.raises(RuntimeError, match=f"alone.*{advice}|{advice}.*alone"):
        require_company(detect_launch(env), env)
    alone = {**env, "RANK": "0", "WORLD_SIZE": "1"}
    require_company(detect_launch(alone), alone)


@pytest.mark.parametrize(
    "env",
    [
        # srun -n1
        {
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_NTASKS": "1",
            "SLURM_NNODES": "1",
        },
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu"},
        {"MASTER_ADDR": "n1"},
    ],
)
def test_one_process_that_was_asked_for_trains_alone(env):
    launch = detect_launch(env)
    require_company(launch, env)
    assert launch.world == 1


def test_a_variable_that_is_not_a_number_is_named():
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number, got 'two'"):
        detect_launch({"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu[03-05,9],login1", ["gpu03", "gpu04", "gpu05", "gpu9", "login1"]),
        ("n1,n2", ["n1", "n2"]),
        ("alone", ["alone"]),
        ("rack[1-2]n[03-04]", ["rack1n03", "rack1n04", "rack2n03", "rack2n04"]),
        ("a[1-2]-ib,b-3", ["a1-ib", "a2-ib", "b-3"]),
    ],
)
def test_hosts_of_a_slurm_node_list(nodelist, hosts):
    assert hosts_of(nodelist) == hosts


def meet(env):
    return find_master(detect_launch(env), env)


STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_JOB_ID": "12",
}


def test_slurm_ranks_meet_on_the_first_node():
    assert meet(STEP).hosts == ("gpu1",)


@pytest.mark.parametrize("laid_out", [{"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_HET_SIZE": "2"}])
def test_where_tasks_are_laid_out_by_hand_rank_0_may_be_on_any_node(laid_out):
    assert meet(STEP | laid_out).hosts == ("gpu1", "gpu2")


def test_every_run_has_ports_of_its_own_and_leaves_those_alone_that_systems_give_away():
    runs = [
        meet({**STEP, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).ports
        for job in "78"
        for step in "01"
    ]
    runs.append(
        meet({**STEP, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}).ports
    )
    assert len({port for ports in runs for port in ports}) == 5 * BLOCK
    assert all(1024 < port < 32768 for ports in runs for port in ports)


def test_a_port_that_was_named_is_the_only_one():
    assert meet({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}).ports == (4000,)


def test_two_runs_that_name_a_host_but_no_port_do_not_meet():
    named = {"MASTER_ADDR": "n1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    ports = [
        set(meet({**named, "PMIX_NAMESPACE": job}).ports) for job in ("424214529", "424214530")
    ]
    assert not ports[0] & ports[1]


def test_the_store_of_torchruns_agent_is_used_where_it_is():
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    assert meet({**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosted
    assert not meet(env).hosted


@pytest.mark.parametrize(
    "mpi", [{**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1"}, HYDRA]
)
def test_an_mpi_on_one_host_needs_no_address(mpi):
    assert meet(mpi).hosts == ("127.0.0.1",)


@pytest.mark.parametrize(
    "mpi", [{**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {**HYDRA, "MPI_LOCALNRANKS": "2"}]
)
def test_an_mpi_across_hosts_asks_for_an_address(mpi):
    with pytest.raises(RuntimeError, match="export MASTER_ADDR"):
        meet(mpi)
