"""A registry: classes of one sort (strategies, codecs) by name, and the text that spells one of
their objects.

    daso:period=8,delay=2          a name, then fields; what is in brackets is one value
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from inspect import get_annotations
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Preset:
    """A name for a class with other defaults: the classmethod that makes it, and one line."""

    method: str
    summary: str


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A name: what it makes, and one line about it."""

    name: str
    kind: type[T]
    make: Callable[..., T]
    summary: str

    def defaults(self) -> dict[str, Any]:
        """The fields and their defaults; of a preset those that differ from its class."""
        made = {field.name: getattr(self.make(), field.name) for field in _fields(self.kind)}
        if self.make is self.kind:
            return made
        plain = self.kind()
        return {name: value for name, value in made.items() if value != getattr(plain, name)}


class Registry(Generic[T]):
    """The classes of one `sort` by name.

    A class enters when it is defined, wherever that is; the modules of `package` are imported
    before anybody asks. So a new one is a new file, and nothing else is edited.
    """

    def __init__(self, sort: str, plural: str, *, package: str, example: str) -> None:
        self._sort = sort
        self._plural = plural
        self._package = package
        self._example = example
        self._entries: dict[str, Entry[T]] = {}
        self._complete = False

    def enter(self, kind: Any) -> None:
        """Add a class that has a `name`, a `summary` and perhaps `presets`."""
        for attribute in ("name", "summary"):
            if not isinstance(getattr(kind, attribute, None), str):
                raise TypeError(
                    f"{kind.__qualname__} needs `{attribute}: ClassVar[str]`, the "
                    f"{'name it is chosen by' if attribute == 'name' else 'one line of its help'}"
                )
        self._add(Entry(kind.name, kind, kind, kind.summary))
        for name, preset in vars(kind).get("presets", {}).items():
            self._add(Entry(name, kind, getattr(kind, preset.method), preset.summary))

    def _add(self, entry: Entry[T]) -> None:
        known = self._entries.get(entry.name)
        if known is not None and _place(known.kind) != _place(entry.kind):
            raise ValueError(
                f"two {self._plural} have the name {entry.name!r}: {_place(known.kind)} and "
                f"{_place(entry.kind)}; rename one of them"
            )
        self._entries[entry.name] = entry

    def entries(self) -> dict[str, Entry[T]]:
        """Everything there is, by name."""
        if not self._complete:
            self._complete = True
            for module in pkgutil.iter_modules(import_module(self._package).__path__):
                import_module(f"{self._package}.{module.name}")
        return dict(sorted(self._entries.items()))

    def read(self, text: str) -> T:
        """The object that `NAME` or `NAME:field=value,field=value` spells."""
        name, _, rest = text.strip().partition(":")
        name = name.lower()
        entries = self.entries()
        if name not in entries:
            raise ValueError(
                f"unknown {self._sort} {name!r}{_guess(name, entries)}; the {self._plural} are "
                f"{', '.join(entries)}"
            )
        entry = entries[name]
        valid = [field.name for field in _fields(entry.kind)]
        chosen: dict[str, Any] = {}
        for part in filter(None, map(str.strip, at_commas(rest))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not value:
                raise ValueError(
                    f"expected field=value in {text!r}, got {part!r}, as in {self._example!r}"
                )
            if key not in valid:
                known = ", ".join(valid) or "none"
                raise ValueError(
                    f"{name} has no field {key!r}{_guess(key, valid)}; its fields are: {known}"
                )
            if key in chosen:
                raise ValueError(f"{key} is given twice in {text!r}")
            chosen[key] = _value(value)
        return entry.make(**chosen)


def spell(thing: Any) -> str:
    """The text that `Registry.read` reads: the name, and the fields that are not as by default."""
    changed = [
        f"{field.name}={_spelled(getattr(thing, field.name))}"
        for field in _fields(thing)
        if field.default is MISSING or getattr(thing, field.name) != field.default
    ]
    return str(thing.name) + (":" + ",".join(changed) if changed else "")


def _spelled(value: Any) -> str:
    """In brackets if a comma would end it."""
    text = str(value)
    return f"({text})" if len(at_commas(text)) > 1 else text


def at_commas(text: str) -> list[str]:
    """The text cut at its commas, but for those inside brackets: a graph or a matrix is one
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


def _fields(kind: Any) -> list[Any]:
    """A class's own first, then those that all of its sort have."""
    own = get_annotations(kind if isinstance(kind, type) else type(kind))
    return sorted(fields(kind), key=lambda field: field.name not in own)


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _guess(word: str, known: Iterable[str]) -> str:
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
