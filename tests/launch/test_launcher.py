"""Real processes, started side by side."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from loosestep import launch


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    assert ready, f"process {pid} still runs after {seconds} s"


def test_every_rank_gets_torchruns_variables_on_uneven_nodes() -> None:
    names = [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
    ]
    command = python(f"import os; print(*(os.environ[name] for name in {names}))")
    with launch.start(command, nodes=2, ranks_per_node=[2, 1]) as job:
        assert job.wait(timeout=20).returncodes == (0, 0, 0)
    assert [rank.output for rank in job.ranks] == [
        ["0 0 0 0 2 3 2"],
        ["1 1 0 0 2 3 2"],
        ["2 0 1 1 1 3 2"],
    ]
    assert [rank.place.label for rank in job.ranks] == ["n0 r0", "n0 r1", "n1 r2"]


def test_ranks_share_one_fresh_key_and_the_users_settings_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("LOOSESTEP_KEY", raising=False)
    command = python(
        "import os; print(os.environ['LOOSESTEP_KEY'], os.environ['OMP_NUM_THREADS'], "
        "os.environ['MINE'])"
    )
    seen = set()
    for _ in range(2):
        with launch.start(command, ranks_per_node=2, env={"MINE": "yes"}) as job:
            job.wait(timeout=20)
        first, second = (rank.output[0].split() for rank in job.ranks)
        assert first == second
        assert first[1:] == ["2", "yes"]
        seen.add(first[0])
    assert len(seen) == 2
    monkeypatch.setenv("LOOSESTEP_KEY", "given")
    with launch.start(command, env={"MINE": ""}) as job:
        job.wait(timeout=20)
    assert job.ranks[0].output == ["given 2 "]


def test_ranks_meet_without_rank_0() -> None:
    """Rank 0 dies as soon as it has met the others; the store goes on."""
    command = python("""
        import os, sys
        rank = int(os.environ["RANK"])
        from datetime import timedelta
        from torch.distributed import rendezvous
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=20)))
        store.set(f"from {rank}", "hello")
        if rank == 0:
            os.kill(os.getpid(), 9)
        store.get("rank 0 is dead")
        print(store.get(f"from {3 - rank}").decode())
    """)
    with launch.start(command, ranks_per_node=3) as job:
        assert job.ranks[0].wait(timeout=60) == -signal.SIGKILL
        port = int(job.ranks[0].place.env["MASTER_PORT"])
        TCPStore("127.0.0.1", port, is_master=False).set("rank 0 is dead", "yes")
        assert job.wait(timeout=60).returncodes == (-9, 0, 0)
    assert [rank.output for rank in job.ranks] == [[], ["hello"], ["hello"]]


def test_siblings_survive_a_dead_rank() -> None:
    command = python("""
        import signal
        print("ready")
        signal.pause()
    """)
    with launch.start(command, ranks_per_node=3) as job:
        for rank in job.ranks:
            rank.expect("ready")
        job.ranks[0].kill(signal.SIGKILL)
        assert job.ranks[0].wait(timeout=10) == -signal.SIGKILL
        assert [rank.number for rank in job.running] == [1, 2]
        assert all(is_alive(rank.pid) for rank in job.running)


def test_the_exit_code_is_that_of_the_first_to_fail_in_time() -> None:
    command = python("""
        import os, signal, sys
        if os.environ["RANK"] == "1":
            sys.exit(7)
        signal.sigwait({signal.SIGUSR1})
        sys.exit(3)
    """)
    with launch.start(command, ranks_per_node=2) as job:
        job.ranks[1].wait(timeout=10)
        job.ranks[0].kill(signal.SIGUSR1)
        result = job.wait(timeout=10)
    assert result.returncodes[1] == 7
    assert result.exit_code == 7
    assert result.first_failure == 1


def test_lines_are_whole_and_in_order_and_the_last_needs_no_newline() -> None:
    command = python("""
        import os, sys
        for number in range(300):
            for part in range(20):
                os.write(1, f"{number}:{part};".encode())
            os.write(1, b"\\n")
        os.write(2, b"the end")
    """)
    lines: list[tuple[int, str]] = []
    with launch.start(
        command, ranks_per_node=3, output=lambda rank, line: lines.append((rank.number, line))
    ) as job:
        job.wait(timeout=20)
    expected = ["".join(f"{number}:{part};" for part in range(20)) for number in range(300)] + [
        "the end"
    ]
    for rank in job.ranks:
        assert [line for number, line in lines if number == rank.number] == expected == rank.output


def test_what_a_rank_started_dies_with_the_rank() -> None:
    command = python("""
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
    """)
    with launch.start(command) as job:
        job.wait(timeout=20)
    wait_until_gone(int(job.ranks[0].output[0]))


def test_ranks_die_with_a_launcher_that_is_killed() -> None:
    code = """
        import signal, sys
        from loosestep import launch
        job = launch.start([sys.executable, "-c", "import signal; signal.pause()"], ranks_per_node=2)
        print(*(rank.pid for rank in job.ranks), flush=True)
        signal.pause()
    """
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        launcher.kill()
    for pid in pids:
        wait_until_gone(pid)


def test_stop_asks_first() -> None:
    command = python("""
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("good bye"))
        print("ready")
        signal.pause()
    """)
    with launch.start(command) as job:
        job.ranks[0].expect("ready")
        job.stop()
    assert job.ranks[0].returncode == 1
    assert job.ranks[0].output == ["ready", "good bye"]


def test_stop_ends_deaf_and_stopped_ranks() -> None:
    command = python("""
        import os, signal
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        while True:
            signal.pause()
    """)
    with launch.start(command, ranks_per_node=2) as job:
        for rank in job.ranks:
            rank.expect("ready")
        job.ranks[1].kill(signal.SIGSTOP)
        job.stop(grace=0.2)
        assert job.ranks[0].returncode == -signal.SIGKILL
        assert job.ranks[1].returncode is not None
        assert not job.running


def test_leaving_the_block_by_an_exception_leaves_nobody() -> None:
    with (
        pytest.raises(KeyError),
        launch.start(python("import signal; signal.pause()"), ranks_per_node=2) as job,
    ):
        raise KeyError
    assert not job.running
    assert not any(is_alive(rank.pid) for rank in job.ranks)


def test_a_timeout_shows_the_last_lines_of_those_that_run() -> None:
    command = python("""
        import os, signal
        print("stuck in", os.environ["RANK"])
        if os.environ["RANK"] == "1":
            signal.pause()
    """)
    with launch.start(command, ranks_per_node=2) as job:
        job.ranks[0].wait(timeout=10)
        job.ranks[1].expect("stuck in 1")
        with pytest.raises(TimeoutError, match=r"(?s)rank 1.*stuck in 1") as caught:
            job.wait(timeout=0.01)
        assert "stuck in 0" not in str(caught.value)
        with pytest.raises(TimeoutError, match="stuck in 1"):
            job.ranks[1].wait(timeout=0.01)
        with pytest.raises(TimeoutError, match=r"(?s)exit code 0.*stuck in 0.*never said 'more'"):
            job.ranks[0].expect("more", timeout=5)


# rich exits when whoever reads our output is gone
@pytest.mark.parametrize("kind", [BrokenPipeError, SystemExit])
def test_an_output_that_raises_ends_the_job_and_reaches_whoever_waits(
    kind: type[BaseException],
) -> None:
    def fail(rank: launch.Rank, line: str) -> None:
        raise kind(line)

    command = python("import signal; print('line', flush=True); signal.pause()")
    with launch.start(command, ranks_per_node=2, output=fail) as job:
        with pytest.raises(kind, match="line"):
            job.wait(timeout=20)
        assert not job.running


def test_jobs_leave_no_thread_and_no_descriptor() -> None:
    def run() -> None:
        with launch.start(python("print('x')"), ranks_per_node=2) as job:
            job.wait(timeout=20)

    def count_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    run()
    before = count_descriptors()
    for _ in range(10):
        run()
    deadline = time.monotonic() + 5  # the store's own thread ends a moment after it is dropped
    while count_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count_descriptors() <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loosestep")]


@pytest.mark.parametrize(
    ("nodes", "ranks", "message"),
    [
        (0, 1, "at least 1"),
        (2, 0, "at least 1"),
        (2, [1, 2, 3], "3 numbers of ranks .* for 2 nodes"),
        (100, 100, "10000 ranks .* at most 256"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    nodes: int, ranks: int | list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch.start(["true"], nodes=nodes, ranks_per_node=ranks)


def test_a_command_that_cannot_run_says_so_on_every_rank() -> None:
    with launch.start(["/no/such/program"], ranks_per_node=2) as job:
        assert job.wait(timeout=20).returncodes == (1, 1)
    assert "cannot run /no/such/program: No such file" in job.ranks[1].output[0]


def test_scripts_modules_and_executables_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert launch.command_for(str(script), ["--x"]) == [sys.executable, str(script), "--x"]
    assert launch.command_for("json.tool", ["--x"], module=True) == [
        sys.executable,
        "-m",
        "json.tool",
        "--x",
    ]
    assert launch.command_for("true", ["--x"]) == ["true", "--x"]
    for missing, module in (
        (str(tmp_path / "missing.py"), False),
        ("no-such-program", False),
        ("no_such_module", True),
    ):
        with pytest.raises(FileNotFoundError, match=missing):
            launch.command_for(missing, [], module=module)
