"""A rank that never comes to the rendezvous is missed, and named."""

import sys

import pytest

from loosestep.lab import Lab
from loosestep.launch import Job

MEETS = """
import os, signal, socket, sys
if os.environ["RANK"] in sys.argv[1:]:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family = socket.AF_INET6 if os.environ["RANK"] == "0" else socket.AF_INET  # torch takes the first
    connection = socket.socket(family)
    connection.connect(("::ffff:" + address if family == socket.AF_INET6 else address, port))
    print("here", flush=True)
else:
    print("asleep", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("network", [True, False])
def test_a_rank_that_does_not_come_is_named_with_its_last_lines(
    network: bool, request: pytest.FixtureRequest
) -> None:
    if network:
        request.getfixturevalue("needs_namespaces")
    with Lab(2, network=network) as lab:
        job = lab.start([sys.executable, "-c", MEETS, "0"])
        job.ranks[0].expect("here")
        job.ranks[1].expect("asleep")
        with pytest.raises(TimeoutError) as caught:
            lab.wait_for_start(0.1)
    assert "rank 1 [n1 r1], whose last lines are:\n  asleep" in str(caught.value)
    assert "rank 0" not in str(caught.value)


@pytest.mark.parametrize("come", [["0", "1"], []], ids=["everybody", "nobody"])
def test_nobody_is_missed_where_all_are_there_or_nobody_uses_the_rendezvous(
    come: list[str],
) -> None:
    with Lab(2, network=False) as lab:
        job = lab.start([sys.executable, "-c", MEETS, *come])
        for rank in job.ranks:
            rank.expect("here" if come else "asleep")
        lab.wait_for_start(0.1)


def ended(job: Job, number: int) -> None:
    rank = job.ranks[number]
    with rank._changed:
        assert rank._changed.wait_for(lambda: rank.returncode is not None, timeout=30)


def test_whoever_ended_before_the_rendezvous_is_named_while_others_wait_there() -> None:
    with Lab(2, network=False) as lab:
        job = lab.start([sys.executable, "-c", MEETS, "0"])
        job.ranks[0].expect("here")
        job.ranks[1].expect("asleep")
        job.ranks[1].kill()
        ended(job, 1)
        with pytest.raises(
            TimeoutError, match=r"rank 1 \[n1 r1\], which ended with SIGKILL, whose last lines"
        ):
            lab.wait_for_start(0.1)


@pytest.mark.parametrize("how", ["true", "false"])
def test_a_rank_that_ended_is_no_proof_that_others_wait(how: str) -> None:
    with Lab(2, network=False) as lab:
        job = lab.start(["sh", "-c", f"test $RANK = 0 && exec sleep 60; echo gone; {how}"])
        ended(job, 1)
        lab.wait_for_start(0.1)
        assert job.ranks[0].returncode is None
