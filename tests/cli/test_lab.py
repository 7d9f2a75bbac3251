"""`loosestep lab` as a user meets it."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loosestep.cli import app
from loosestep.lab import Lab, LabError, leftovers

COMMAND = [sys.executable, "-c", "from loosestep.cli import main; main()", "lab"]


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    try:
        Lab(1).close()
    except LabError as error:
        pytest.skip(str(error))


def test_a_run_ends_with_the_tables_of_links_and_ranks() -> None:
    code = "import os; print('node', os.environ['GROUP_RANK'], os.environ['GLOO_SOCKET_IFNAME'])"
    options = [
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--bandwidth",
        "100mbit",
        "--link",
        "0-1=50mbit",
    ]
    faults = [
        "--slow",
        "1:2x",
        "--kill",
        "3@50s",
        "--stop",
        "2@50s:1s",
        "--partition",
        "0/1@50s:1s",
    ]
    arguments = [
        *COMMAND,
        *options,
        *faults,
        "--delay",
        "1ms",
        "--loss",
        "0.1%",
        "--",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert sorted(done.stdout.splitlines()) == [
        f"[n{rank // 2} r{rank}] node {rank // 2} eth0" for rank in range(4)
    ]
    assert done.returncode == 0, done.stderr
    for text in (
        "rate Mbit/s",
        "sent MB",
        "use sending",
        "CPU s",
        "n0 r1 (2x slower)",
        "0 to 1",
        "4 of 4 ranks ended well",
    ):
        assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "500"], "expected a rate such as 500mbit"),
        (["--kill", "3"], "expected RANK@TIME, for example 3@20s"),
        (["--stop", "3@5s"], "expected RANK@TIME:DURATION, for example 2@10s:5s"),
        (["--partition", "0:1"], "expected NODES/NODES@TIME:DURATION, for example 0,1/2,3@15s:10s"),
        (["--slow", "1"], "expected RANK:FACTORx"),
        (["--slow", "0:2x", "--slow", "0:5x"], "this rank has two factors, 2x and 5x"),
        (
            ["--link", "0-1=1gbit", "--bandwidth", "10mbit"],
            "1000 Mbit/s is more than the 10 Mbit/s of each node's cable",
        ),
        (["--bandwidth", "[/bold]"], "--bandwidth '[/bold]': expected a rate"),
        (["--link", "1=5"], "expected NODE-NODE=RATE"),
        (["--loss", "half"], "expected a share"),
        (["--flip", "half"], "--flip 'half': expected a share of the packets such as 1%"),
        (["--delay", "20"], "--delay '20': expected a duration such as 20ms"),
        (["--partition", "0,1@5s:5s"], "cuts nothing: expected two groups of nodes or more"),
        (["--kill", "9@1s"], "there is no rank 9"),
        (["--nodes", "101"], "1 to 100 nodes"),
    ],
)
def test_bad_options_get_one_line_with_the_grammar(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["lab", *arguments, "--", "true"])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_a_missing_script_gets_one_line_and_no_network_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loosestep.cli.lab.Lab", None)
    result = CliRunner().invoke(app, ["lab", "--", "missing.py"])
    assert (result.exit_code, result.output.splitlines()) == (
        2,
        ["loosestep: no script missing.py"],
    )


def test_without_a_network_ranks_and_faults_are_the_same() -> None:
    arguments = [
        "--no-network",
        "--nodes",
        "2",
        "--kill",
        "1@0s",
        "--",
        "sh",
        "-c",
        "test $RANK = 0 || sleep 60",
    ]
    result = CliRunner().invoke(app, ["lab", *arguments])
    assert result.exit_code == 128 + signal.SIGKILL
    assert "rate Mbit/s" not in result.output
    for text in ("0 s: rank 1 killed", "CPU s", "1 of 2 ranks failed (rank 1 on node 1: SIGKILL)"):
        assert text in result.output


def test_a_link_may_be_fast() -> None:
    result = CliRunner().invoke(app, ["lab", "--link", "0-1=1gbit", "--", "true"])
    assert result.exit_code == 0, result.output
    assert "1000" in result.output


@pytest.mark.parametrize(("seconds", "missing"), [("0.5", None), ("60", "rank 1 is not there")])
def test_whoever_is_late_is_shown_and_the_tables_come_all_the_same(
    seconds: str, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_start(self: Lab, timeout: float) -> None:
        if missing is not None:
            raise TimeoutError(f"{missing} after {timeout:g} s")

    monkeypatch.setattr(Lab, "wait_for_start", wait_for_start)
    options = ["--no-network", "--timeout", seconds, "--start-timeout", "7"]
    result = CliRunner().invoke(
        app, ["lab", *options, "--", "sh", "-c", "echo begun; exec sleep 60"]
    )
    assert result.exit_code == 124
    assert ("still running after" if missing is None else f"{missing} after 7 s") in result.output
    assert "CPU s" in result.output
    assert "2 of 2 ranks failed" in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_nothing(number: signal.Signals) -> None:
    code = "import os, signal; print('rank', os.getpid(), flush=True); signal.pause()"
    arguments = [
        *COMMAND,
        "--bandwidth",
        "10mbit",
        "--delay",
        "1ms",
        "--",
        sys.executable,
        "-c",
        code,
    ]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        told = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number, told
    assert f"{number.name}, ending the ranks" in told
    mark = f"LOOSESTEP_LAB={process.pid}.".encode()
    left = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            left += [environment.parent.name] if mark in environment.read_bytes() else []
    assert all("rank" in line for line in lines)
    assert not left


def test_after_kill_9_of_the_lab_clean_removes_what_is_left() -> None:
    """A rank dies with its lab; a process it sent off into a session of its own does not, and
    keeps the network alive.
    """
    child = "import os, signal; print('stray', os.getpid(), flush=True); signal.pause()"
    code = (
        "import subprocess, sys, os, signal\n"
        "print('rank', os.getpid(), flush=True)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "signal.pause()\n"
    )
    arguments = [
        *COMMAND,
        "--nodes",
        "1",
        "--bandwidth",
        "10mbit",
        "--delay",
        "1ms",
        "--",
        sys.executable,
        "-c",
        code,
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = {}
        while len(pids) < 2:
            match = re.search(r"(rank|stray) (\d+)", process.stdout.readline())
            assert match is not None
            pids[match[1]] = int(match[2])
        handles = {name: os.pidfd_open(pid) for name, pid in pids.items()}
        assert not [left for left in leftovers.find() if left.owner == process.pid]
        process.send_signal(signal.SIGKILL)
    assert select.select([handles["rank"]], [], [], 10)[0], "the rank outlived its lab"
    deadline = time.monotonic() + 10  # the wire notices by itself that its lab is gone
    while (left := [left.pid for left in leftovers.find() if left.owner == process.pid]) != [
        pids["stray"]
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    result = CliRunner().invoke(app, ["lab", "clean"])
    assert result.exit_code == 0
    assert f"ended process {pids['stray']} of lab {process.pid}" in result.output.replace("\n", " ")
    assert select.select([handles["stray"]], [], [], 10)[0], "clean left a process"
    for handle in handles.values():
        os.close(handle)
