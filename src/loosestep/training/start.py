"""Where a run begins: untrained, at the checkpoints of its ranks, or, with other ranks than before,
at their mean.

The same ranks as before go on exactly where they were: for collective strategies at the newest step
of which every rank has an intact checkpoint; under gossip, where ranks are never at the same step,
each at its own newest one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loosestep.runfolder import checkpoint
from loosestep.runfolder.checkpoint import CheckpointError, Checkpoints
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder

Warn = Callable[[str], None]
START = "start"


@dataclass(frozen=True)
class Start:
    """`gradients` were made before. `exact`: `state` is this rank's own; else only its model,
    optimizer and schedule.
    """

    gradients: int
    state: dict[str, Any]
    exact: bool
    source: str


def find_start(folder: RunFolder, config: Config, rank: int, warn: Warn) -> Start | None:
    """Where this rank begins; None for an untrained model. All ranks come to the same
    conclusion.
    """
    states = _states(folder, config, warn)
    known = [state for state in states if state is not None]
    if known:
        gradients = max(int(state["gradients"]) for state in known)
        own = states[rank]
        source = str(folder.generation(config.generation))
        return Start(gradients, own if own is not None else known[0], own is not None, source)
    first = folder.generation(config.generation) / START
    if first.is_dir():
        state = checkpoint.read(first)
        return Start(int(state["gradients"]), state, False, str(first))
    return None


def rearrange(
    folder: RunFolder, config: Config, *, nodes: int, ranks_per_node: str, warn: Warn
) -> tuple[Config, str]:
    """Let a run go on with other ranks: a common start for them is written, then the
    configuration. What was done, in words.
    """
    changed = config.but(nodes=nodes, ranks_per_node=ranks_per_node)
    before = _shape(config)
    after = _shape(changed)
    if changed.counts() == config.counts():
        return config, ""
    states = [state for state in _states(folder, config, warn) if state is not None]
    ranks_told = 1  # by each state
    first = folder.generation(config.generation) / START
    if not states and first.is_dir():
        states = [checkpoint.read(first)]
        ranks_told = sum(config.counts())
    if not states:
        changed.write(folder.config_file)
        return changed, f"no checkpoint yet: starting anew with {after} instead of {before}"
    changed = changed.but(generation=config.generation + 1)
    shutil.rmtree(folder.generation(changed.generation), ignore_errors=True)
    one = config.chosen_strategy().fitted(config.counts()).learner == "world" or len(states) == 1
    parts = ("model", "optimizer", "schedule", "gradients", "seconds")
    state = {
        name: (states[0] if one else {name: mean_tree([s[name] for s in states])})[name]
        for name in parts
    }
    state["gradients"] = max(int(s["gradients"]) for s in states)
    # what all ranks counted so far, divided among the new ones
    share = ranks_told / sum(changed.counts())
    state["stats"] = {
        name: share * sum(s["stats"][name] for s in states) for name in states[0]["stats"]
    }
    checkpoint.write(folder.generation(changed.generation) / START, state)
    folder.merge_traces()
    changed.write(folder.config_file)
    shutil.rmtree(folder.generation(config.generation), ignore_errors=True)
    what = (
        "the model all ranks shared"
        if one
        else f"the mean of the {len(states)} ranks' models and optimizer states"
    )
    return changed, (
        f"{after} instead of {before}: all start from {what} at gradient {state['gradients']}; "
        "the data go on where they were, the strategy starts anew"
    )


def mean_tree(trees: Sequence[Any]) -> Any:
    """The mean of floating tensors in equal places; of everything else the first."""
    first = trees[0]
    if isinstance(first, torch.Tensor):
        same = all(isinstance(tree, torch.Tensor) and tree.shape == first.shape for tree in trees)
        return (
            torch.stack([tree.double() for tree in trees]).mean(0).to(first.dtype)
            if same and first.is_floating_point()
            else first
        )
    if isinstance(first, dict):
        return {key: mean_tree([tree[key] for tree in trees if key in tree]) for key in first}
    return first


def _states(folder: RunFolder, config: Config, warn: Warn) -> list[dict[str, Any] | None]:
    folders = [folder.checkpoints_of(config, rank) for rank in range(sum(config.counts()))]
    gone = [path for path in folders if not path.is_dir()]
    if gone and any(Checkpoints(path).list() for path in folders):
        raise TrainingError(
            f"{', '.join(map(str, gone))} is missing, and other ranks of this run have "
            "checkpoints, which training from the beginning would overwrite. Bring it back, or "
            "train anew under another --name"
        )
    if config.chosen_strategy().gossip is not None:
        found = (next(Checkpoints(path).intact(warn), None) for path in folders)
        return [None if pair is None else pair[1] for pair in found]
    common = checkpoint.load_latest_common(folders, warn)
    if common is None:
        if all(Checkpoints(path).list() for path in folders):
            raise TrainingError(
                f"{folders[0].parent}: no step has an intact checkpoint of every rank; nothing to "
                "resume from"
            )
        return [None] * len(folders)
    return list(common[1])


def _shape(config: Config) -> str:
    counts = config.counts()
    nodes = f"{len(counts)} node{'s' * (len(counts) > 1)}"
    return f"{nodes} of {config.ranks_per_node if len(set(counts)) > 1 else counts[0]} rank(s)"


__all__ = ["CheckpointError", "Start", "find_start", "mean_tree", "rearrange"]
