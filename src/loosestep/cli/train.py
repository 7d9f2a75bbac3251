"""`loosestep train`: a recipe, a strategy, a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from loosestep.cli import options as asked
from loosestep.cli.common import (
    conclude,
    given_ranks,
    met,
    new_folder,
    one_line_errors,
    prepare,
    run_folder,
    settle,
    train_as_given,
)
from loosestep.cli.launch import gentle_end
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder
from loosestep.topology.launchers import Launch
from loosestep.training.watch import check_lab


def train(
    recipe: Annotated[str | None, asked.OneRecipe] = None,
    strategy: asked.StrategyName = None,
    nodes: asked.Nodes = None,
    ranks_per_node: asked.RanksPerNode = None,
    data: asked.Data = None,
    gradients: asked.Gradients = None,
    epochs: asked.Epochs = None,
    batch: asked.Batch = None,
    lr: asked.Lr = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the model, the data order and everything random. (0)")
    ] = None,
    device: asked.Device = None,
    bandwidth: asked.Bandwidth = None,
    settings: asked.Settings = None,
    config: asked.ConfigFile = None,
    evaluate_every: asked.EvaluateEvery = None,
    checkpoint_every: asked.CheckpointEvery = None,
    keep: Annotated[int | None, typer.Option(help="How many checkpoints to keep. (3)")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds without a sign after which a rank is lost. (60)")
    ] = None,
    record: Annotated[
        bool | None,
        typer.Option(
            "--record", help="Write down what was folded when, for: loosestep replay RUN."
        ),
    ] = None,
    name: asked.RunName = None,
    runs: asked.Runs = Path("runs"),
    options: asked.ListOptions = False,
) -> None:
    """Train RECIPE with a strategy; everything about the run goes to runs/NAME.

    Starts its own processes (--nodes, --ranks-per-node), or uses those it is
    given: torchrun, srun, mpirun, loosestep launch, loosestep lab. Options
    override --config, which overrides the recipe.

    Example: loosestep train vision --strategy daso:period=4 --nodes 2 --epochs 5
    """
    console = Console(highlight=False)
    with one_line_errors(), gentle_end():
        given: dict[str, Any] = {
            "recipe": recipe,
            "strategy": strategy,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "data": None if data is None else str(data),
            "gradients": gradients,
            "epochs": epochs,
            "lr": lr,
            "seed": seed,
            "device": device,
            "bandwidth": bandwidth,
            "evaluate_every": evaluate_every,
            "checkpoint_every": checkpoint_every,
            "keep": keep,
            "deadline": deadline,
            "record": record,
        }
        wanted = asked.gather(given, config, settings or [], batch)
        if options:
            asked.show_options(wanted, console)
            return
        launch = given_ranks()
        if launch is None:
            train_here(wanted, runs / (name or asked.default_name(wanted)), console)
        else:
            train_as_rank(wanted, None if name is None else runs / name, launch, console)


def train_here(config: Config, path: Path, console: Console) -> None:
    """Start the ranks and watch them."""
    check_lab(config)  # a run that cannot start here takes no name
    config = settle(config, prepare(config, console))
    folder = new_folder(path, config)
    console.print(
        f"[bold]{escape(config.recipe)}[/] with {escape(config.strategy)}: {config.gradients} "
        f"gradients, run folder {escape(str(path))}",
        soft_wrap=True,
    )
    conclude(
        folder,
        run_folder(folder, console, f"{asked.short(config.recipe)}  {config.strategy}"),
        console,
    )


def train_as_rank(config: Config, path: Path | None, launch: Launch, console: Console) -> None:
    """Be one rank of those that somebody else started; all of them come to the same folder."""
    if path is None:
        raise TrainingError(
            f"under {launch.launcher} every rank needs to know the run's folder: give --name"
        )
    if config.bandwidth is not None:
        raise TrainingError(
            f"--bandwidth {config.bandwidth} needs ranks that train starts itself; under "
            f"{launch.launcher} leave it out"
        )
    config = settle(config, prepare(config, Console(quiet=launch.rank != 0)))
    with met(config.deadline) as nodes_and_ranks:
        train_as_given(config.but(**nodes_and_ranks), RunFolder(path), launch, console)
