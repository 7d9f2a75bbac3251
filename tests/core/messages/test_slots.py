"""Memory that ranks of one host share."""

import json
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from loosestep.core.messages.slots import EdgeSlots, OwnSlots, TheirSlots, reach, this_host

FLOAT = np.dtype("<f4")


def path(own):
    card = own.card()
    return f"/proc/{card['process']}/fd/{card['file']}"


def test_a_peer_reads_what_was_written_into_a_slot():
    own = OwnSlots(4, 1000)
    theirs = TheirSlots(own.card())
    own.value(3, FLOAT, 250)[:] = np.arange(250)
    np.testing.assert_array_equal(np.frombuffer(theirs.read(3, 1000), FLOAT), np.arange(250))
    own.value(3, FLOAT, 250)[:] = 7
    np.testing.assert_array_equal(np.frombuffer(theirs.read(3, 1000), FLOAT), 7)
    assert theirs.read(4, 1000) is None
    assert theirs.read(-1, 1000) is None
    assert theirs.read(0, own.size + 1) is None
    own.close()


def test_nobody_but_its_owner_can_write_to_it_or_cut_it():
    own = OwnSlots(2, 1000)
    with pytest.raises(TypeError, match="read-only"):
        TheirSlots(own.card()).read(0, 4)[0] = 1
    file = os.open(path(own), os.O_RDWR)  # as another process of the same user may
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(file, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.write(file, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(file, 10)
    finally:
        os.close(file)
        own.close()


def test_memory_that_is_not_what_the_card_says_is_not_read(tmp_path):
    own = OwnSlots(2, 1000)
    other = OwnSlots(2, 1000)
    card = own.card()
    assert reach(card) is not None
    assert reach({**card, "file": other.card()["file"]}) is None  # another proof
    assert reach({**card, "slots": 3}) is None
    with (tmp_path / "plain").open("wb+") as plain:  # not sealed: its owner could cut it
        plain.truncate(os.fstat(own._file).st_size)
        assert reach({**card, "file": plain.fileno()}) is None
    own.close()
    assert reach(card) is None
    assert reach(None) is None
    other.close()


@pytest.mark.processes
def test_it_can_be_read_from_another_process_and_goes_with_its_owner():
    script = (
        "import numpy as np, sys, json;from loosestep.core.messages.slots import OwnSlots;"
        "own = OwnSlots(2, 64); own.value(1, np.dtype('<f4'), 16)[:] = 5;"
        "print(json.dumps(own.card()), flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as owner:
        card = json.loads(owner.stdout.readline())
        theirs = TheirSlots(card)
        np.testing.assert_array_equal(np.frombuffer(theirs.read(1, 64), FLOAT), 5)
        owner.kill()
    np.testing.assert_array_equal(np.frombuffer(theirs.read(1, 64), FLOAT), 5)  # no bus error
    assert reach(card) is None
    assert not [name for name in os.listdir("/dev/shm") if str(owner.pid) in name]


def test_an_edge_takes_slots_only_once_its_peer_reads_them_and_while_there_are_any():
    own = OwnSlots(3, 64)
    edge = EdgeSlots(own, range(1, 3), FLOAT)
    assert edge.take(4) is None
    edge.ready = True
    taken = [edge.take(4), edge.take(4)]
    assert {buffer.slot for buffer in taken} == {1, 2}
    assert edge.take(4) is None
    taken[0].home.append(taken[0].slot)
    assert edge.take(4).slot == taken[0].slot
    own.close()


def test_processes_of_one_host_know_it():
    assert this_host() == this_host() != ""
