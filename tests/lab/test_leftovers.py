"""What `clean` takes for a leftover, and what it must not."""

import os
import subprocess
from pathlib import Path

import pytest

from loosestep.lab import leftovers
from loosestep.lab.leftovers import MARK

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists(), reason="leftovers are found in /proc"
)
NAMESPACE = Path("/proc/self/ns/pid").stat().st_ino if Path("/proc/self/ns/pid").exists() else 0


@pytest.mark.parametrize(
    ("mark", "left"),
    [
        (leftovers.new_mark(), False),
        (f"{2**30}.1.{NAMESPACE}", True),
        (f"{2**30}.1.{NAMESPACE + 1}", False),
        (f"{2**30}.1", False),
        ("mine", False),
    ],
    ids=[
        "of a lab that lives",
        "of a lab that is gone",
        "of a lab in a container",
        "of another version",
        "of a user",
    ],
)
def test_only_processes_of_a_lab_that_is_gone_from_here_are_leftovers(
    mark: str, left: bool
) -> None:
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark}) as process:
        try:
            assert (process.pid in [found.pid for found in leftovers.find()]) == left
        finally:
            process.kill()
