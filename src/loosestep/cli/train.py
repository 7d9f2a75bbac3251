"""`loosestep train`: a recipe, a strategy, a budget."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loosestep.cli.launch import gentle_end
from loosestep.cli.running import (
    as_given,
    conclude,
    given_ranks,
    new_folder,
    one_line_errors,
    prepare,
    run_folder,
    settle,
    train_as_given,
)
from loosestep.recipes import find_recipe
from loosestep.strategies import STRATEGIES
from loosestep.topology import Launch
from loosestep.training.config import Config, TrainingError, make_config, parse_settings, read_toml
from loosestep.training.folder import RunFolder

RECIPES = ("acoustic", "vision")
NOT_SETTINGS = ("generation", "command", "environment")  # of a run's config.toml that is given as --config


def complete_recipe(begun: str) -> list[str]:
    return [name for name in RECIPES if name.startswith(begun)]


def complete_strategy(begun: str) -> list[str]:
    return [name for name in STRATEGIES if name.startswith(begun)]


OneRecipe: Any = typer.Argument(
    metavar="RECIPE", help="acoustic, vision, or FILE.py:function for your own.", autocompletion=complete_recipe
)
RecipeName = Annotated[str, OneRecipe]
Nodes = Annotated[int | None, typer.Option(help="How many nodes to start on this machine (1).")]
RanksPerNode = Annotated[str | None, typer.Option(help="Processes a node: 2, or 3,2 for uneven nodes (1).")]
Data = Annotated[Path | None, typer.Option(help="A folder or file with data; without, the recipe's own data.")]
Gradients = Annotated[int | None, typer.Option(help="Budget: gradients (batches) of all learners together.")]
Epochs = Annotated[float | None, typer.Option(help="Budget: passes over the data, of all learners together.")]
Batch = Annotated[int | None, typer.Option(help="Examples in one gradient of one learner.")]
Lr = Annotated[float | None, typer.Option(help="Base learning rate; without, the recipe's, fitted to the strategy.")]
Device = Annotated[str | None, typer.Option(help="cpu, or cuda: a GPU for each rank of a node. (cpu)")]
Bandwidth = Annotated[str | None, typer.Option(help="Emulate nodes with links of this rate: 100mbit (Linux, root).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the recipe. Repeatable.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings from a TOML file, such as a run's config.toml.")
]
EvaluateEvery = Annotated[int | None, typer.Option(help="Judge the mean model every so many gradients (a tenth).")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Store a checkpoint every so many gradients (a tenth).")]
Runs = Annotated[Path, typer.Option(help="Where run folders are made.")]


def train(
    recipe: Annotated[str | None, OneRecipe] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How learners exchange: allreduce, daso:period=8, adpsgd, ... (daso)", autocompletion=complete_strategy
        ),
    ] = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    data: Data = None,
    gradients: Gradients = None,
    epochs: Epochs = None,
    batch: Batch = None,
    lr: Lr = None,
    seed: Annotated[int | None, typer.Option(help="Of the model, the data order and everything random. (0)")] = None,
    device: Device = None,
    bandwidth: Bandwidth = None,
    settings: Settings = None,
    config: ConfigFile = None,
    evaluate_every: EvaluateEvery = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Annotated[int | None, typer.Option(help="How many checkpoints to keep. (3)")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds without a sign after which a rank is lost. (60)")
    ] = None,
    record: Annotated[
        bool | None, typer.Option("--record", help="Write down what was folded when, for: loosestep replay RUN.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run's folder; without, recipe, strategy and time.")] = None,
    runs: Runs = Path("runs"),
    options: Annotated[
        bool, typer.Option("--options", help="List what --set can change for RECIPE, and leave.")
    ] = False,
) -> None:
    """Train RECIPE with a strategy; everything about the run goes to runs/NAME.

    Starts its own processes (--nodes, --ranks-per-node), or uses those it is given: torchrun, srun, mpirun, loosestep
    launch, loosestep lab. Options override --config, which overrides the recipe.

    Example: loosestep train vision --strategy daso:period=4 --nodes 2 --ranks-per-node 2 --epochs 5
    """
    console = Console(highlight=False)
    with one_line_errors(), gentle_end():
        given: dict[str, Any] = {
            "recipe": recipe, "strategy": strategy, "nodes": nodes, "ranks_per_node": ranks_per_node,
            "data": None if data is None else str(data), "gradients": gradients, "epochs": epochs, "lr": lr, "seed": seed,
            "device": device, "bandwidth": bandwidth, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every,
            "keep": keep, "deadline": deadline, "record": record,
        }  # fmt: skip
        wanted = gather(given, config, settings or [], batch)
        if options:
            list_options(wanted.recipe, console)
            return
        launch = given_ranks()
        if launch is None:
            train_here(wanted, runs / (name or default_name(wanted)), console)
        else:
            train_as_rank(wanted, None if name is None else runs / name, launch, console)


def gather(given: dict[str, Any], file: Path | None, settings: list[str], batch: int | None) -> Config:
    """The file first, then what was said on the command line."""
    values: dict[str, Any] = {} if file is None else read_toml(file)
    for name in NOT_SETTINGS:
        values.pop(name, None)
    said = {name: value for name, value in given.items() if value is not None}
    if "gradients" in said or "epochs" in said:  # one of them replaces either of the file's
        values.pop("gradients", None)
        values.pop("epochs", None)
    chosen = {**values.get("options", {}), **parse_settings(settings)}
    if batch is not None:
        chosen["batch"] = batch
    source = "the command line" if file is None else str(file)
    return make_config({**values, **said, "options": chosen}, source=source)


def train_here(config: Config, path: Path, console: Console) -> None:
    """Start the ranks and watch them."""
    config = settle(config, prepare(config, console))
    folder = new_folder(path, config)
    console.print(
        f"[bold]{config.recipe}[/] with {config.strategy}: {config.gradients} gradients, run folder {path}",
        soft_wrap=True,
    )
    conclude(folder, run_folder(folder, console, f"{short(config.recipe)}  {config.strategy}"), console)


def train_as_rank(config: Config, path: Path | None, launch: Launch, console: Console) -> None:
    """Be one rank of those that somebody else started; all of them come to the same folder."""
    if path is None:
        raise TrainingError(f"under {launch.launcher} every rank needs to know the run's folder: give --name")
    config = settle(config, prepare(config, Console(quiet=launch.rank != 0))).but(**as_given(launch))
    train_as_given(config, RunFolder(path), launch, console)


def default_name(config: Config) -> str:
    """vision-daso-1115-234501"""
    return f"{short(config.recipe)}-{config.strategy.partition(':')[0]}-{time.strftime('%m%d-%H%M%S')}"


def short(recipe: str) -> str:
    """A recipe's name for titles and folders."""
    return recipe if ":" not in recipe else Path(recipe.rpartition(":")[0]).stem


def list_options(recipe: str, console: Console) -> None:
    """What --set understands."""
    found = find_recipe(recipe).options()
    for option in found:
        console.print(f"  [bold]{option.name}[/]={option.default}  {option.help}", soft_wrap=True)
    if not found:
        console.print("your own function decides what --set means")
