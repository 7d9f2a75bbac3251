from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loosestep.recipes import RecipeError
from loosestep.recipes.cache import cache_folder, cached


def test_a_thing_is_made_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"times": len(made)}

    assert [cached(tmp_path / "thing", make) for _ in range(3)] == [{"times": 1}] * 3


def test_a_damaged_thing_is_made_again(tmp_path: Path) -> None:
    cached(tmp_path / "thing", lambda: {"value": 1})
    (tmp_path / "thing" / "state.json").write_text('{"value": 3}')
    assert cached(tmp_path / "thing", lambda: {"value": 2}) == {"value": 2}


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        RecipeError, match=r"the cache cannot be written.*LOOSESTEP_CACHE names another folder"
    ):
        cached(tmp_path / "file" / "thing", dict)


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOOSESTEP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LOOSESTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "loosestep"
