"""The configuration: TOML and back, and errors that say what to do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.runfolder.config import (
    Config,
    TrainingError,
    make_config,
    parse_settings,
    read_config,
    read_toml,
    to_toml,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.one_of(
    TEXT,
    st.integers(-(2**60), 2**60),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
)
NESTED = st.recursive(
    PLAIN | st.dates() | st.times() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    options=st.dictionaries(TEXT, NESTED, max_size=4),
    lr=st.none() | st.floats(1e-9, 1e3),
    command=TEXT,
)
def test_a_config_survives_toml(options: dict[str, Any], lr: float | None, command: str) -> None:
    config = Config(recipe="vision", lr=lr, command=command, options=options, gradients=7)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(vars(config)), encoding="utf-8")
        assert make_config(read_toml(file), source="test") == config


def test_writing_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    Config(recipe="vision", data="a b").write(path)
    Config(recipe="acoustic").write(path)
    assert read_config(path) == Config(recipe="acoustic")
    assert [child.name for child in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "vision", "gradient": 5}, "unknown setting gradient, did you mean gradients?"),
        ({"recipe": "vision", "gradients": "many"}, "gradients must be a whole number, got 'many'"),
        ({"recipe": "vision", "gradients": True}, "gradients must be a whole number, got True"),
        ({"recipe": "vision", "lr": "fast"}, "lr must be a number"),
        ({"recipe": "vision", "options": 3}, "options must be a table"),
        ({}, "recipe is missing"),
        ({"recipe": "vision", "gradients": 0}, "--gradients must be at least 1, got 0"),
        ({"recipe": "vision", "gradients": 5, "epochs": 1}, "--gradients or --epochs, not both"),
        ({"recipe": "vision", "lr": -1}, "--lr must be a positive number"),
        (
            {"recipe": "vision", "strategy": "dasso"},
            "unknown strategy 'dasso' (did you mean 'daso'?)",
        ),
        ({"recipe": "vision", "strategy": "daso:period=0"}, "period must be"),
        ({"recipe": "vision", "nodes": 2, "ranks_per_node": "1,2,3"}, "3 numbers of ranks"),
        ({"recipe": "vision", "ranks_per_node": "two"}, "--ranks-per-node must be a number"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        make_config(values, source="my.toml")
    assert message in str(error.value)


def test_a_file_that_is_no_toml_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("recipe = ")
    for name in ("bad.toml", "missing.toml"):
        with pytest.raises(TrainingError, match=name):
            read_toml(tmp_path / name)


def test_settings_are_pairs() -> None:
    assert parse_settings(["a=1", "b = x=y"]) == {"a": "1", "b": "x=y"}
    with pytest.raises(TrainingError, match="key=value, got 'a'"):
        parse_settings(["a"])
