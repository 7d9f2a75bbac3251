"""Labs with real namespaces and real processes."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import loosestep
from loosestep.lab import Kill, Lab, LabError, Stop
from loosestep.lab.grammar import Partition
from loosestep.launch import Job

pytestmark = pytest.mark.usefixtures("needs_namespaces")
STREAM = str(Path(__file__).with_name("stream.py"))
PAUSE = [sys.executable, "-c", "import signal; print('ready'); signal.pause()"]


def processes_of_our_labs() -> list[str]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"LOOSESTEP_LAB={os.getpid()}.".encode() in environment.read_bytes():
                found.append(environment.parent.name)
    return found


class Stream(NamedTuple):
    """One stream from the node of rank 1 to that of rank 0: its Mbit/s, those of its best part,
    bytes, damaged blocks.
    """

    goodput: float
    best: float
    arrived: int
    wrong: int

    def fills(self, nominal: float, share: float = 0.9) -> bool:
        """Whether this is what a link of so many Mbit/s carries: a busy machine slows a stream, but
        it speeds none up.

        So the whole is not faster than the link (the bucket's first fill comes on top), its best
        part not slower.
        """
        return self.goodput < 1.03 * nominal and self.best > share * nominal


def measure(lab: Lab, amount: float) -> Stream:
    with lab.start([STREAM, str(amount)]) as job:
        return heard(job)


def heard(job: Job) -> Stream:
    words = job.ranks[0].expect("mbit", timeout=40).split()
    return Stream(float(words[1]), float(words[7]), int(words[3]), int(words[5]))


@pytest.fixture
def endless() -> Iterator[tuple[Lab, Job]]:
    """Two nodes and a stream that goes on."""
    with Lab(2, bandwidth="20mbit") as lab:
        job = lab.start([STREAM, "1e12", "forever"])
        job.ranks[0].expect("got")
        yield lab, job


def progress(job: Job) -> int:
    return int(job.ranks[0].output[-1].split()[1])


def wait_for_progress(job: Job, beyond: int) -> None:
    """Until more than so many bytes have arrived."""
    rank = job.ranks[0]
    with rank._changed:
        assert rank._changed.wait_for(lambda: int(rank._lines[-1].split()[1]) > beyond, timeout=30)


@pytest.mark.parametrize(
    ("rate", "nominal", "share", "amount"),
    # two busy cores carry no more
    [
        ("20mbit", 20, 0.9, 2.5e6),
        ("200mbit", 200, 0.9, 20e6),
        ("1gbit", 1000, 0.4, 60e6),
    ],
)
def test_a_link_carries_what_it_is_said_to(
    rate: str, nominal: float, share: float, amount: float
) -> None:
    with Lab(2, bandwidth=rate) as lab:
        stream = measure(lab, amount)
        sent = lab.bytes()[1][0]
        received = lab.bytes()[0][1]
    assert stream.fills(nominal, share), stream
    assert (stream.arrived, stream.wrong) == (int(amount), 0)
    assert received == pytest.approx(stream.arrived, rel=0.05)
    assert sent == pytest.approx(received, rel=0.02)


def test_the_same_lab_twice_gives_the_same_throughput() -> None:
    speeds = []
    for _ in range(2):
        with Lab(2, bandwidth="50mbit") as lab:
            speeds.append(max(measure(lab, 4e6).goodput for _ in range(3)))
    assert speeds[0] == pytest.approx(speeds[1], rel=0.05)


def test_a_pair_of_nodes_may_have_a_slower_link_than_the_rest() -> None:
    with Lab(3, bandwidth="200mbit", links={(0, 1): "20mbit"}) as lab:
        assert measure(lab, 2.5e6).fills(20)
    with Lab(3, bandwidth="200mbit", links={(0, 2): "20mbit"}) as lab:
        assert measure(lab, 10e6).fills(200)
    with Lab(2, links={(0, 1): "20mbit"}) as lab:
        assert measure(lab, 2.5e6).fills(20)
        assert lab.network is not None
        rate, there, back = lab.network.pairs()[0, 1]
    assert rate == 20_000_000
    assert back == pytest.approx(2.5e6, rel=0.1)
    assert 0 < there < 0.1 * back  # acknowledgements


def test_a_limit_can_change_while_the_lab_lives_and_counting_goes_on() -> None:
    with Lab(2, bandwidth="200mbit") as lab:
        lab.limit(0, "20mbit")
        assert measure(lab, 2.5e6).fills(20)
        lab.limit(0, "100mbit")  # a new bucket, that counts from 0
        assert lab.bytes()[0][1] == pytest.approx(2.5e6, rel=0.1)
        lab.limit(0, None)
        assert lab.bytes()[0][1] == pytest.approx(2.5e6, rel=0.1)
        assert measure(lab, 10e6).fills(200)
        assert lab.bytes()[0][1] == pytest.approx(12.5e6, rel=0.1)


def test_two_labs_at_once_share_addresses_and_nothing_else() -> None:
    with Lab(2, bandwidth="20mbit") as one, Lab(2, bandwidth="200mbit") as other:
        assert one.network is not None
        assert other.network is not None
        assert one.network.address(0) == other.network.address(0)
        with one.start([STREAM, "2.5e6"]) as slow:
            assert measure(other, 2.5e6).arrived == 2_500_000
            assert heard(slow).fills(20)
        assert [pair[1] for pair in (one.bytes()[0], other.bytes()[0])] == pytest.approx(
            [2.5e6] * 2, rel=0.1
        )


def test_what_a_bucket_lets_pass_has_the_headers_of_every_packet() -> None:
    with Lab(2, bandwidth="200mbit") as limited, Lab(2) as free:
        for lab in (limited, free):
            assert measure(lab, 4e6).arrived == 4_000_000
        carried = limited.bytes()[0][1] / 4e6
        handed_on = free.bytes()[0][1] / 4e6
        # 66 bytes of headers for 1448 of data, and what was sent again
        assert 1.04 < carried < 1.25
        assert handed_on < carried  # one header for many packets


def test_delay_is_one_way_and_leaves_bandwidth_alone() -> None:
    with Lab(2, bandwidth="100mbit", delay="20ms") as lab, lab.start([STREAM, "10e6"]) as job:
        milliseconds = float(job.ranks[1].expect("connected").split()[1])
        stream = heard(job)
    assert 40 <= milliseconds < 200  # a round trip, and looking up the neighbour the first time
    assert stream.fills(100), stream
    assert stream.wrong == 0


def test_lost_packets_are_sent_again_and_damage_nothing() -> None:
    with Lab(2, bandwidth="50mbit", loss="10%") as lab:
        stream = measure(lab, 4e6)
        sent, received = (sum(counted) for counted in zip(*lab.bytes(), strict=True))
    assert (stream.arrived, stream.wrong) == (4_000_000, 0)
    assert received < 0.98 * sent


def test_flipped_bytes_arrive_unseen_by_tcp() -> None:
    with Lab(2, bandwidth="50mbit", wire=True) as lab:
        assert measure(lab, 1e6)[2:] == (1_000_000, 0)
        lab.flip_bytes("20%")
        _, _, arrived, wrong = measure(lab, 2e6)
        assert arrived == 2_000_000
        assert wrong > 0


def test_the_kernels_links_cannot_damage_and_say_so() -> None:
    with Lab(2) as lab, pytest.raises(LabError, match="wire=True"):
        lab.flip_bytes("1%")


def wait_for_silence(lab: Lab, node: int) -> None:
    """Until nothing has reached the node for a while (what was queued on the way arrives first)."""
    deadline = time.monotonic() + 10
    before = -1
    while (received := lab.bytes()[node][1]) != before:
        assert time.monotonic() < deadline, f"node {node} still receives"
        before = received
        time.sleep(0.3)


def test_a_partition_stops_traffic_and_healing_brings_it_back(endless: tuple[Lab, Job]) -> None:
    lab, job = endless
    lab.partition({0}, {1})
    wait_for_silence(lab, 0)
    assert job.running == job.ranks
    lab.heal()
    wait_for_progress(job, progress(job))


def test_a_one_way_drop_leaves_the_other_direction_open(endless: tuple[Lab, Job]) -> None:
    lab, job = endless
    lab.drop(0, 1)  # answers are lost; the data would still pass
    wait_for_silence(lab, 1)
    before = lab.bytes()[0][1]
    while lab.bytes()[0][1] == before:  # it sends again what nobody acknowledged, and that arrives
        assert not job.ended(0.05)
    lab.heal()
    wait_for_progress(job, progress(job))


def test_nodes_outside_a_partition_go_on() -> None:
    with Lab(3, bandwidth="50mbit") as lab:
        lab.partition({2})
        assert measure(lab, 1e6).arrived == 1_000_000


def test_faults_come_at_their_times() -> None:
    faults = [Kill(0, 0.2), Stop(1, 0.1, 0.3), Partition((frozenset({0}),), 0.1, 0.1)]
    with Lab(2, faults=faults) as lab:
        said: list[str] = []
        job = lab.start(PAUSE, announce=said.append)
        assert job.ranks[0].wait(timeout=10) == -signal.SIGKILL
        assert 0.2 <= job.ranks[0].ended - job._begun < 2
        state = Path(f"/proc/{job.ranks[1].pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":  # stopped, and going on again
            assert not job.ended(0.02)
    told = [
        "0.1 s: nodes 0 cut off",
        "0.1 s: rank 1 stopped",
        "0.2 s: nodes 0 connected again",
        "0.2 s: rank 0 killed",
    ]
    assert sorted(said[:4]) == told


def test_a_slow_rank_gets_its_share_of_the_time_and_is_told() -> None:
    code = """
import os, time
print("ready", os.environ.get("LOOSESTEP_SLOW"))
begin = time.process_time()
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
print("cpu", time.process_time() - begin)
"""
    with Lab(1, 2, slow={0: 5}) as lab:
        job = lab.start([sys.executable, "-c", code])
        assert job.wait(timeout=30).returncodes == (0, 0)
    assert [rank.output[0] for rank in job.ranks] == ["ready 5", "ready None"]
    slow = float(job.ranks[0].output[1].split()[1])
    assert 0.02 < slow / 1.5 < 0.3  # a fifth of the time, less where others want the cores too


def test_fifty_labs_leave_nothing() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Lab(2, bandwidth="100mbit").close()
    before = descriptors(), Path("/proc/net/dev").read_text().count(":"), threading.active_count()
    for number in range(50):
        with Lab(2, bandwidth="100mbit", wire=number % 10 == 0) as lab:
            if number % 5 == 0:
                assert lab.run(["true"], timeout=30).returncodes == (0, 0)
    # An open descriptor is all that keeps a namespace without processes alive.
    assert (
        descriptors(),
        Path("/proc/net/dev").read_text().count(":"),
        threading.active_count(),
    ) == before
    assert not processes_of_our_labs()


def test_a_lab_left_by_an_exception_takes_its_ranks_along() -> None:
    lab = Lab(2)
    job = lab.start(PAUSE)
    with pytest.raises(KeyError), lab:
        raise KeyError
    assert not job.running
    assert not processes_of_our_labs()


def test_any_distributed_script_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))\n"
        "model(torch.full((4, 100), float(dist.get_rank()))).sum().backward()\n"
        "print('grad', model.module.weight.grad.sum().item())\n"
        # torch may abort at its end where a reducer outlives its group
        "import gc; del model; gc.collect()\n"
        "dist.destroy_process_group()\n"
    )
    with Lab(2, bandwidth="100mbit") as lab:
        assert lab.run([str(script)], timeout=60).returncodes == (0, 0)
        assert lab.job is not None
        assert [rank.output for rank in lab.job.ranks] == [["grad 20000.0"]] * 2
        assert min(min(pair) for pair in lab.bytes()) > 40_000


def test_without_a_network_the_rest_is_the_same() -> None:
    with Lab(2, 2, network=False, faults=[Kill(1, 0.0)]) as lab:
        job = lab.start(PAUSE)
        assert job.ranks[1].wait(timeout=10) == -signal.SIGKILL
        assert len(job.running) == 3
        with pytest.raises(LabError, match="no network"):
            lab.bytes()
    for options in (
        {"bandwidth": "1mbit"},
        {"loss": "1%"},
        {"faults": [Partition((frozenset({0}),), 1.0, 1.0)]},
    ):
        with pytest.raises(LabError, match="without a network"):
            Lab(2, network=False, **options)  # type: ignore[arg-type]


def test_torchrun_starts_the_ranks_of_every_node() -> None:
    code = (
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'on', "
        "os.environ['GROUP_RANK'])"
    )
    with Lab(2, 1, launcher="torchrun") as lab:
        assert lab.run([sys.executable, "-c", code], timeout=60).returncodes == (0, 0)
        assert lab.job is not None
        # An agent may complain at its end that the one with the store left before it.
        said = [
            [line for line in agent.output if line.startswith("rank")] for agent in lab.job.ranks
        ]
    assert said == [["rank 0 of 2 on 0"], ["rank 1 of 2 on 1"]]


def test_torchrun_ends_a_node_when_one_of_its_ranks_dies_and_our_launcher_does_not() -> None:
    code = (
        "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); "
        "print('on'); time.sleep({})"
    )
    with Lab(1, 2, launcher="torchrun") as lab:
        assert lab.run([sys.executable, "-c", code.format(50)], timeout=40).returncodes == (1,)
    with Lab(1, 2) as lab:
        assert lab.run([sys.executable, "-c", code.format(0.5)], timeout=40).returncodes == (
            0,
            -signal.SIGKILL,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"links": {(0, 1): "2gbit"}, "bandwidth": "1gbit"},
            "2000 Mbit/s is more than the 1000 Mbit/s",
        ),
        ({"faults": [Kill(2, 1.0)]}, "no rank 2; the ranks are 0 to 1"),
        ({"slow": {5: 2.0}}, "no rank 5"),
        ({"links": {(0, 2): "1mbit"}}, "no node 2; the nodes are 0 to 1"),
        ({"faults": [Partition((frozenset({7}),), 1.0, 1.0)]}, "no node 7"),
        ({"bandwidth": "fast"}, "500mbit"),
        ({"launcher": "slurm"}, "one of loosestep, torchrun"),
        ({"launcher": "torchrun", "faults": [Kill(0, 1.0)]}, "torchrun owns its ranks"),
        ({"ranks_per_node": 200}, "400 ranks on one machine"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lab(2, **options)  # type: ignore[arg-type]


def test_one_job_at_a_time() -> None:
    with Lab(1) as lab:
        lab.start(PAUSE)
        with pytest.raises(LabError, match="running a job"):
            lab.start(PAUSE)


def test_the_lab_is_there_without_an_import_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loosestep, "lab")  # as before anybody imported it
    assert loosestep.lab.Lab is Lab
