"""Training with the pool's processes: what a rank does, and a crash on demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pool

from loosestep.runfolder import checkpoint
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder
from loosestep.training.loop import Trainer
from loosestep.training.rank import train_rank

TINY = f"{Path(__file__).with_name('tiny.py')}:recipe"


class Crash(Exception):
    """As good as a kill: nothing is saved, nothing is said."""


def tiny(strategy: str, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "gradients": 96,
        "checkpoint_every": 16,
        "evaluate_every": 24,
        **changes,
    }
    return Config(recipe=TINY, strategy=strategy, nodes=2, **settings)


def work(rank: int, *, path: str, crash_at: int = 0) -> list[dict[str, Any]]:
    """Train as this rank of the pool, two nodes; what it told. `crash_at`: a number of steps
    after which it ends.
    """
    folder = RunFolder(Path(path))
    config = folder.config()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(sum(config.counts())), GROUP_RANK=str(rank), LOCAL_RANK="0"
    )
    told: list[dict[str, Any]] = []
    advance = Trainer._advance

    def advance_until(self: Trainer) -> None:
        if self.step == crash_at:
            raise Crash
        advance(self)

    try:
        Trainer._advance = advance_until if crash_at else advance  # type: ignore[method-assign]
        train_rank(folder, config, told.append)
    except Crash:
        told.append({"kind": "crash"})
    finally:
        Trainer._advance = advance  # type: ignore[method-assign]
    return told


def train(path: Path, config: Config, *, crash_at: int = 0) -> RunFolder:
    """All ranks, to the end or to the crash."""
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    if not folder.config_file.exists():
        config.write(folder.config_file)
    world = sum(folder.config().counts())
    pool.ranks(world, work, path=str(path), crash_at=crash_at)
    return folder


def final_model(folder: RunFolder) -> dict[str, Any]:
    return checkpoint.read(folder.final_model)["model"]  # type: ignore[no-any-return]
