"""The run's store among strangers: nothing is taken from it but what a rank of the run wrote."""

import logging
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistStoreError, HashStore, PrefixStore, TCPStore

from loosestep.core.collectives.gloo import open_devices, open_group
from loosestep.core.messages.sealed_store import SealedStore

SECRET = bytes(32)


def views(count=2, *, secret=SECRET, timeout=5.0):
    raw = HashStore()
    return raw, [
        SealedStore(raw, secret, rank=rank, prefix="run", timeout=timeout) for rank in range(count)
    ]


def test_what_a_rank_writes_the_others_read():
    _, (one, two) = views()
    one.within("part").set("name", "value")
    assert two.within("part").get("name") == b"value"
    assert not two.check(["name"])
    assert two.within("part").multi_get(["name"]) == [b"value"]


@pytest.mark.parametrize("forged", [b"", b"value", bytes(100)])
def test_a_strangers_value_is_not_there(forged, caplog):
    raw, (one, two) = views(timeout=0.1)
    one.set("name", "right")
    raw.set("run/name", forged)
    assert not two.check(["name"])
    assert two.peek(["name"]) == [None]
    with pytest.raises(DistStoreError, match="no rank of this run has written name"):
        two.get("name")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # told once


def test_the_right_value_is_waited_for():
    raw, (one, two) = views()
    raw.set("run/name", "of a stranger")
    threading.Timer(0.2, lambda: one.set("name", "right")).start()
    assert two.get("name") == b"right"


def test_another_secret_is_a_stranger():
    raw, (one,) = views(1)
    one.set("name", "value")
    assert not SealedStore(raw, bytes(31) + b"1", rank=1, prefix="run", timeout=1.0).check(["name"])


def test_an_old_value_of_a_rank_is_not_taken_again():
    raw, (one, two) = views()
    one.set("rate", "1")
    old = raw.get("run/rate")
    one.set("rate", "2")
    assert two.get("rate") == b"2"
    raw.set("run/rate", old)
    assert two.peek(["rate"]) == [None]
    one.set("rate", "3")
    assert two.get("rate") == b"3"


def test_a_value_does_not_fit_under_another_name():
    raw, (one, two) = views()
    one.set("small", "1")
    raw.set("run/large", raw.get("run/small"))
    assert not two.check(["large"])


def test_ranks_count_together():
    _raw, pair = views()
    threads = [
        threading.Thread(target=lambda view=view: [view.add("count", 1) for _ in range(50)])
        for view in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pair[0].add("count", 0) == 100


def test_a_connection_has_its_own_time_limit():
    raw = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    view = SealedStore(raw, SECRET, rank=0, prefix="run", timeout=5.0)
    own = view.clone()
    own.set_timeout(timedelta(seconds=7))
    assert own.timeout == timedelta(seconds=7)
    assert view.timeout == timedelta(seconds=5)
    own.set("name", "value")
    assert view.get("name") == b"value"


def test_torchs_groups_meet_in_it_and_take_no_address_of_a_stranger():
    raw, pair = views(timeout=20.0)
    asked = threading.Event()
    pair[1].wait = lambda keys, timeout=None: (
        asked.set(),
        raw.wait([f"run/{key}" for key in keys], timeout),
    )

    def enter(rank, results):
        group = open_group(pair[rank], rank, 2, devices=open_devices(), timeout=20.0)
        values = torch.full((3,), float(rank + 1))
        group.allreduce([values]).wait()
        results[rank] = values

    results: dict[int, torch.Tensor] = {}
    raw.set("run/0/0", b"an address of a stranger")  # where gloo looks for rank 0
    late = threading.Thread(target=enter, args=(1, results))
    late.start()
    asked.wait(10)
    enter(0, results)
    late.join(20)
    assert [value.tolist() for value in (results[0], results[1])] == [[3.0] * 3] * 2


def test_without_seals_only_where_it_is_said():
    raw, (one,) = views(1)
    part = one.open("nccl")
    assert isinstance(part, PrefixStore)
    part.set("id", "1")
    assert raw.get("run/nccl/id") == b"1"
