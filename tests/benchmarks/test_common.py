"""The benchmarks' own tools: sections of the results file, spreads, tables."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "benchmarks" / "common.py"
spec = importlib.util.spec_from_file_location("benchmarks_common", FILE)
assert spec is not None
assert spec.loader is not None
common = importlib.util.module_from_spec(spec)
sys.modules["benchmarks_common"] = common
spec.loader.exec_module(common)


def test_a_section_written_twice_appears_once(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    common.write_section("speed", "old", path=results)
    common.write_section("speed", "new", path=results)
    assert results.read_text().count("<!-- begin speed -->") == 1
    assert "new" in results.read_text()
    assert "old" not in results.read_text()


def test_rewriting_one_section_leaves_the_others_and_what_lies_between(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    for name in ("first", "second", "third"):
        common.write_section(name, f"figures of {name}", path=results)
    results.write_text(
        results.read_text().replace("<!-- begin third -->", "by hand\n\n<!-- begin third -->")
    )
    before = results.read_text()
    common.write_section("second", "other figures", path=results)
    assert results.read_text() == before.replace("figures of second", "other figures")


def test_a_section_without_its_end_is_refused(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("<!-- begin speed -->\nfigures\n")
    with pytest.raises(ValueError, match="without '<!-- end speed -->'"):
        common.write_section("speed", "new", path=results)
    assert results.read_text() == "<!-- begin speed -->\nfigures\n"


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_the_middle_of_a_spread_lies_within_it(values: list[float]) -> None:
    spread = common.Spread(tuple(values))
    assert min(values) <= spread.median <= max(values)


def test_ratios_are_taken_round_by_round() -> None:
    assert common.ratios([2.0, 30.0], [1.0, 10.0]).values == (2.0, 3.0)


def test_a_spread_shows_least_and_most() -> None:
    assert common.Spread((3.0, 1.0, 2.5)).text(".1f") == "2.5 (1.0-3.0)"


def test_one_measurement_has_no_spread() -> None:
    assert common.Spread((3.0,)).text(".1f") == "3.0"


@given(st.permutations([3.0, 1.0, 2.5, math.nan]))
def test_a_measurement_that_failed_is_counted_but_not_averaged(values: list[float]) -> None:
    spread = common.Spread(tuple(values))
    assert (spread.median, spread.mean) == (2.5, pytest.approx(6.5 / 3))
    assert spread.text(".1f") == "2.5 (1.0-3.0), 1 of 4 failed"


def test_what_always_failed_says_so() -> None:
    assert common.Spread((math.nan, math.nan)).text() == "failed"
    assert math.isnan(common.Spread((math.nan,)).median)
    assert common.with_share([math.nan, math.nan], [2.0, 2.0], ".1f") == "failed"
    assert common.with_share([1.0, math.nan], [2.0, 2.0], ".1f") == "1.0, 1 of 2 failed, 50%"


def test_every_line_of_a_table_is_as_wide_as_the_others() -> None:
    lines = common.table(["", "speed"], [["daso", "12.5"], ["a longer name", "3"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("-:|")
