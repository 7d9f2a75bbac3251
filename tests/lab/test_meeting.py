"""A rank that never comes to the rendezvous is missed, and named."""

import sys

import pytest

from loosestep.lab import Lab

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
def test_a_rank_that_does_not_come_is_named_with_its_last_lines(network: bool, request: pytest.FixtureRequest) -> None:
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
def test_nobody_is_missed_where_all_are_there_or_nobody_uses_the_rendezvous(come: list[str]) -> None:
    with Lab(2, network=False) as lab:
        job = lab.start([sys.executable, "-c", MEETS, *come])
        for rank in job.ranks:
            rank.expect("here" if come else "asleep")
        lab.wait_for_start(0.1)
