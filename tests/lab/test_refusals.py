"""Where the lab cannot be made, it says what is missing; and where it can do without, it does."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loosestep.lab import Lab, LabError, Partition, network


def test_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(LabError, match="exist on Linux only, this is darwin; use --no-network"):
        Lab(2)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can become somebody else"
)
def test_not_root() -> None:
    code = """
import os, pyroute2
from loosestep.lab import Lab, LabError
os.setuid(65534)
try:
    Lab(2)
except LabError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Operation not permitted; the lab needs root" in done.stdout
    assert "or --no-network" in done.stdout


@pytest.mark.usefixtures("needs_namespaces")
def test_a_kernel_without_a_part_of_it_is_named_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyroute2 import NetlinkError

    def unknown(*_: object) -> None:
        raise NetlinkError(errno.ENOENT)

    monkeypatch.setattr(network, "_shape", unknown)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LabError, match=r"No such file or directory.*sch_tbf for a bandwidth"):
        Lab(2, bandwidth="1mbit")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("needs_namespaces")
def test_settings_that_may_not_be_written_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refuse)
    Lab(1).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slow": {0: 0.5}}, "slow rank 0: expected a factor of at least 1, got 0.5"),
        ({"slow": {-1: 2.0}}, "no rank -1; the ranks are 0 to 1"),
        ({"links": {(0, 0): "1mbit"}}, "link 0-0: expected two different nodes"),
        ({"links": {(-1, 0): "1mbit"}}, "no node -1; the nodes are 0 to 1"),
        (
            {"faults": [Partition((frozenset({0, 1}),), 1.0, 1.0)]},
            "partition 0,1 of 2 nodes cuts nothing",
        ),
        ({"faults": [Partition((frozenset({0}), frozenset()), 1.0, 1.0)]}, "cuts nothing"),
        (
            {"faults": [Partition((frozenset({0}), frozenset({0, 1})), 1.0, 1.0)]},
            "each node may be named once",
        ),
        ({"flip": "much"}, "--flip 'much': expected a share of the packets such as 1%"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lab(2, **options)  # type: ignore[arg-type]
