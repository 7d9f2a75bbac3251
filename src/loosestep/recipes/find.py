"""Recipes by name: `acoustic`, `vision`, or the user's own as `FILE.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .acoustic import AcousticRecipe
from .base import Option, Progress, Recipe, Task, no_progress
from .errors import RecipeError
from .vision import VisionRecipe

RECIPES: dict[str, Callable[[], Recipe]] = {"acoustic": AcousticRecipe, "vision": VisionRecipe}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or an error that says what there is."""
    if name in RECIPES:
        return RECIPES[name]()
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise RecipeError(f"recipe must be {', '.join(RECIPES)} or FILE.py:function, got {name!r}")
    return OwnRecipe(Path(file), function)


class OwnRecipe:
    """A function in the user's file, called as  function(options, data=, seed=, device=,
    progress=) -> Task.
    """

    def __init__(self, file: Path, function: str) -> None:
        self.name = f"{file.stem}:{function}"
        self._function = _load(file, function)

    def options(
        self, given: Mapping[str, Any] | None = None, *, data: Path | None = None
    ) -> list[Option]:
        """Unknown: the function takes what it likes."""
        return []

    def build(
        self,
        options: Mapping[str, Any],
        *,
        data: Path | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress = no_progress,
    ) -> Task[Any]:
        task = self._function(
            dict(options), data=data, seed=seed, device=torch.device(device), progress=progress
        )
        if not isinstance(task, Task):
            raise RecipeError(
                f"{self.name} must return a loosestep.recipes.Task, got {type(task).__name__}"
            )
        return task


def _load(file: Path, function: str) -> Callable[..., Any]:
    if not file.is_file():
        raise RecipeError(f"recipe file {file} does not exist")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"recipe file {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and multiprocessing look modules up by name
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as problem:
        raise RecipeError(f"{problem.filename}:{problem.lineno}: {problem.msg}") from problem
    except ImportError as problem:
        raise RecipeError(f"recipe file {file} cannot be loaded: {problem}") from problem
    found = getattr(module, function, None)
    if not callable(found):
        raise RecipeError(f"{file} has no function {function}")
    try:
        inspect.signature(found).bind({}, data=None, seed=0, device=None, progress=None)
    except TypeError as problem:
        raise RecipeError(
            f"{function} in {file} must take (options, *, data, seed, device, progress): {problem}"
        ) from None
    return found  # type: ignore[no-any-return]
