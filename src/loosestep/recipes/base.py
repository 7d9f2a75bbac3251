"""What a recipe is: options, and a function that turns them into a task which any trainer can
drive.

recipe = find_recipe("acoustic")                        # or "vision", or "FILE.py:function"
task = recipe.build({"preset": "tiny"}, seed=0)
model = task.make_model()
optimizer = task.training.make_optimizer(model)
for batch in task.stream(learner=rank, learners=world):
    task.loss(model, batch).backward()
    ...
task.evaluate(model)                                    # {"wer": .13, "cer": .06, "loss": .5}
"""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from . import schedules
from .errors import RecipeError, require
from .order import BatchStream, BatchT, Order, mix

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`; called by whatever takes more than a moment."""


def no_progress(what: str, done: int, total: int) -> None:
    """The default: say nothing."""


@dataclass(frozen=True)
class Quality:
    """The number a run is judged by: `name` is its key in what `evaluate` returns."""

    name: str
    better: Literal["lower", "higher"]

    def improves(self, new: float, best: float) -> bool:
        return new < best if self.better == "lower" else new > best


Optimizer = Literal["sgd", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adamw")


@dataclass(frozen=True)
class Training:
    """How a task is best trained by one learner; the learning-rate rules for many are in
    `schedules`.
    """

    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    weight_decay: float = 1e-4
    momentum: float = 0.9
    clip: float | None = None
    schedule: str = "constant"
    epochs: float = 10.0

    def __post_init__(self) -> None:
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", schedules.NAMES)):
            given = getattr(self, name)
            require(given in known, f"{name} must be one of {', '.join(known)}, got {given!r}")
        for name in ("lr", "epochs"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")

    def make_schedule(self, *, total: int, epoch: int, learners: int) -> schedules.Schedule:
        """The schedule, scaled with the learners as the optimizer needs it."""
        return schedules.schedule(
            self.schedule, total=total, epoch=epoch, learners=learners, optimizer=self.optimizer
        )

    def make_optimizer(self, model: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        """The optimizer; biases, norms and other vectors are not decayed."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        rate = self.lr if lr is None else lr
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=self.momentum)
        return torch.optim.AdamW(groups, lr=rate)


@dataclass(frozen=True)
class Example:
    """One test example for the report: what it was, what should come out, what did."""

    name: str
    expected: str
    found: str


class Task(ABC, Generic[BatchT]):
    """A model, its data and its quality. Everything random in it is a function of the seed and
    the batch number.
    """

    name: str
    quality: Quality
    training: Training
    order: Order
    seed: int
    device: torch.device

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The untrained model; the random generator is already seeded."""

    @abstractmethod
    def load(self, number: int) -> BatchT:
        """The training batch with this global number, augmented."""

    @abstractmethod
    def batch_loss(self, model: nn.Module, batch: BatchT) -> Tensor:
        """The mean loss; the random generator is already seeded (dropout)."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on the test set, `quality.name` among them. Leaves the model's mode as it was."""

    def examples(self, model: nn.Module, count: int = 10) -> list[Example]:
        """A few test examples with the model's answers, for the report."""
        return []

    def describe(self) -> dict[str, str | int | float]:
        """What the report says about the data and the model."""
        return {}

    def make_model(self) -> nn.Module:
        """A new untrained model on the task's device: the same one for the same seed, on every
        rank.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(self.seed, "model"))
            return self.build_model().to(self.device)

    def loss(self, model: nn.Module, batch: tuple[int, BatchT]) -> Tensor:
        """The training loss. Dropout is seeded by the batch number, so that a resumed run
        repeats it exactly.
        """
        number, content = batch
        torch.manual_seed(mix(self.seed, "dropout", number))
        return self.batch_loss(model, content)

    def stream(
        self, *, learner: int = 0, learners: int = 1, taken: int = 0
    ) -> BatchStream[tuple[int, BatchT]]:
        """One learner's batches, as `loss` takes them; `taken` batches were used by all learners
        before.
        """
        return BatchStream(self._numbered, learner=learner, learners=learners, taken=taken)

    def _numbered(self, number: int) -> tuple[int, BatchT]:
        return number, self.load(number)


class Recipe(Protocol):
    """A named set of options with a builder."""

    name: str

    def options(
        self, given: Mapping[str, Any] | None = None, *, data: Path | None = None
    ) -> list[Option]: ...

    def build(
        self,
        options: Mapping[str, Any],
        *,
        data: Path | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress = no_progress,
    ) -> Task[Any]: ...


# --------------------------------------------------------------------------------------------------
# options


@dataclass(frozen=True)
class Option:
    """One `--set name=value`, for help and error messages."""

    name: str
    value: Any
    help: str


OptionsT = TypeVar("OptionsT")


def option(default: Any, text: str, choices: Sequence[str] = ()) -> Any:
    """A field of an options dataclass, with its help and, for strings, what it may be."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": tuple(choices)})


def list_options(chosen: Any) -> list[Option]:
    """The fields of an options dataclass with the values in force, as help."""
    found = []
    for field in dataclasses.fields(chosen):
        choices = field.metadata.get("choices", ())
        text = field.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        found.append(Option(field.name, getattr(chosen, field.name), text))
    return found


def parse_options(
    cls: type[OptionsT],
    given: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> OptionsT:
    """An options object from `--set` strings or TOML values; `preset` first, then what is given
    explicitly.
    """
    presets = presets or {}
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; there are {', '.join(fields)}"
            raise RecipeError(f"unknown option {name}{hint}")
    values: dict[str, Any] = {}
    if "preset" in fields:
        preset = str(given.get("preset", fields["preset"].default))
        if preset not in presets:
            raise RecipeError(f"preset must be one of {', '.join(presets)}, got {preset}")
        values.update(presets[preset])
    for name, value in given.items():
        values[name] = _convert(name, value, types[name], fields[name].metadata.get("choices", ()))
    return cls(**values)


def _convert(name: str, value: Any, kind: Any, choices: Sequence[str]) -> Any:
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    try:
        if kind is bool:
            converted: Any = {"true": True, "false": False}[str(value).lower()]
        elif kind is int and isinstance(value, (float, bool)):
            raise ValueError
        else:
            converted = kind(value)
    except (ValueError, KeyError, TypeError):
        raise RecipeError(f"option {name} must be {wanted}, got {value!r}") from None
    if choices and converted not in choices:
        raise RecipeError(f"option {name} must be one of {', '.join(choices)}, got {value!r}")
    return converted
