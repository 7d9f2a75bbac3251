"""Who is on which node."""

import socket

import pytest

from loosestep import Topology
from loosestep.topology.launchers import detect_launch, find_master, first_host


def test_grid_numbers_ranks_node_by_node():
    assert Topology.grid(2, 2).nodes == ((0, 1), (2, 3))


def test_lanes_are_the_ranks_of_equal_local_index():
    topology = Topology.grid(3, 2)
    assert topology.lane(0) == (0, 2, 4)
    assert topology.lane(1) == (1, 3, 5)


def test_uneven_nodes_have_as_many_lanes_as_the_smallest_and_count_by_their_ranks():
    topology = Topology([[0, 1, 2], [3]])
    assert topology.lanes == 1
    assert topology.weights == (3, 1)


def test_flat_makes_every_rank_a_node():
    assert Topology([[0, 2], [1]]).flat().nodes == ((0,), (1,), (2,))


def test_ranks_with_the_same_node_name_share_a_node():
    assert Topology.from_names(["a", "b", "a"]).nodes == ((0, 2), (1,))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "at least one node"),
        ([[0], []], "at least one node"),
        ([[0, 2]], "exactly once"),
        ([[0, 0]], "exactly once"),
    ],
)
def test_a_topology_that_makes_no_sense_is_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        Topology(nodes)


def test_plain_python_is_a_world_of_one():
    launch = detect_launch({})
    assert (launch.rank, launch.world) == (0, 1)


def test_two_torchrun_agents_on_one_machine_are_two_nodes():
    base = {"WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    names = [detect_launch({**base, "RANK": str(r), "GROUP_RANK": str(r // 2)}).node for r in range(4)]
    assert Topology.from_names(names).nodes == ((0, 1), (2, 3))


def test_a_pod_that_only_knows_its_rank_is_a_node_of_its_host_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "train-worker-1")
    launch = detect_launch({"RANK": "1", "WORLD_SIZE": "2"})
    assert (launch.rank, launch.world, launch.local_rank, launch.node) == (1, 2, 0, "train-worker-1")


def test_slurm_step_variables_are_read():
    env = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    launch = detect_launch(env)
    assert (launch.launcher, launch.rank, launch.world, launch.local_rank) == ("slurm", 5, 8, 1)
    assert launch.node == "slurm node 2"


def test_a_batch_script_without_srun_is_one_process():
    assert detect_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}).world == 1


def test_open_mpi_variables_are_read():
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    launch = detect_launch(env)
    assert (launch.launcher, launch.rank, launch.world) == ("openmpi", 1, 2)


def test_torchrun_inside_slurm_wins():
    env = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect_launch(env).launcher == "torchrun"


def test_a_variable_that_is_not_a_number_is_named():
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number, got 'two'"):
        detect_launch({"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("nodelist", "host"), [("gpu[03-05,9],login1", "gpu03"), ("n1,n2", "n1"), ("alone", "alone"), ("a[7,9]", "a7")]
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_slurm_ranks_meet_on_the_first_node():
    env = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_JOB_ID": "12"}
    assert find_master(detect_launch(env), env) == ("gpu1", 20012)


def test_open_mpi_across_machines_asks_for_an_address():
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(RuntimeError, match="export MASTER_ADDR"):
        find_master(detect_launch(env), env)
