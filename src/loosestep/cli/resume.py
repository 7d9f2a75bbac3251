"""`loosestep resume`: a run goes on where it was left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from loosestep.cli import options as asked
from loosestep.cli.common import (
    conclude,
    given_ranks,
    met,
    one_line_errors,
    prepare,
    run_folder,
    train_as_given,
)
from loosestep.cli.launch import gentle_end
from loosestep.report.outcome import Outcome
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder
from loosestep.training.start import find_start, rearrange


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    nodes: asked.Nodes = None,
    ranks_per_node: asked.RanksPerNode = None,
    gradients: Annotated[
        int | None,
        typer.Option(help="Another budget, for instance to train a complete run longer."),
    ] = None,
    start: Annotated[
        bool, typer.Option(help="Go on now, or only get the run ready for other ranks.")
    ] = True,
) -> None:
    """Continue a run from its newest intact checkpoints, after a crash, a kill or a reboot.

    With the same ranks, collective strategies give bit for bit what the uninterrupted run would
    have given. With other --nodes or --ranks-per-node all ranks start from the mean of the old
    ones.

    Example: loosestep resume runs/vision-daso-1115-234501
    """
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(f"[yellow]loosestep:[/] {escape(text)}", soft_wrap=True)

    with one_line_errors(), gentle_end():
        folder = RunFolder.open(run)
        folder.require_free()
        config = folder.config()
        if "simulated" in config.environment:
            raise TrainingError(f"{run} was simulated; repeat it with: {config.command}")
        launch = given_ranks()
        if launch is not None:
            if (nodes, ranks_per_node, gradients, start) != (None, None, None, True):
                raise TrainingError(
                    f"under {launch.launcher} the ranks are those it gives, and each would change "
                    f"the run; first run, outside of it: loosestep resume {run} --no-start with "
                    "--nodes, --ranks-per-node or --gradients"
                )
            with met(config.deadline) as nodes_and_ranks:
                train_as_given(config.but(**nodes_and_ranks), folder, launch, console)
        nodes = config.nodes if nodes is None else nodes
        ranks_per_node = config.ranks_per_node if ranks_per_node is None else ranks_per_node
        # a mistake in them shows before anything is changed
        config.but(nodes=nodes, ranks_per_node=ranks_per_node)
        config = lengthened(folder, config, gradients)
        changed, done = rearrange(
            folder, config, nodes=nodes, ranks_per_node=ranks_per_node, warn=say
        )
        if done:
            say(done)
        if not start:
            return
        prepare(changed, console)
        where = find_start(folder, changed, 0, lambda text: None)
        at = (
            "from the beginning, for there is no checkpoint"
            if where is None
            else f"at gradient {where.gradients}"
        )
        console.print(
            f"[bold]{escape(str(run))}[/] goes on {at} of {changed.gradients}", soft_wrap=True
        )
        conclude(
            folder,
            run_folder(folder, console, f"{asked.short(changed.recipe)}  {changed.strategy}"),
            console,
        )


def lengthened(folder: RunFolder, config: Config, gradients: int | None) -> Config:
    """The run's budget, or another; a complete run needs another."""
    if gradients is not None:
        config = config.but(gradients=gradients)
        config.write(folder.config_file)
        return config
    made = Outcome.read(folder).gradients if folder.complete else 0
    if made and made >= (config.gradients or 0):
        raise TrainingError(
            f"{folder.path} is complete ({made} gradients); train it longer with --gradients "
            f"{2 * made}"
        )
    return config
