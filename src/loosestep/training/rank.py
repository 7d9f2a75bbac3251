"""One rank of a run: `python -m loosestep.training.rank FOLDER`, started once per rank by
whatever launcher.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from loosestep.attachment import attach
from loosestep.core.errors import CommError
from loosestep.recipes import RecipeError, find_recipe
from loosestep.record.format import RecordingError, rank_file
from loosestep.record.values import ReplayError
from loosestep.run import Run
from loosestep.runfolder.checkpoint import CheckpointError, restore_model
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import Journal, RunFolder
from loosestep.topology.launchers import Launch, detect_launch
from loosestep.training.comparison import compared
from loosestep.training.loop import Diverged, Tell, Trainer, describe_run
from loosestep.training.start import Start, find_start
from loosestep.training.watch import DIVERGED, MARK

FAILED = 1
INTERRUPTED = 130
MISTAKES = (TrainingError, RecipeError, CheckpointError, CommError, ReplayError, RecordingError)


def train_rank(folder: RunFolder, config: Config, tell: Tell, launch: Launch | None = None) -> None:
    """Train as the rank that the launcher's variables say, from wherever this run was left."""
    launch = launch or detect_launch()
    with folder.written_by(launch.rank):
        _train(folder, config, tell, launch)


def _train(folder: RunFolder, config: Config, tell: Tell, launch: Launch) -> None:
    task = find_recipe(config.recipe).build(
        config.options,
        data=config.data_folder,
        seed=config.seed,
        device=own_device(config.device, launch.local_rank),
    )
    start = find_start(
        folder, config, launch.rank, lambda text: tell({"kind": "warning", "text": text})
    )
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    # attach makes all replicas equal to rank 0's; the trainer then makes them what they were
    if start is not None:
        restore_model(model, start.state["model"], source=start.source)
        optimizer.load_state_dict(start.state["optimizer"])
    if launch.rank == 0:  # before attach: nobody writes before everybody is there
        folder.forget_metrics_after(-1 if start is None else start.gradients)
    record = folder.recording if config.record and start is None else None
    if record is not None:  # a run that starts anew has no use for what was recorded before
        rank_file(record, launch.rank).unlink(missing_ok=True)
    elif config.record and launch.rank == 0:
        tell(
            {
                "kind": "warning",
                "text": "from here on the run is not recorded: only its part before it was resumed is",
            }
        )
    run = attach_to(config, model, optimizer, record=record)
    # from here on a rank without a folder has lost it: all have looked for a start by now
    folder.checkpoints_of(config, launch.rank).mkdir(parents=True, exist_ok=True)
    if record is not None and launch.rank == 0:
        config.write(record / folder.config_file.name)
    with Journal(folder, launch.rank, trace_bytes=_trace_bytes(start)) as journal, run:
        run.trace.sink = journal.event
        trainer = Trainer(config, task, run, folder=folder, journal=journal, start=start, tell=tell)
        if launch.rank == 0:
            described = describe_run(config, task, run.topology)
            journal.metric("begin", **{"gradients": trainer.gradients, **described})
            tell({"kind": "begin", "gradients": trainer.gradients, **described})
        with compared(trainer, tell):
            trainer.train()
            trainer.finish()


def attach_to(
    config: Config,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    record: Path | None = None,
) -> Run:
    """Attach; what cannot be attached is a mistake to be told in one line."""
    try:
        return attach(
            model, optimizer, config.strategy, deadline=config.deadline, record=record or False
        )
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise TrainingError(str(error)) from error


def own_device(name: str, local_rank: int) -> str:
    """`cuda` means a GPU for every rank of a node, shared when there are more ranks than GPUs."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise TrainingError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if name == "cpu":
        return name
    count = torch.cuda.device_count()
    index = name.partition(":")[2]
    if count <= int(index or 0):
        raise TrainingError(
            f"--device {name}: this machine has {count} CUDA devices; use --device cpu"
        )
    return name if index else f"cuda:{local_rank % count}"


def _trace_bytes(start: Start | None) -> int:
    return int(start.state["trace_bytes"]) if start is not None and start.exact else 0


def guarded(folder: RunFolder, config: Config, tell: Tell) -> int:
    """`train_rank`, with the mistakes of the user and lost peers told in one line; the exit
    code.
    """
    try:
        train_rank(folder, config, tell)
    except KeyboardInterrupt:
        return INTERRUPTED
    except MISTAKES as error:
        tell({"kind": "error", "text": str(error)})
        return DIVERGED if isinstance(error, Diverged) else FAILED
    return 0


def main() -> None:
    """Messages go to the launching process as marked lines."""

    def tell(message: dict[str, Any]) -> None:
        sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
        sys.stdout.flush()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    folder = RunFolder(Path(sys.argv[1]))
    sys.exit(guarded(folder, folder.config(), tell))


if __name__ == "__main__":
    main()
