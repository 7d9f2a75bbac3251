"""One rank of a replay: how far it was the same, and where it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loosestep.core.errors import CommError
from loosestep.record.player import Player, RecordingEnds, ReplayStopped
from loosestep.runfolder import checkpoint
from loosestep.training.loop import Tell, Trainer


@contextmanager
def compared(trainer: Trainer, tell: Tell) -> Iterator[None]:
    """Around the training of a rank: in a replay, say how far it was the same, and what it ended
    with.
    """
    player = trainer.run.tape
    if not isinstance(player, Player):
        yield
        return
    ending = ""
    try:
        yield
    except ReplayStopped:
        tell({"kind": "stopped", **_save(trainer, player)})
        return
    except RecordingEnds as end:
        ending = str(end)
    except CommError as error:
        if not player.exhausted:
            raise
        ending = (
            f"the recording of rank {player.rank} ends at step {player.steps}, as the run did: "
            f"{error}"
        )
    tell(
        {
            "kind": "replayed",
            "rank": player.rank,
            "steps": player.steps,
            "checked": player.checked,
            "ending": ending,
        }
    )


def _save(trainer: Trainer, player: Player) -> dict[str, Any]:
    """The state at which a replay was to stop, in a folder to look at."""
    path = trainer.folder.path / f"rank-{player.rank}-step-{player.steps}"
    loss = float(trainer.latest) if trainer.latest is not None else float("nan")
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "run": trainer.run.state_dict(),
        "loss": loss,
    }
    checkpoint.write(path, state)
    return {
        "rank": player.rank,
        "step": player.steps,
        "digest": f"{player.digest:016x}",
        "loss": loss,
        "path": str(path),
    }
