"""What several commands ask for, and the settings and names that come of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from loosestep.cli import completion
from loosestep.recipes import find_recipe
from loosestep.runfolder.config import Config, make_config, parse_settings, read_toml

# of a run's config.toml that is given as --config
NOT_SETTINGS = ("generation", "command", "environment")


OneRecipe: Any = typer.Argument(
    metavar="RECIPE",
    help="acoustic, vision, or FILE.py:function for your own.",
    autocompletion=completion.recipes,
)
RecipeName = Annotated[str, OneRecipe]
StrategyName = Annotated[
    str | None,
    typer.Option(
        help="How learners exchange, and its fields: daso:period=8. Listed below. (daso)",
        autocompletion=completion.strategy,
    ),
]
Nodes = Annotated[int | None, typer.Option(help="How many nodes to start on this machine (1).")]
RanksPerNode = Annotated[
    str | None, typer.Option(help="Processes a node: 2, or 3,2 for uneven nodes (1).")
]
Data = Annotated[
    Path | None, typer.Option(help="A folder or file, as below; without, the recipe's own data.")
]
Gradients = Annotated[
    int | None, typer.Option(help="Budget: gradients (batches) of all learners together.")
]
Epochs = Annotated[
    float | None, typer.Option(help="Budget: passes over the data, of all learners together.")
]
Batch = Annotated[int | None, typer.Option(help="Examples in one gradient of one learner.")]
Lr = Annotated[
    float | None,
    typer.Option(help="Base learning rate; without, the recipe's, fitted to the strategy."),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, or cuda: a GPU for each rank of a node. (cpu)", autocompletion=completion.device
    ),
]
Bandwidth = Annotated[
    str | None, typer.Option(help="Emulate nodes with links of this rate: 100mbit (Linux, root).")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="An option of the recipe; --options lists them. Repeatable.",
        autocompletion=completion.setting,
    ),
]
ListOptions = Annotated[
    bool, typer.Option("--options", help="List what --set can change for RECIPE, and leave.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Settings from a TOML file, such as a run's config.toml."),
]
EvaluateEvery = Annotated[
    int | None, typer.Option(help="Judge the mean model every so many gradients (a tenth).")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(help="Store a checkpoint every so many gradients (a tenth).")
]
RunName = Annotated[
    str | None, typer.Option(help="Of the run's folder; without, recipe, strategy and time.")
]
Runs = Annotated[Path, typer.Option(help="Where run folders are made.")]


def gather(
    given: dict[str, Any], file: Path | None, settings: list[str], batch: int | None
) -> Config:
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


def show_options(config: Config, console: Console) -> None:
    """What --set understands, with the values that this command line would use."""
    found = find_recipe(config.recipe).options(config.options, data=config.data_folder)
    for option in found:
        console.print(
            f"  [bold]{option.name}[/]={escape(str(option.value))}  {escape(option.help)}",
            soft_wrap=True,
        )
    if not found:
        console.print("your own function decides what --set means")


def default_name(config: Config) -> str:
    """vision-daso-1115-234501"""
    return (
        f"{short(config.recipe)}-{config.strategy.partition(':')[0]}-{time.strftime('%m%d-%H%M%S')}"
    )


def short(recipe: str) -> str:
    """A recipe's name for titles and folders."""
    return recipe if ":" not in recipe else Path(recipe.rpartition(":")[0]).stem
