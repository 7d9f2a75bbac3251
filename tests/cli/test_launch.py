"""`loosestep launch` as a user meets it."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loosestep.cli import app

COMMAND = [sys.executable, "-c", "from loosestep.cli import main; main()"]


def loosestep(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_output_is_prefixed_arguments_pass_untouched_and_failures_are_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(*sys.argv[1:])\nsys.exit(int(os.environ['RANK']) == 2 and 5)\n"
    )
    done = loosestep(
        "launch", "--nodes", "2", "--ranks-per-node", "2,1", str(script), "--nodes", "7", "-x"
    )
    assert sorted(done.stdout.splitlines()) == [
        "[n0 r0] --nodes 7 -x",
        "[n0 r1] --nodes 7 -x",
        "[n1 r2] --nodes 7 -x",
    ]
    assert done.returncode == 5
    assert re.search(r"1 of 3 ranks failed \(rank 2 on node 1: exit code 5\)", done.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_gently_and_leaves_nothing(number: signal.Signals) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('asked', flush=True)))\n"
        "print('pid', os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    arguments = [*COMMAND, "launch", "--ranks-per-node", "2", sys.executable, "-c", code]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        handles = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number
    assert rest.count("asked") == 2
    for handle in handles:
        assert select.select([handle], [], [], 0)[0], "a rank outlived the launcher"
        os.close(handle)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "no script missing.py"),
        (["-m", "missing_module"], "no module named missing_module"),
        (
            ["--ranks-per-node", "two", "true"],
            "must be a number (2) or one per node (3,2), got 'two'",
        ),
        (["--nodes", "2", "--ranks-per-node", "1,2,3", "true"], "3 numbers of ranks"),
        (["--nodes", "1000", "true"], "at most 256"),
    ],
)
def test_bad_input_gets_one_clear_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["launch", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_a_deadline_shows_where_the_ranks_stand() -> None:
    # A shell has said it long before the second is over, which a starting Python may not have.
    done = loosestep("launch", "--timeout", "1", "sh", "-c", "echo waiting here; exec sleep 100")
    assert done.returncode == 124
    assert re.search(r"(?s)still running after 1[0-9.]* s.*rank 0.*waiting here", done.stderr)
