"""A recorded run again: every rank from its recording, compared with what it was."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from loosestep import launch
from loosestep.core.errors import CommError
from loosestep.record.format import Recording, RecordingError, RecordKind
from loosestep.record.source import FOLDER, UNTIL, StepOfRank
from loosestep.record.values import ReplayError
from loosestep.runfolder.config import Config, TrainingError, read_config
from loosestep.runfolder.folder import RunFolder
from loosestep.sim.driver import simulate
from loosestep.topology import Topology
from loosestep.topology.launchers import Launch
from loosestep.training.rank import train_rank
from loosestep.training.watch import Print, Show, explain, listener

NEVER = 2**62
# seconds between two looks whether the replay is over, and after a failure
LOOK = 0.2
GRACE = 2.0


@dataclass
class ReplayResult:
    """How a replay compares. `stopped`: what the rank said at which it was to stop; `problem`:
    what went wrong first.
    """

    recordings: list[Recording]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    stopped: dict[str, Any] | None = None
    problem: str = ""

    def hear(self, message: dict[str, Any]) -> None:
        """A message of a rank."""
        if message["kind"] == "replayed":
            self.ranks[message["rank"]] = message
        elif message["kind"] == "stopped":
            self.stopped = message

    @property
    def steps(self) -> int:
        return sum(int(rank["steps"]) for rank in self.ranks.values())

    @property
    def checked(self) -> int:
        return sum(int(rank["checked"]) for rank in self.ranks.values())

    @property
    def endings(self) -> list[str]:
        """Of ranks that did not reach the end of the run."""
        return [str(rank["ending"]) for _, rank in sorted(self.ranks.items()) if rank["ending"]]


def read_recordings(folder: RunFolder) -> tuple[Config, list[Recording]]:
    """The configuration as it was recorded, and every rank's recording; what is missing or
    damaged is a TrainingError.
    """
    settings = folder.recording / folder.config_file.name
    if not settings.is_file():
        raise TrainingError(
            f"{folder.path} was not recorded ({settings} is missing); record a run with: "
            "loosestep train --record"
        )
    config = read_config(settings)
    try:
        found = [Recording.read(folder.recording, rank) for rank in range(sum(config.counts()))]
    except RecordingError as error:
        raise TrainingError(str(error)) from None
    return config, found


def replay_run(
    folder: RunFolder,
    *,
    until: StepOfRank | None,
    show: Show,
    print_line: Print,
    timeout: float = 1e9,
) -> ReplayResult:
    """Train again as real processes, from the recording, in a folder of its own."""
    config, recordings = read_recordings(folder)
    require_place(until, recordings)
    scratch = scratch_folder(folder, config)
    comparison = ReplayResult(recordings)
    errors: dict[int, str] = {}

    def take(message: dict[str, Any]) -> None:
        comparison.hear(message)
        show(message)

    env = {
        FOLDER: str(folder.recording.resolve()),
        "OMP_NUM_THREADS": str(recordings[0].header["threads"]),
    }
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a store that is waited for long says so, again and again
    if until is not None:
        env[UNTIL] = str(until)
    command = [sys.executable, "-m", "loosestep.training.rank", str(scratch.path)]
    hear = listener(take, print_line, errors)
    with launch.start(
        command, nodes=config.nodes, ranks_per_node=config.counts(), env=env, output=hear
    ) as job:
        while (
            not job.ended(LOOK)
            and comparison.stopped is None
            and not any(rank.returncode for rank in job.ranks)
        ):
            pass
        # after a failure the others say what they know
        job.ended(GRACE if comparison.stopped is None else 0.0)
        failed = [rank for rank in job.ranks if rank.returncode]
        if failed and comparison.stopped is None:
            culprits = [rank for rank in failed if rank.number in errors] or failed
            comparison.problem = explain(culprits[0], errors)
        job.stop(grace=0)
    return comparison


def replay_in_process(folder: RunFolder, *, until: StepOfRank | None, show: Show) -> ReplayResult:
    """Train again on virtual ranks in this process: slower than processes, and to be looked into
    with a debugger.
    """
    config, recordings = read_recordings(folder)
    require_place(until, recordings)
    scratch = scratch_folder(folder, config)
    comparison = ReplayResult(recordings)
    topology = Topology(recordings[0].header["nodes"])

    def hear(message: dict[str, Any]) -> None:
        comparison.hear(message)
        show(message)

    def train(rank: int) -> None:
        node = topology.node_of(rank)
        place = Launch("simulate", rank, topology.world, topology.local_index(rank), f"node {node}")
        train_rank(scratch, scratch.config(), hear, launch=place)

    with _surroundings(folder, until, threads=int(recordings[0].header["threads"])):
        try:
            simulate(train, ranks=topology.world, topology=topology)
        except (ReplayError, CommError) as error:
            if comparison.stopped is None:
                comparison.problem = str(error)
    return comparison


@contextmanager
def _surroundings(folder: RunFolder, until: StepOfRank | None, *, threads: int) -> Iterator[None]:
    """This process replays, with as many threads as it was recorded with."""
    before = torch.get_num_threads()
    os.environ[FOLDER] = str(folder.recording.resolve())
    os.environ[UNTIL] = "" if until is None else str(until)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        del os.environ[FOLDER], os.environ[UNTIL]


def scratch_folder(folder: RunFolder, config: Config) -> RunFolder:
    """Where the replay writes what a run writes; that of an earlier replay goes."""
    shutil.rmtree(folder.replay, ignore_errors=True)
    folder.replay.mkdir()
    scratch = RunFolder(folder.replay)
    config.but(record=False, bandwidth=None, checkpoint_every=NEVER, generation=0).write(
        scratch.config_file
    )
    return scratch


def require_place(until: StepOfRank | None, recordings: list[Recording]) -> None:
    """The step to stop at must have been made."""
    if until is None:
        return
    if until.rank >= len(recordings):
        raise TrainingError(f"--until {until}: there are ranks 0 to {len(recordings) - 1}")
    made = sum(
        r.kind in (RecordKind.STEPPED, RecordKind.CHECKED) for r in recordings[until.rank].records()
    )
    if until.step > made:
        raise TrainingError(f"--until {until}: rank {until.rank} made {made} steps")
