"""What the shell offers when Tab is pressed."""

from __future__ import annotations

from pathlib import Path

import typer

from loosestep.recipes.find import RECIPES
from loosestep.strategies import STRATEGIES


def recipes(begun: str) -> list[str]:
    """Those there are, Python files, and folders on the way to them."""
    names = [name for name in RECIPES if name.startswith(begun)]
    folder = Path(begun or ".") if begun.endswith("/") else Path(begun).parent
    if not folder.is_dir():
        return names
    paths = [f"{path}/" if path.is_dir() else str(path) for path in sorted(folder.iterdir())]
    return names + [
        path for path in paths if path.startswith(begun) and path.endswith(("/", ".py"))
    ]


def strategy(begun: str) -> list[str]:
    return [name for name in STRATEGIES.entries() if name.startswith(begun)]


def strategies(begun: str) -> list[str]:
    """The last of several, separated by commas."""
    before, comma, last = begun.rpartition(",")
    return [before + comma + name for name in strategy(last)]


def device(begun: str) -> list[str]:
    return [name for name in ("cpu", "cuda") if name.startswith(begun)]


def setting(context: typer.Context, begun: str) -> list[tuple[str, str]]:
    """The options of the recipe that was named before, each with its help."""
    # While an option waits for its value, arguments are among the words that are not parsed.
    words = {context.params.get("recipe"), *context.args}
    options = [option for name in RECIPES if name in words for option in RECIPES[name]().options()]
    return [(f"{option.name}=", option.help) for option in options if option.name.startswith(begun)]
