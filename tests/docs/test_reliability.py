"""The page on reliability names tests that exist, and what it says of clocks is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_test_of_a_row_exists(row):
    named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", row.split("|")[4])
    assert named, "a promise needs a test"
    file = ""
    for path, test in named:
        file = path or file
        assert (ROOT / file).is_file(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_the_rows_are_numbered_once_and_in_order():
    numbers = [int(row.split("|")[1]) for row in ROWS]
    assert numbers == sorted(set(numbers))


def test_communication_reads_no_clock_that_jumps():
    for path in (ROOT / "src" / "loosestep" / "core").rglob("*.py"):
        assert not re.search(r"time\.time\(|time_ns\(|datetime\.now", path.read_text()), path
