"""The process that watches a run: it starts the ranks, hears what they say, and knows how it
ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loosestep import launch
from loosestep.lab import Lab, LabError
from loosestep.launch import Job, Output, Rank, describe
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder

# begins a line of a rank that is for the process that watches, not for the user
MARK = "@loosestep "
DIVERGED = 3  # the exit code of a rank whose loss is no number any more
Show = Callable[[dict[str, Any]], None]
Print = Callable[[Rank, str], None]


@dataclass
class RunResult:
    """How a run ended. `complete`: the final model was judged; `problem`: what went wrong first,
    in one line.
    """

    complete: bool = False
    diverged: bool = False
    problem: str = ""


def watch(
    folder: RunFolder, *, show: Show, print_line: Print, timeout: float | None = None
) -> RunResult:
    """Run all ranks to their end. `show` gets every message of a rank, `print_line` whatever
    else it writes.
    """
    config = folder.config()
    ending = RunResult()
    errors: dict[int, str] = {}

    def take(message: dict[str, Any]) -> None:
        ending.complete |= message["kind"] == "final"
        show(message)

    command = [sys.executable, "-m", "loosestep.training.rank", str(folder.path)]
    with _start(config, command, listener(take, print_line, errors)) as job:
        result = job.wait(timeout)
        first = result.first_failure
        if first is not None:
            ending.diverged = DIVERGED in result.returncodes
            ending.problem = explain(job.ranks[first], errors)
    if ending.complete:
        folder.merge_traces()
    return ending


def listener(take: Show, print_line: Print, errors: dict[int, str]) -> Output:
    """For the output of ranks: their messages go to `take`, what they say of errors to `errors`,
    all else is printed.
    """

    def hear(rank: Rank, line: str) -> None:
        if not line.startswith(MARK):
            print_line(rank, line)
            return
        message = json.loads(line.removeprefix(MARK))
        if message["kind"] == "error":
            errors[rank.number] = message["text"]
        take(message)

    return hear


def make_lab(config: Config) -> Lab | None:
    """The emulated cluster that a run asks for, not started; that it cannot be had here is told
    in one line.
    """
    if config.bandwidth is None:
        return None
    try:
        return Lab(config.nodes, config.counts(), bandwidth=config.bandwidth)
    except (LabError, ValueError) as error:
        raise TrainingError(f"--bandwidth {config.bandwidth}: {error}") from None


def check_lab(config: Config) -> None:
    """Whether that cluster can be had; nothing of it stays."""
    lab = make_lab(config)
    if lab is not None:
        lab.close()


@contextmanager
def _start(config: Config, command: list[str], output: Output) -> Iterator[Job]:
    lab = make_lab(config)
    if lab is None:
        with launch.start(
            command, nodes=config.nodes, ranks_per_node=config.counts(), output=output
        ) as job:
            yield job
        return
    with lab, lab.start(command, output=output) as job:
        yield job


def explain(rank: Rank, errors: dict[int, str]) -> str:
    """The first failure; of a rank that was killed without a word, what the others say about it
    is no news.
    """
    place = f"rank {rank.number} on node {rank.place.node}"
    return f"{place}: {errors.get(rank.number) or describe(rank.returncode or 0)}"
