"""Checkpoints of a run: the last few stored states of each writer, newest intact one first."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loosestep.storage import TEMPORARY, CheckpointError, read, write

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "load_latest",
    "load_latest_common",
    "read",
    "restore_model",
    "write",
]

_NAME = re.compile(r"step-(\d+)-(\d+)$")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Checkpoint:
    """Where a checkpoint lies: the step it was taken at, how often that step was written before,
    its folder.
    """

    step: int
    serial: int
    path: Path = field(compare=False)

    def read(self) -> dict[str, Any]:
        return read(self.path)


class Checkpoints:
    """The last `keep` checkpoints of one writer, in one folder (several ranks: a folder for
    each).
    """

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state of `step`, then forget the oldest ones beyond `keep`."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        self._remove_unfinished()
        there = [checkpoint.serial for checkpoint in self.list() if checkpoint.step == step]
        path = write(self.folder / f"step-{step:010d}-{max(there, default=-1) + 1}", state)
        for old in self.list()[: -self.keep]:
            # resumed from an earlier step: the newest written is not the last by number
            if old.path != path:
                shutil.rmtree(old.path, ignore_errors=True)
        return path

    def list(self) -> list[Checkpoint]:
        """All checkpoints, oldest first; whether they are intact shows when they are read."""
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(Checkpoint(int(m[1]), int(m[2]), path) for m, path in matches if m)

    def discard_after(self, step: int) -> None:
        """Remove what is newer than `step`: a resumed run takes another way from there on."""
        for checkpoint in self.list():
            if checkpoint.step > step:
                shutil.rmtree(checkpoint.path)

    def intact(
        self, warn: Callable[[str], None] = _log.warning
    ) -> Iterator[tuple[Checkpoint, dict[str, Any]]]:
        """The readable checkpoints with their states, newest first; `warn` hears about each one
        that is passed over.
        """
        for checkpoint in reversed(self.list()):
            try:
                state = checkpoint.read()
            except CheckpointError as problem:
                warn(f"checkpoint of step {checkpoint.step} is passed over: {problem}")
            else:
                yield checkpoint, state

    def _remove_unfinished(self) -> None:
        if self.folder.is_dir():
            for path in self.folder.glob(f"{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)


def load_latest(
    folder: Path | str, warn: Callable[[str], None] = _log.warning
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest intact checkpoint of `folder` and its state, or None."""
    return next(Checkpoints(folder).intact(warn), None)


def load_latest_common(
    folders: Sequence[Path | str], warn: Callable[[str], None] = _log.warning
) -> tuple[int, list[dict[str, Any]]] | None:
    """The newest step of which every folder holds an intact checkpoint, and the states in the
    order of the folders.
    """
    if not folders:
        raise ValueError("folders must name at least one checkpoint folder")
    steps = [{checkpoint.step for checkpoint in Checkpoints(folder).list()} for folder in folders]
    for step in sorted(set.intersection(*steps), reverse=True):
        states = [_newest_of_step(Checkpoints(folder), step, warn) for folder in folders]
        whole = [state for state in states if state is not None]
        if len(whole) == len(folders):
            return step, whole
    return None


def restore_model(
    model: torch.nn.Module, tensors: Mapping[str, Any], *, source: Path | str
) -> None:
    """`model.load_state_dict`, but a checkpoint of another model is refused before anything is
    touched.
    """
    own = model.state_dict()
    missing = sorted(own.keys() - tensors.keys())
    foreign = sorted(tensors.keys() - own.keys())
    shapes = [
        f"{name} is {tuple(tensors[name].shape)} there and {tuple(own[name].shape)} here"
        for name in own
        if name in tensors and own[name].shape != tensors[name].shape
    ]
    found = []
    if missing:
        found.append(f"{len(missing)} tensors of the model are not in it ({missing[0]}, ...)")
    if foreign:
        found.append(f"{len(foreign)} of its tensors are not in the model ({foreign[0]}, ...)")
    found += shapes[:1]
    if found:
        raise CheckpointError(
            f"{source} is a checkpoint of another model: {'; '.join(found)}. "
            "Use the options of the run that wrote it, or start a new run"
        )
    model.load_state_dict(dict(tensors))


def _newest_of_step(
    checkpoints: Checkpoints, step: int, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    for checkpoint in reversed([c for c in checkpoints.list() if c.step == step]):
        try:
            return checkpoint.read()
        except CheckpointError as problem:
            warn(f"checkpoint of step {step} is passed over: {problem}")
    return None
