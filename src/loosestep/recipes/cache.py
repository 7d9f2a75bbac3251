"""Where things that are made once are kept: synthesised speech, decoded images."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$LOOSESTEP_CACHE, or `loosestep` in the user's cache folder."""
    if given := os.environ.get("LOOSESTEP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loosestep"
