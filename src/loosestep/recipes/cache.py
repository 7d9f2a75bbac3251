"""Things that are made once and kept: synthesised speech, decoded images."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loosestep import storage

from .errors import RecipeError


def cache_folder() -> Path:
    """$LOOSESTEP_CACHE, or `loosestep` in the user's cache folder."""
    if given := os.environ.get("LOOSESTEP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loosestep"


def cached(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is kept at `path`, or else what `make` gives, kept from now on. Something damaged is
    made again.

    It is read back even when it was just made: of several processes that made it at once, all get
    the first one's.
    """
    if path.is_dir():
        try:
            return storage.read(path)
        except storage.CheckpointError:
            shutil.rmtree(path)
    made = make()
    try:
        storage.write(path, made)
    except storage.CheckpointError as problem:
        raise RecipeError(
            f"the cache cannot be written: {problem}; LOOSESTEP_CACHE names another folder"
        ) from problem
    return storage.read(path)
