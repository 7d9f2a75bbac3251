"""What a run is: everything that `loosestep train` was told, as a dataclass that survives the
round trip through TOML.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from loosestep.launch import ranks_of_nodes
from loosestep.strategies import Strategy
from loosestep.strategies import strategy as read_strategy


class TrainingError(Exception):
    """Something the user can put right; the message says what was seen, what was expected and
    what to do.
    """


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """A text, whole or not at all: a kill or a full disk leaves what was there before."""
    temporary = path.with_name(path.name + ".writing")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(parts)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, with the name of the file: the system's own error has none."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path} could not be written: {error.strerror}; what was written before is untouched"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. What is None is chosen by the recipe; `gradients` counts those of all learners
    together.
    """

    recipe: str
    strategy: str = "daso"
    nodes: int = 1
    ranks_per_node: str = "1"
    data: str | None = None
    gradients: int | None = None
    epochs: float | None = None
    lr: float | None = None
    seed: int = 0
    device: str = "cpu"
    bandwidth: str | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    deadline: float = 60.0
    record: bool = False
    generation: int = 0
    command: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gradients is not None and self.epochs is not None:
            raise TrainingError(
                f"give --gradients or --epochs, not both: got {self.gradients} and {self.epochs:g}"
            )
        for name, least in (
            ("gradients", 1),
            ("evaluate_every", 1),
            ("checkpoint_every", 1),
            ("keep", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise TrainingError(f"{_flag(name)} must be at least {least}, got {value}")
        for name in ("epochs", "lr", "deadline"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise TrainingError(f"{_flag(name)} must be a positive number, got {value}")
        self.chosen_strategy()
        self.counts()

    def chosen_strategy(self) -> Strategy:
        """The strategy, checked."""
        try:
            return read_strategy(self.strategy)
        except (ValueError, TypeError) as error:
            raise TrainingError(str(error)) from None

    def counts(self) -> list[int]:
        """How many ranks each node has."""
        try:
            numbers = [int(part) for part in self.ranks_per_node.split(",")]
        except ValueError:
            raise TrainingError(
                "--ranks-per-node must be a number (2) or one per node (3,2), got "
                f"{self.ranks_per_node!r}"
            ) from None
        try:
            return ranks_of_nodes(self.nodes, numbers[0] if len(numbers) == 1 else numbers)
        except ValueError as error:
            raise TrainingError(str(error)) from None

    @property
    def data_folder(self) -> Path | None:
        return None if self.data is None else Path(self.data)

    def but(self, **changes: Any) -> Config:
        """The same with changes."""
        return dataclasses.replace(self, **changes)

    def write(self, path: Path) -> None:
        """As TOML, whole or not at all."""
        write_whole(path, [to_toml(dataclasses.asdict(self))])


def read_config(path: Path) -> Config:
    """The configuration of a run that was started."""
    return make_config(read_toml(path), source=str(path))


def make_config(values: Mapping[str, Any], *, source: str) -> Config:
    """A configuration from plain values; an unknown name or a wrong type is an error that names
    it and the source.
    """
    types = get_type_hints(Config)
    for name, value in values.items():
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; there are {', '.join(types)}"
            raise TrainingError(f"{source}: unknown setting {name}{hint}")
        if not _fits(value, types[name]):
            raise TrainingError(f"{source}: {name} must be {_kind(types[name])}, got {value!r}")
    if "recipe" not in values:
        raise TrainingError(
            f"{source}: recipe is missing; it must be acoustic, vision or FILE.py:function"
        )
    return Config(**values)


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """`--set key=value`, several times."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise TrainingError(f"--set needs key=value, got {pair!r}")
        settings[key.strip()] = value.strip()
    return settings


# --------------------------------------------------------------------------------------------------
# TOML


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return dict(toml.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a decoding error, or one of TOML's
        raise TrainingError(f"{path} is not a TOML file: {error}") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML for numbers, texts, dates, lists and tables of them; what is None is left out."""
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    lines = _toml_pairs(plain)
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += ["", f"[{_key(name)}]", *_toml_pairs(value)]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(_toml_pairs(value))}}}"
    return _quoted(str(value))


def _toml_pairs(table: Mapping[str, Any]) -> list[str]:
    return [
        f"{_key(name)} = {_toml_value(value)}" for name, value in table.items() if value is not None
    ]


def _quoted(text: str) -> str:
    """A JSON string is a TOML string, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return (
        name
        if name.replace("_", "").replace("-", "").isalnum() and name.isascii()
        else _quoted(name)
    )


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is bool:
        return isinstance(value, bool)
    accepted: dict[type, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float)}
    for kind, types in accepted.items():
        if wanted in (kind, kind | None):
            return (value is None and wanted != kind) or (
                isinstance(value, types) and not isinstance(value, bool)
            )
    return isinstance(value, dict)


def _kind(wanted: Any) -> str:
    if wanted in (int, int | None):
        return "a whole number"
    if wanted in (float, float | None):
        return "a number"
    if wanted is bool:
        return "true or false"
    return "a text" if wanted in (str, str | None) else "a table"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
