"""The connection to the store that heartbeats use."""

from datetime import timedelta

import torch.distributed as dist

from loosestep.core.messages.heartbeat import connect


def make_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_restarted_job_in_the_same_store_does_not_see_what_the_first_wrote() -> None:
    shared = make_store()
    first, second = (
        connect(dist.PrefixStore(f"attempt {number}", shared), timeout=5.0) for number in range(2)
    )
    first.set("report", "of the first attempt")
    assert not second.check(["report"])
    assert first.get("report") == b"of the first attempt"


def test_a_connection_has_its_own_time_limit() -> None:
    shared = make_store()
    assert connect(shared, timeout=7.0).timeout == timedelta(seconds=7)
    assert shared.timeout != timedelta(seconds=7)
