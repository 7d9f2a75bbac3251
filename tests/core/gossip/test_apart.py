"""Communication in a process of its own: the same gossip, and what a kill of either half does."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from mailboxes import KEY, QUICK, cluster, start_vector, step, wait_until
from torch.distributed import TCPStore

from loosestep.codecs import codec
from loosestep.core.gossip.mailbox import CHUNK_BYTES, Mailbox
from loosestep.core.gossip.memory import WRITING
from loosestep.core.gossip.peer import Timing
from loosestep.core.gossip.shadow import Shadow

pytestmark = pytest.mark.processes


def processes(c):
    return [box._courier.process for box in c.boxes]


@pytest.mark.parametrize(
    "options",
    [{}, {"key": KEY}, {"key": KEY, "encrypt": True}, {"codec": codec("bf16")}, {"shared": False}],
    ids=["clear", "key", "curve", "bf16", "sockets"],
)
def test_the_mean_is_untouched_and_all_end_with_it(options):
    with cluster(3, size=3 * CHUNK_BYTES // 8 + 5, apart=True, **options) as c:

        def work(rank):
            for k in range(20):
                peer = (rank + 1 + k % 2) % 3
                c.boxes[rank].cross(c.params[rank], "publish", peer=peer, share=0.5)
                pending = c.boxes[rank].exchange(peer, share=0.5)
                if k % 3:
                    pending.wait(10)
                c.params[rank][0] += 0.125
                step(c.boxes[rank], c.params[rank])

        c.all(work)
        assert c.boxes[0].counters["exchanges"] > 0
        c.finish()
        expected = (c.start + 3 * 20 * 0.125) / 3
        for params in c.params:
            torch.testing.assert_close(params[0], expected, rtol=0, atol=1e-12)
            assert torch.equal(params[0], c.params[0][0])
        children = processes(c)
    assert [child.poll() for child in children] == [0, 0, 0]


def test_ranks_with_and_without_a_process_gossip_with_each_other():
    with cluster(2, size=CHUNK_BYTES // 4, apart=True) as c:
        assert c.boxes[0].exchange(1).wait(10)
        mean = c.boxes[0].consensus()
        np.testing.assert_allclose(mean, c.start / 2)
        assert c.boxes[0].global_steps == 0
        for _ in range(3):
            step(c.boxes[1], c.params[1])
        wait_until(lambda: c.boxes[0].global_steps == 3)


def test_a_rank_whose_process_is_killed_says_so_and_the_others_go_on():
    with cluster(3, size=CHUNK_BYTES // 4, apart=True) as c:
        c.exchange(0, 1)
        processes(c)[2].send_signal(signal.SIGKILL)
        wait_until(lambda: c.said(0, "peer_dead") and c.said(1, "peer_dead"), seconds=5)
        assert c.said(0, "peer_dead")[0]["peer"] == 2
        wait_until(lambda: c.said(2, "mailbox_failed"))
        with pytest.raises(ConnectionError, match=r"rank 2 has failed: .* killed by signal 9"):
            step(c.boxes[2], c.params[2])
        assert c.exchange(0, 1) == "exchanged"
        c.finish(ranks=[0, 1])


def test_who_waits_for_a_process_that_is_killed_is_told():
    with cluster(2, apart=True) as c:
        ending = c.pool.submit(c.boxes[0].finish, c.params[0], 20)
        wait_until(lambda: c.boxes[0]._courier.ending.done)
        processes(c)[0].kill()
        with pytest.raises(ConnectionError, match="killed by signal 9"):
            ending.result(10)


def test_a_chunk_that_was_being_written_by_a_process_that_died_is_not_folded():
    params = [torch.zeros(20)]
    shadow = Shadow(params, chunk_bytes=40, apart=True)
    value = shadow.read(1).value
    shadow.move(1, 0.5, mine=value, theirs=value + 2, snapshot=0)
    shadow._all[WRITING] = 2
    with pytest.raises(ConnectionError, match="has ended"):
        shadow.settle(params)
    assert not params[0].any()


def test_two_processes_never_write_a_chunk_at_once():
    params = [torch.zeros(1 << 16)]
    shadow = Shadow(params, chunk_bytes=1 << 18, apart=True)
    script = (
        "import sys, numpy as np;from loosestep.core.gossip.room import Room;"
        "room = Room(*{figures}, np.dtype('<f4'), file={file});"
        "[(room.lock.__enter__(), room.vectors[1].__iadd__(1), room.lock.__exit__(None, None, None))"
        " for _ in range(300)]"
    )
    room = shadow.room
    code = script.format(figures=room.figures[:3], file=room.file)
    shadow._delta[:] = 0
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[room.file]) as other:
        for _ in range(300):
            with room.lock:
                shadow._delta[:] += 1
        assert other.wait(60) == 0
    np.testing.assert_array_equal(shadow._delta, 600)


RANK = """
import sys, time, torch
from torch.distributed import TCPStore
sys.path.insert(0, {tests!r})
from mailboxes import QUICK, start_vector
from loosestep.core.gossip.mailbox import Mailbox
from loosestep.core.gossip.peer import Timing
box = Mailbox(TCPStore("127.0.0.1", {port}, None, False), 1, world=range(2), params=[start_vector(1, {size}, torch.float64)],
              layout=b"layout", timing=Timing(**QUICK), apart=True)
print(box._courier.process.pid, flush=True)
while True:
    box.exchange(0).wait(10)
"""


def test_when_a_rank_is_killed_its_process_goes_and_the_other_loses_no_time():
    size = 4 * CHUNK_BYTES // 8
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    shared = set(os.listdir("/dev/shm"))
    code = RANK.format(tests=os.path.dirname(__file__), port=store.port, size=size)
    events = []
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        params = [start_vector(0, size, torch.float64)]
        box = Mailbox(
            store,
            0,
            world=range(2),
            params=params,
            layout=b"layout",
            timing=Timing(**QUICK),
            emit=lambda kind, **fields: events.append((kind, time.monotonic())),
            apart=True,
        )
        try:
            process = int(rank.stdout.readline())
            wait_until(lambda: box.counters["chunks"] > 20)
            rank.kill()
            killed = time.monotonic()
            last = killed
            gaps = []
            while not any(kind == "peer_dead" for kind, _ in events):
                assert time.monotonic() - killed < 5
                step(box, params, "whole")
                time.sleep(0.001)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
            assert next(when for kind, when in events if kind == "peer_dead") - killed < 1.0
            assert sorted(gaps)[-2] < 0.25
            wait_until(lambda: not os.path.exists(f"/proc/{process}") or stopped(process))
            assert not [
                name for name in set(os.listdir("/dev/shm")) - shared if "loosestep" in name
            ]
        finally:
            rank.kill()
            box.close()


def stopped(process):
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"
