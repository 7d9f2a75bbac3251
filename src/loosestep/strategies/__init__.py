"""Strategies by name: `strategy("daso:period=8,delay=2")`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from loosestep.strategies.adpsgd import ADPSGD
from loosestep.strategies.allreduce import AllReduce
from loosestep.strategies.base import Strategy
from loosestep.strategies.daso import DASO
from loosestep.strategies.delaybyone import DelayByOne
from loosestep.strategies.diloco import DiLoCo
from loosestep.strategies.localsgd import LocalSGD

__all__ = [
    "ADPSGD",
    "DASO",
    "AllReduce",
    "DelayByOne",
    "DiLoCo",
    "LocalSGD",
    "Strategy",
    "strategy",
]

STRATEGIES: dict[str, tuple[type[Strategy], Callable[..., Strategy]]] = {
    "allreduce": (AllReduce, AllReduce),
    "localsgd": (LocalSGD, LocalSGD),
    "daso": (DASO, DASO),
    "daso-paper": (DASO, DASO.paper),
    "adpsgd": (ADPSGD, ADPSGD),
    "delay-by-one": (DelayByOne, DelayByOne),
    "diloco": (DiLoCo, DiLoCo),
}


def strategy(text: str | Strategy) -> Strategy:
    """The strategy that `NAME` or `NAME:field=value,field=value` describes."""
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise TypeError(
            "a strategy is given as an object or by name, as in 'daso:period=8', got "
            f"{type(text).__name__}"
        )
    name, _, rest = text.strip().partition(":")
    if name not in STRATEGIES:
        raise ValueError(
            f"unknown strategy {name!r}{_guess(name, STRATEGIES)}; the strategies are "
            f"{', '.join(STRATEGIES)}"
        )
    kind, make = STRATEGIES[name]
    valid = [field.name for field in fields(kind)]
    chosen: dict[str, Any] = {}
    for part in filter(None, map(str.strip, at_commas(rest))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"expected field=value in {text!r}, got {part!r}, as in 'daso:period=8,delay=2'"
            )
        if key not in valid:
            known = ", ".join(valid) or "none"
            raise ValueError(
                f"{name} has no field {key!r}{_guess(key, valid)}; its fields are: {known}"
            )
        if key in chosen:
            raise ValueError(f"{key} is given twice in {text!r}")
        chosen[key] = _value(value)
    return make(**chosen)


def at_commas(text: str) -> list[str]:
    """The text cut at its commas, those inside brackets excepted: a graph or a matrix is one
    value.
    """
    pieces = [""]
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _guess(word: str, known: Any) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _value(text: str) -> Any:
    """A number, True, False, None, or the word itself."""
    if text.lower() in ("true", "false", "none"):
        return ast.literal_eval(text.capitalize())
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
