"""`loosestep replay`: a recorded run again, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from loosestep.cli import options as asked
from loosestep.cli.common import one_line_errors, prepare
from loosestep.cli.launch import gentle_end
from loosestep.cli.screen import Screen
from loosestep.record.format import RecordingError
from loosestep.record.player import changed_circumstances
from loosestep.record.source import StepOfRank, parse_place
from loosestep.runfolder.config import TrainingError
from loosestep.runfolder.folder import RunFolder
from loosestep.training.replay import (
    ReplayResult,
    read_recordings,
    replay_in_process,
    replay_run,
    require_place,
)


def replay(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run that was trained with --record."),
    ],
    until: Annotated[
        str | None,
        typer.Option(
            metavar="rank=R,step=S", help="Stop after this step and save the state of that rank."
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="All ranks in one process, one at a time: for a debugger."
        ),
    ] = False,
) -> None:
    """Train RUN again from its recording: every rank folds the same values at the same places,
    whatever the timing.

    Compares the parameters with the recorded digests and says whether they are the same, bit for
    bit, or where they first differ. What the replay writes goes to RUN/replay.

    Example: loosestep replay runs/vision-adpsgd-1115-234501 --until rank=2,step=731
    """
    console = Console(highlight=False)
    with one_line_errors(), gentle_end():
        folder = RunFolder.open(run)
        place = place_of(until)
        config, recordings = read_recordings(folder)
        require_place(place, recordings)
        for change in changed_circumstances(recordings[0].header):
            console.print(
                f"[yellow]loosestep:[/] {escape(change)}: bits may differ", soft_wrap=True
            )
        prepare(config, console)
        with Screen(
            console, f"replay of {asked.short(config.recipe)}  {config.strategy}"
        ) as screen:
            if in_process:
                comparison = replay_in_process(folder, until=place, show=screen.show)
            else:
                comparison = replay_run(
                    folder, until=place, show=screen.show, print_line=screen.print_line
                )
        conclude(comparison, console)


def place_of(text: str | None) -> StepOfRank | None:
    try:
        return None if text is None else parse_place(text)
    except RecordingError as error:
        raise TrainingError(f"--until: {error}") from None


def conclude(comparison: ReplayResult, console: Console) -> None:
    """Say how it compares; exit with 1 if it is not the same."""
    if comparison.stopped is not None:
        at = comparison.stopped
        console.print(
            f"rank {at['rank']} after step {at['step']}: loss [bold]{at['loss']:.6g}[/], "
            f"parameters have the digest [bold]{at['digest']}[/]\nIts state: "
            f"[bold]{escape(at['path'])}[/], to be read with loosestep.runfolder.checkpoint.read",
            soft_wrap=True,
        )
        return
    if comparison.problem:
        Console(stderr=True, highlight=False).print(
            f"[bold red]loosestep:[/] {escape(comparison.problem)}", soft_wrap=True
        )
        raise typer.Exit(1)
    for ending in comparison.endings:
        console.print(f"[yellow]loosestep:[/] {escape(ending)}", soft_wrap=True)
    last = "" if len(comparison.endings) == len(comparison.ranks) else ", and at the end"
    console.print(
        f"[bold green]bit for bit identical[/] at {comparison.checked} steps of "
        f"{len(comparison.ranks)} ranks{last} ({comparison.steps} steps were made)",
        soft_wrap=True,
    )
