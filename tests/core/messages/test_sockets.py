"""The sockets, on loopback."""

import os
import socket
import warnings
from contextlib import contextmanager

import pytest
from mailboxes import cut, wait_until

from loosestep.core.messages.sockets import Letter, Transport


@contextmanager
def forked_child():
    """A copy of this process, of which Python has finished making a process, and which does
    nothing more.
    """
    (until_closed, ours) = os.pipe()
    (made, making) = os.pipe()
    with warnings.catch_warnings():
        # that there are threads here, of which it uses none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(ours)
        os.write(making, b"!")
        os.read(until_closed, 1)
        os._exit(0)
    try:
        os.read(made, 1)
        yield child
    finally:
        for end in (until_closed, ours, made, making):
            os.close(end)
        os.waitpid(child, 0)


@contextmanager
def pair(largest=100, queue=10):
    """Two transports that have heard each other."""
    both = [Transport("127.0.0.1", None, largest=largest, queue=queue) for _ in range(2)]
    try:
        for end in (0, 1):
            both[end].connect(1 - end, both[1 - end].address)
        for end in (0, 1):
            assert both[end].send(1 - end, Letter(bytearray(b"hello")))
            wait_until(lambda end=end: list(both[1 - end].frames()))
        yield both
    finally:
        for transport in both:
            transport.close()


@pytest.mark.processes
def test_a_forked_child_does_not_keep_the_connections_of_its_parent_open():
    with pair() as (here, gone), forked_child() as child:
        gone.close()
        dead = set()
        wait_until(lambda: dead.update(here.wait(0.02).dead) or dead == {1}, seconds=5)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it is still there


@pytest.mark.processes
def test_a_fork_leaves_all_other_sockets_and_those_of_the_parent_as_they_are():
    ours, theirs = socket.socketpair()
    with pair() as both, ours, theirs, socket.create_server(("127.0.0.1", 0)) as other:
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(1.0)
        try:
            with forked_child() as child:
                assert os.get_blocking(ours.fileno())
                assert str(other.fileno()) in os.listdir(f"/proc/{child}/fd")
                for end in (0, 1):
                    assert both[end].send(1 - end, Letter(bytearray(b"again")))
                    wait_until(lambda end=end: list(both[1 - end].frames()))
        finally:
            socket.setdefaulttimeout(before)


def test_a_connection_that_was_cut_is_made_again_and_told() -> None:
    with pair() as (here, there):
        assert cut([there.address]) >= 1
        back: set[int] = set()
        wait_until(lambda: back.update(here.wait(0.02).again) or back == {1}, seconds=5)
        assert here.send(1, Letter(bytearray(b"again")))
        wait_until(lambda: [bytes(frame) for frame in there.frames()] == [b"again"], seconds=5)


def test_frames_that_a_full_queue_does_not_take_are_kept_and_arrive_in_their_order() -> None:
    with pair(largest=1 << 20, queue=1) as (here, there):
        letters = [Letter(bytearray([number]) * (1 << 20)) for number in range(40)]
        assert all(here.send(1, letter) for letter in letters)
        kept = here.kept(1)
        assert 0 < kept < 40
        assert [letter.waiting for letter in letters] == [False] * (40 - kept) + [True] * kept
        arrived: list[int] = []

        def all_there() -> bool:
            here.wait(0.0)
            arrived.extend(frame[0] for frame in there.frames())
            return len(arrived) == 40

        wait_until(all_there)
        assert arrived == list(range(40))
        assert here.kept(1) == 0
        assert not any(letter.waiting for letter in letters)


def test_frames_kept_for_a_peer_that_is_forgotten_are_let_go() -> None:
    with pair(largest=1 << 20, queue=1) as (here, _):
        letters = [Letter(bytearray(1 << 20)) for _ in range(40)]
        for letter in letters:
            here.send(1, letter)
        here.forget(1)
        assert not any(letter.waiting for letter in letters)
        assert not here.send(1, letters[0])
