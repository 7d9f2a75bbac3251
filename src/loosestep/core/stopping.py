"""The wish that all ranks of a run end their loops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stop:
    """Shared by a rank's run and by whatever carries its news to other ranks: these send the wish
    on, and note it here when others have it.
    """

    asked: bool = False
