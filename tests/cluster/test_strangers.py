"""Strangers around a run: on the network of its store, another user of its machine, on the port of
its mailbox. Real processes; a stranger has no key.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from loosestep import launch
from loosestep.core.collectives import shared_memory
from loosestep.core.messages.sealed_store import SealedStore
from loosestep.core.store import host_store
from loosestep.launch import Job

pytestmark = pytest.mark.usefixtures("warm_ranks")
SCRIPT = str(Path(__file__).parent / "starter.py")
NOBODY = 65534


def said(rank, key):
    """The last thing a rank said that has `key`."""
    lines = [json.loads(line) for line in rank.output if line.startswith("{")]
    return next((line[key] for line in reversed(lines) if key in line), None)


@contextmanager
def run_of_two(*arguments, env=None, deadline=20):
    """Two ranks that train, and the address of their store."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    command = [sys.executable, SCRIPT, "train", "--deadline", str(deadline), *arguments]
    places = launch.places(command, [2], *address, env=env)
    with Job(places, store=host_store(listener)) as job:
        for rank in job.ranks:
            rank.expect("ready")
        yield job, address


def end_in_order(job):
    """Ask a run to end, and see that it was one run all along."""
    job.ranks[0].kill(signal.SIGTERM)
    assert job.wait(40).returncodes == (0, 0), [rank.story() for rank in job.ranks]
    assert said(job.ranks[0], "model") == said(job.ranks[1], "model")


def overwrite(store, victim):
    """Everything that is in a store, by what would do harm if it were believed."""
    harm = [
        str(victim),
        json.dumps({"failed": "by a stranger", "culprit": 1}),
        json.dumps([10**6, {"rate": 1e5}]),
        json.dumps({"said": {"token": "0", "run": "", "world": 2}, "proof": ""}),
        "100000",
    ]
    keys = [key.lstrip("/") for key in store.list_keys()]
    for number, key in enumerate(keys):
        store.set(key, harm[number % len(harm)])
    return len(keys)


@pytest.mark.parametrize("key", ["", "a key that no stranger has"], ids=["no key", "a key"])
def test_a_stranger_who_writes_everything_in_the_store_changes_nothing(tmp_path, key):
    victim = tmp_path / "not to be touched"
    victim.write_text("mine")
    with run_of_two(env={"LOOSESTEP_KEY": key}, deadline=5) as (job, address):
        stranger = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        stranger.set_timeout(timedelta(seconds=5))
        for sweep in range(6):  # in time with the heartbeats, and not
            written = overwrite(stranger, victim)
            if sweep == 0:
                assert written > 4  # what is written there is what the run reads
            time.sleep(0.37)
        del stranger
        assert job.running == job.ranks
        # The note that rank 0 left before is gone; what a stranger put there is not taken for it.
        job.ranks[0].kill(signal.SIGTERM)
        job.wait(60)
        assert {said(rank, "rate") for rank in job.ranks} <= {"0.1", None}
        told = [sum("no rank of this run writes" in line for line in r.output) for r in job.ranks]
        assert 1 in told
        assert max(told) == 1
    assert victim.read_text() == "mine"


def test_no_name_of_a_file_is_taken_from_the_store(tmp_path, monkeypatch):
    """Whoever knew the secret could lie about whether there is memory, and about nothing else."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    store = SealedStore(dist.HashStore(), bytes(32), rank=0, prefix="run", timeout=1.0)
    store.set("memory", str(victim))
    assert shared_memory.open_slots(store, index=1, size=2) is None
    shared_memory.forget(store, 0)
    assert victim.read_text() == "mine"


def as_nobody(action):
    """What `action()` raised in a process of another user; "" when nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            os.write(write, b".")
        except OSError as error:
            os.write(write, f".{type(error).__name__}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    answer = os.read(read, 200).decode()
    os.close(read)
    assert answer.startswith("."), "the stranger came to nothing"
    return answer[1:]


class Patient:
    """Waits for mates without heartbeats."""

    def check(self):
        pass

    def suspect(self):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
def test_another_user_cannot_reach_the_barrier_or_the_memory_of_a_node():
    raw = dist.HashStore()
    stores = [
        SealedStore(raw, bytes(32), rank=rank, prefix=f"run {os.getpid()}", timeout=5.0)
        for rank in range(2)
    ]
    slots = [
        shared_memory.open_slots(store, index=rank, size=2) for rank, store in enumerate(stores)
    ]
    folder = shared_memory._folder_of(stores[0])

    def say_that_rank_1_is_there():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.sendto(shared_memory.HERE.pack(1, 1), str(folder / "0"))

    try:
        assert folder.is_dir()
        for action in (
            say_that_rank_1_is_there,
            lambda: os.listdir(folder),
            lambda: os.open(folder / "memory", os.O_RDWR),
        ):
            assert as_nobody(action) == "PermissionError"
        # Nothing lies in the abstract namespace either, which every user can list.
        inode = os.stat(folder / "0").st_ino
        assert inode
        with open("/proc/net/unix") as table:
            assert not [line for line in table if "@loosestep" in line]
        assert all(slot.meeting.reach() for slot in slots)
    finally:
        shared_memory.forget(stores[0], 0)
    assert not folder.exists()
    heard = []
    mate = threading.Thread(target=lambda: heard.append(slots[1].meeting.meet(Patient(), b"one")))
    mate.start()
    assert slots[0].meeting.meet(Patient(), b"zero") == [b"zero", b"one"]
    mate.join()
    assert heard == [[b"zero", b"one"]]
    for slot in slots:
        slot.meeting.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_folder_that_is_not_private_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    store = SealedStore(dist.HashStore(), bytes(32), rank=1, prefix="run", timeout=1.0)
    folder = shared_memory._folder_of(store)
    folder.mkdir(mode=0o755)
    (folder / "memory").write_bytes(bytes(1000))
    store.set("memory", "there")
    assert shared_memory.open_slots(store, index=1, size=2) is None
    folder.chmod(0o700)
    os.chown(folder, NOBODY, NOBODY)
    assert shared_memory.open_slots(store, index=1, size=2) is None


def test_the_store_of_a_node_listens_on_loopback_only():
    """Nodes that gossip have one each."""
    arguments = ["--strategy", "adpsgd:replica=node"]
    with run_of_two(*arguments) as (job, _):
        inodes = set()
        for rank in job.ranks:
            for name in os.listdir(f"/proc/{rank.pid}/fd"):
                target = os.readlink(f"/proc/{rank.pid}/fd/{name}")
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
        listening = []
        for table, anywhere in (("tcp", "0" * 8), ("tcp6", "0" * 32)):
            for line in Path(f"/proc/{job.ranks[0].pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and inode in inodes:
                    listening.append((local, local.startswith(anywhere)))
        assert listening
        assert not [local for local, open_to_all in listening if open_to_all]
        end_in_order(job)
