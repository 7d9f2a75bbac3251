"""A lost rank ends a collective run on all ranks within the deadline, named; real processes,
real signals.
"""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from loosestep import launch

pytestmark = pytest.mark.usefixtures("warm_ranks")
SCRIPT = str(Path(__file__).parent / "faulty.py")
DEADLINE = 4.0


def start(strategy: str, *arguments: str) -> launch.Job:
    command = [
        sys.executable,
        "-W",
        "error",
        SCRIPT,
        strategy,
        "--deadline",
        str(DEADLINE),
        *arguments,
    ]
    return launch.start(command, nodes=2, ranks_per_node=2)


def said(rank: launch.Rank, key: str):
    """The last thing a rank said that has `key`."""
    lines = [json.loads(line) for line in rank.output if line.startswith("{")]
    return next((line for line in reversed(lines) if key in line), None)


@pytest.mark.parametrize(
    ("strategy", "victim", "options"),
    [
        ("daso", 0, ()),
        ("daso", 3, ("--near",)),
        ("allreduce", 2, ()),
        ("localsgd:period=2,delay=1,replica=rank", 1, ()),
        ("delay-by-one:replica=rank", 1, ("--size", "3000000")),  # an exchange is in flight
    ],
)
def test_a_killed_rank_ends_the_run_everywhere_and_is_named(strategy, victim, options):
    with start(strategy, *options) as job:
        for rank in job.ranks:
            rank.expect("ready", timeout=60)
        job.ranks[victim].kill(signal.SIGKILL)
        killed = time.monotonic()
        job.wait(timeout=DEADLINE + 20)
        for index, rank in enumerate(job.ranks):
            if index != victim:
                report = said(rank, "error")
                assert report is not None, rank.output[-5:]
                assert report["rank"] == victim
                assert f"rank {victim} is lost" in report["message"]
                assert report["exact"], (
                    "the parameters are those of the local step, no half-done exchange"
                )
                assert report["at"] - killed < DEADLINE + 2
                assert report["saved"] > 10, "a survivor can save where it was"
                assert said(rank, "threads")["threads"] == []
                assert rank.returncode == 0


@pytest.mark.parametrize(
    "strategy", ["daso:period=1000000,delay=1", "adpsgd:graph=pairs,replica=node"]
)
def test_a_killed_mate_is_missed_after_a_few_beats_long_before_the_deadline(strategy):
    with start(strategy, "--deadline", "30") as job:
        for rank in job.ranks:
            rank.expect("ready", timeout=60)
        job.ranks[3].kill(signal.SIGKILL)
        killed = time.monotonic()
        job.ranks[2].expect('"error"', timeout=20)
        report = said(job.ranks[2], "error")
        assert report["rank"] == 3
        assert "rank 3 is lost" in report["message"]
        assert report["at"] - killed < 10, (
            "silence of four beats is enough where its socket is closed"
        )


def test_a_stopped_rank_is_lost_after_the_deadline_and_not_before():
    with start("daso") as job:
        for rank in job.ranks:
            rank.expect("ready", timeout=60)
        job.ranks[2].kill(signal.SIGSTOP)
        time.sleep(DEADLINE / 2)  # shorter than the deadline: nobody minds
        job.ranks[2].kill(signal.SIGCONT)
        assert all(rank.returncode is None for rank in job.ranks)
        time.sleep(1.0)
        assert all(said(rank, "error") is None for rank in job.ranks)
        job.ranks[2].kill(signal.SIGSTOP)
        stopped = time.monotonic()
        for index in (0, 1, 3):
            report = json.loads(job.ranks[index].expect("error", timeout=DEADLINE + 15))
            assert report["rank"] == 2
            assert report["at"] - stopped > DEADLINE - 1.5
            assert report["at"] - stopped < DEADLINE + 3
        job.ranks[2].kill(signal.SIGKILL)
        job.wait(timeout=20)


def test_an_exception_in_the_loop_ends_the_others_at_once_with_its_reason():
    with start("daso", "--fail", "1:25") as job:
        job.wait(timeout=60)
        own = said(job.ranks[1], "error")
        assert (own["error"], own["message"]) == ("ValueError", "the loop went wrong")
        for index in (0, 2, 3):
            report = said(job.ranks[index], "error")
            assert report["rank"] == 1
            assert "rank 1 left the run: ValueError: the loop went wrong" in report["message"]
            assert report["at"] - own["at"] < DEADLINE
        assert all(said(rank, "threads")["threads"] == [] for rank in job.ranks)


def test_an_undisturbed_run_ends_identically_with_nothing_left():
    with start("daso:period=3,delay=2", "--steps", "40") as job:
        assert job.wait(timeout=60).returncodes == (0, 0, 0, 0)
        digests = {said(rank, "done")["digest"] for rank in job.ranks}
        assert len(digests) == 1
        assert all(said(rank, "threads")["threads"] == [] for rank in job.ranks)
