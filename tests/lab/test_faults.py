"""Faults that meet each other: a stop and a slowdown, two partitions, a partition and the end of
the job.
"""

import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from loosestep.lab import Lab, Partition, Stop
from loosestep.launch import start

PAUSE = [sys.executable, "-c", "import signal; print('ready'); signal.pause()"]


def state(pid: int) -> str:
    """R, S, T (stopped), ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + 10
    while state(pid) not in wanted:
        assert time.monotonic() < deadline, f"{pid} is {state(pid)}, not {wanted}"
        time.sleep(0.01)


def test_a_slowed_rank_that_is_stopped_stands_still() -> None:
    stopped = threading.Event()
    with Lab(1, network=False, slow={0: 2.0}, faults=[Stop(0, 0.0, 60.0)]) as lab:
        job = lab.start(PAUSE, announce=lambda _: stopped.set())
        assert stopped.wait(10)
        wait_for(job.ranks[0].pid, "T")
        seen = set()
        for _ in range(30):  # ten turns of the slowdown
            seen.add(state(job.ranks[0].pid))
            time.sleep(0.007)
    assert seen == {"T"}


def test_a_rank_goes_on_when_the_last_of_two_stops_ends() -> None:
    with start(PAUSE) as job:
        rank = job.ranks[0]
        rank.expect("ready")
        rank.hold("one")
        rank.hold("two")
        rank.let_go("one")
        wait_for(rank.pid, "T")
        rank.let_go("two")
        wait_for(rank.pid, "RS")


def test_a_rank_that_stands_still_is_ended_as_any_other() -> None:
    with start(PAUSE) as job:
        rank = job.ranks[0]
        rank.expect("ready")
        for holder in ("one", "two"):
            rank.hold(holder)
        wait_for(rank.pid, "T")
        job.stop()
        assert job.wait(10).returncodes == (-signal.SIGTERM,)  # it was asked, not killed


def test_what_a_rank_started_stands_still_with_it() -> None:
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import "
        "signal; signal.pause()"
    )
    with start([sys.executable, "-c", code]) as job:
        worker = int(job.ranks[0].expect(""))
        job.ranks[0].hold("test")
        wait_for(worker, "T")


def reaches(lab: Lab, source: int, target: int) -> bool:
    """Whether a datagram of one node arrives at another."""
    network = lab.network
    assert network is not None
    with (
        network.inside(target, socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as inbox,
        network.inside(source, socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as outbox,
    ):
        inbox.bind(("", 0))
        inbox.settimeout(0.3)
        outbox.sendto(b"here", (network.address(target), inbox.getsockname()[1]))
        try:
            return inbox.recv(16) == b"here"
        except TimeoutError:
            return False


@pytest.mark.usefixtures("needs_namespaces")
def test_of_two_partitions_each_ends_by_itself() -> None:
    with Lab(3) as lab:
        lab.partition({0}, {1, 2})
        lab.partition({0, 1}, {2})
        lab.rejoin({0}, {1, 2})
        assert reaches(lab, 0, 1)
        assert not reaches(lab, 0, 2)
        lab.drop(0, 1)
        lab.rejoin({0, 1}, {2})
        assert reaches(lab, 2, 0)
        assert reaches(lab, 1, 0)
        assert not reaches(lab, 0, 1)
        lab.heal()
        assert reaches(lab, 0, 1)


@pytest.mark.usefixtures("needs_namespaces")
def test_a_job_that_ends_in_a_partition_leaves_no_cut() -> None:
    cut = threading.Event()
    with Lab(2, faults=[Partition((frozenset({0}),), 0.0, 60.0)]) as lab:
        with lab.start(PAUSE, announce=lambda _: cut.set()):
            assert cut.wait(10)
            assert not reaches(lab, 0, 1)
        lab.faults.clear()
        with lab.start(PAUSE):
            assert reaches(lab, 0, 1)
