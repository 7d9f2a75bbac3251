"""Channels on a device, seen from the host: what waits, what is cut off, what is left. The group
is a fake one.
"""

import logging
import os
import threading
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from loosestep.core.collectives.nccl import (
    GRADIENTS,
    LANES,
    NearChannel,
    Reach,
    open_group,
    read_ways,
)
from loosestep.core.errors import CommError, LostPeer
from loosestep.core.messages.heartbeat import Pulse
from loosestep.core.messages.sealed_store import lonely_store

pytestmark = pytest.mark.timeout(20)
CPU = torch.device("cpu")


class FakeWork:
    """An operation that was queued. `done` says whether the device has got there."""

    def __init__(self, done: bool) -> None:
        self.done = done
        self.waits = []

    def wait(self, *timeout: timedelta) -> bool:
        self.waits.append(timeout)
        return True

    def is_completed(self) -> bool:
        return self.done


class FakeGroup:
    """One rank's view of a group of two equal ranks."""

    def __init__(self, *, answers: bool = True) -> None:
        self.calls: list[str] = []
        self.done = True
        self.works = []
        self._answers = threading.Event()
        if answers:
            self._answers.set()

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> FakeWork:
        self._answers.wait()
        if "abort" in self.calls:
            raise RuntimeError("the communicator was aborted")
        tensors[0].mul_(2)
        self.works.append(FakeWork(self.done))
        return self.works[-1]

    def abort(self) -> None:
        self.calls.append("abort")
        self._answers.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def channel_on(group: FakeGroup, pulse: Pulse | None = None) -> NearChannel:
    with patch("loosestep.core.collectives.nccl.open_group", lambda *_: group):
        return NearChannel(
            [0, 1],
            0,
            name="test",
            store=lonely_store(),
            pulse=pulse,
            nodes=[0, 0],
            device=torch.device("cpu"),
        )


@pytest.fixture
def pulse():
    pulse = Pulse(lonely_store(), 0, world=1, deadline=5.0)
    yield pulse
    pulse.leave()


def test_an_operation_holds_the_stream_and_not_the_thread():
    group = FakeGroup()
    channel = channel_on(group)
    group.done = False  # it would never end
    flat = torch.ones(4)
    channel.total(flat, 1)
    assert flat.tolist() == [2, 2, 2, 2]
    assert group.works[-1].waits == [()]  # with a time limit NCCL would hold the thread


def test_what_is_in_flight_is_cut_off_once_when_somebody_is_lost(pulse, caplog):
    group = FakeGroup()
    channel = channel_on(group, pulse)
    group.done = False
    channel.total(torch.ones(4), 1)
    with caplog.at_level(logging.WARNING, "loosestep"):
        pulse.hurt(LostPeer(1, "rank 1 is lost"))
        pulse.hurt(LostPeer(1, "again"))
        channel.abandon()
    assert group.calls == ["abort"]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "a sum on the device was cut off in flight"
    ]


def test_operations_after_the_cut_name_who_is_lost(pulse):
    channel = channel_on(FakeGroup(), pulse)
    pulse.hurt(LostPeer(1, "rank 1 is lost"))
    with pytest.raises(LostPeer, match="rank 1 is lost"), channel.watched():
        channel.total(torch.ones(4), 1)


def test_whoever_is_lost_while_groups_connect_holds_up_nobody(pulse):
    group = FakeGroup(answers=False)
    threading.Timer(0.2, pulse.hurt, [LostPeer(1, "rank 1 is lost")]).start()
    with pytest.raises(LostPeer, match="rank 1"):
        channel_on(group, pulse)


def test_a_peer_that_is_missing_on_the_device_is_an_error():
    class Alone(FakeGroup):
        def allreduce(self, tensors, options):
            return FakeWork(True)

    with pytest.raises(CommError, match="1 of 2 ranks"):
        channel_on(Alone())


def test_devices_that_nccl_cannot_connect_are_an_error_that_says_how_to_do_without():
    class Unconnected(FakeGroup):
        def allreduce(self, tensors, options):
            raise RuntimeError("no route to the other GPU")

    with pytest.raises(
        CommError, match=r"ranks 0, 1: no route to the other GPU.*LOOSESTEP_GRADIENTS=host"
    ):
        channel_on(Unconnected())


def test_a_clean_end_is_left_to_nccl_and_leaves_no_thread():
    group = FakeGroup()
    channel = channel_on(group)
    channel.close()
    channel.close()
    assert group.calls == ["shutdown"]
    assert [t.name for t in threading.enumerate() if t.name.startswith("loosestep")] == []


@pytest.mark.parametrize(
    ("gpus", "ranks", "apart"),
    [
        (("a", "b", None, "a"), [0, 1], True),
        (("a", "b", None, "a"), [0, 3], False),
        (("a", "b", None, "a"), [1, 2], False),
        (("a", "b", None, "a"), [2], False),
    ],
)
def test_ranks_are_apart_when_each_has_a_gpu_of_its_own(gpus, ranks, apart):
    assert Reach(CPU, gpus).apart(ranks) is apart
    assert Reach(CPU, gpus).within(ranks).apart(range(len(ranks))) is apart


def test_lanes_are_checked_only_if_they_were_asked_for_and_only_among_several():
    reach = Reach(CPU, ("a", "a", "b"), lanes=True)
    reach.check_lanes([[0], [1, 2]])
    with pytest.raises(ValueError, match="ranks 0, 1, which have a, a"):
        reach.check_lanes([[0, 1]])
    Reach(CPU, ("a", "a", "b")).check_lanes([[0, 1]])


def test_unknown_ways_are_refused(monkeypatch):
    assert read_ways() == {LANES: "gloo", GRADIENTS: "auto"}
    monkeypatch.setenv(GRADIENTS, "nccl")
    with pytest.raises(ValueError, match="LOOSESTEP_GRADIENTS must be auto or host, got 'nccl'"):
        read_ways()


def test_nccls_watchdog_is_quiet_for_our_group_only(monkeypatch):
    seen = {}

    class Fake:
        class Options:
            pass

        def __init__(self, store, index, size, options):
            seen.update(
                {k: v for k, v in os.environ.items() if k.startswith("TORCH_NCCL")},
                timeout=options._timeout,
            )

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Fake, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    open_group(dist.HashStore(), 0, 2)
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert seen["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert seen["timeout"] > timedelta(days=30)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
