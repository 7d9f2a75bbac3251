"""How a run starts, again and beside others: real processes, with the variables of launchers."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loosestep import launch
from loosestep.launch import Job, RankCommand
from loosestep.topology.launchers import Launch, Rendezvous, find_master

pytestmark = pytest.mark.usefixtures("warm_ranks")
SCRIPT = str(Path(__file__).parent / "starter.py")
KEY = "the key of one run, or of the other"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def said(rank, key):
    """The last thing a rank said that has `key`."""
    lines = [json.loads(line) for line in rank.output if line.startswith("{")]
    return next((line[key] for line in reversed(lines) if key in line), None)


def by_hand(rank, *arguments, world=2, **env):
    """A rank that no agent has started: rank 0 hosts the store."""
    common = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return RankCommand(f"r{rank}", [sys.executable, SCRIPT, *arguments], {**common, **env})


@pytest.mark.parametrize("hosted", [True, False], ids=["in the launcher's store", "by hand"])
@pytest.mark.parametrize("strategy", ["daso:period=2", "adpsgd"])
def test_attach_finish_attach_and_two_at_once(hosted, strategy):
    command = ["again", "--strategy", strategy]
    if hosted:
        job = launch.start([sys.executable, SCRIPT, *command], nodes=2, ranks_per_node=1)
    else:
        port = str(free_port())
        job = Job([by_hand(rank, *command, MASTER_PORT=port) for rank in range(2)])
    with job:
        result = job.wait(60)
        assert result.returncodes == (0, 0), [rank.story() for rank in job.ranks]
        models = [said(rank, "model") for rank in job.ranks]
        assert models[0] == models[1] != None  # noqa: E711


def test_a_restart_meets_in_the_store_that_the_first_attempt_met_in():
    """As the ranks of `torchrun --max-restarts` on several agents do."""
    counts = [1, 1]
    places, store = launch.local_places([sys.executable, SCRIPT, "train"], counts)
    with Job(places) as job:
        for rank in job.ranks:
            rank.expect("ready")
        job.ranks[0].kill(signal.SIGKILL)
        job.ranks[1].kill(signal.SIGKILL)
        job.wait(20)
    again = [
        RankCommand(
            place.label, [sys.executable, SCRIPT, "train", "--steps", "5"], place.env, place.node
        )
        for place in places
    ]
    with Job(again) as job:
        assert job.wait(60).returncodes == (0, 0), [rank.story() for rank in job.ranks]
    del store


@pytest.mark.parametrize(
    "differ",
    [
        [{"LOOSESTEP_KEY": KEY}, {"LOOSESTEP_KEY": KEY[::-1]}],
        [{"TORCHELASTIC_RUN_ID": "7"}, {"TORCHELASTIC_RUN_ID": "8"}],
    ],
    ids=["by key", "by run"],
)
def test_two_runs_at_one_port_do_not_mix(differ):
    port = str(free_port())
    ours, theirs = differ
    with Job([by_hand(0, "train", "--steps", "5", MASTER_PORT=port, **ours)]) as zero:
        stray = [by_hand(rank, "train", MASTER_PORT=port, **theirs) for rank in range(2)]
        with Job(stray) as other:
            assert other.wait(30).returncodes == (3, 3)
            assert "cannot listen" in said(other.ranks[0], "error")
            assert "rank 0 has a wrong run key" in said(other.ranks[1], "error") or (
                "belongs to another run" in said(other.ranks[1], "error")
            )
        with Job([by_hand(1, "train", "--steps", "5", MASTER_PORT=port, **ours)]) as one:
            assert zero.wait(30).returncodes == one.wait(30).returncodes == (0,)
            assert said(zero.ranks[0], "model") == said(one.ranks[0], "model")


def test_a_port_that_is_taken_is_passed_over():
    """By another program, that answers nothing, and by the store of another run."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "9"}
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOOSESTEP_KEY": KEY}
    place = find_master(Launch("slurm", 0, 2, 0, "n", job="slurm job 9 step 0"), step)
    with (
        socket.create_server(("127.0.0.1", place.ports[0])),
        Job(
            [
                RankCommand(
                    f"r{rank}",
                    [sys.executable, SCRIPT, "train", "--steps", "5"],
                    {**step, **common, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)},
                )
                for rank in range(2)
            ]
        ) as job,
    ):
        assert job.wait(60).returncodes == (0, 0), [rank.story() for rank in job.ranks]


def test_a_process_among_several_that_would_train_alone_says_how_to_start():
    with Job(
        [
            RankCommand(
                "r0", [sys.executable, SCRIPT, "train"], {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
            )
        ]
    ) as job:
        assert job.wait(30).returncodes == (3,)
        assert "srun python SCRIPT" in said(job.ranks[0], "error")


@pytest.mark.parametrize("strategy", ["daso:period=2", "adpsgd"])
def test_a_signal_to_one_rank_ends_the_loop_of_all_in_order(strategy):
    command = [sys.executable, SCRIPT, "train", "--strategy", strategy]
    with launch.start(command, nodes=2, ranks_per_node=1) as job:
        for rank in job.ranks:
            rank.expect("ready")
        job.ranks[1].kill(signal.SIGTERM)
        assert job.wait(30).returncodes == (0, 0), [rank.story() for rank in job.ranks]
        assert [said(rank, "stopped") for rank in job.ranks] == [True, True]
        assert said(job.ranks[0], "model") == said(job.ranks[1], "model")


def test_survivors_blame_the_rank_that_died_first_and_not_those_that_a_launcher_then_ends():
    """As torchrun does: when one rank of a node has died, it ends the others."""
    with launch.start([sys.executable, SCRIPT, "train"], nodes=2, ranks_per_node=2) as job:
        for rank in job.ranks:
            rank.expect("ready")
        job.ranks[3].kill(signal.SIGKILL)
        job.ranks[3].wait(5)
        job.ranks[2].kill(signal.SIGKILL)
        job.wait(30)
        for rank in job.ranks[:2]:
            assert "rank 3 is lost" in said(rank, "error"), rank.story()


def test_the_command_line_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "loosestep", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "launch" in done.stdout


def test_where_ranks_meet_reads_well():
    assert str(Rendezvous(("n1", "n2"), (1, 2, 3))) == "n1,n2:1-3"
