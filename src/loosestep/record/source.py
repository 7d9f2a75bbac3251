"""Which recording this process replays, if any: `LOOSESTEP_REPLAY=FOLDER` makes `attach` replay
instead of communicate.

Any program that recorded a run (`attach(..., record=True)`) replays it when it is started again
with this variable, as many ranks as before and the same data.
`LOOSESTEP_REPLAY_UNTIL=rank=2,step=731` stops it there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loosestep.record.format import RecordingError

FOLDER = "LOOSESTEP_REPLAY"
UNTIL = "LOOSESTEP_REPLAY_UNTIL"
DEFAULT_FOLDER = "recording"


class StepOfRank(NamedTuple):
    """A step of a rank, counted from 1."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"rank={self.rank},step={self.step}"


@dataclass(frozen=True)
class Replay:
    """A recording, and where to stop."""

    folder: Path
    until: StepOfRank | None = None


def current_replay() -> Replay | None:
    """What the environment says."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    until = os.environ.get(UNTIL)
    return Replay(Path(folder), parse_place(until) if until else None)


def parse_place(text: str) -> StepOfRank:
    """`rank=2,step=731`"""
    found = re.fullmatch(r"\s*rank=(\d+)\s*,\s*step=(\d+)\s*", text)
    if found is None or int(found[2]) < 1:
        raise RecordingError(f"a place in a run is rank=R,step=S with S at least 1, got {text!r}")
    return StepOfRank(int(found[1]), int(found[2]))
