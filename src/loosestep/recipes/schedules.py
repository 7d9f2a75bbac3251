"""Learning-rate rules as functions of the global gradient count.

A gradient is one minibatch of one learner; the count g runs over all learners. Schedules on g, not
on local steps, make strategies and numbers of learners comparable at the same budget, and stay
right when learners differ in speed. Every schedule gives a factor on the base learning rate:

    lr(g) = base * factor(g)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch


class Schedule(Protocol):
    """A factor on the learning rate. Those that look at the loss keep a state; for the others
    both are empty.
    """

    def factor(self, gradients: int) -> float: ...

    def observe(self, loss: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def apply(
    schedule: Schedule, optimizer: torch.optim.Optimizer, *, lr: float, gradients: int
) -> float:
    """Set the learning rate of every parameter group to base times factor, and return it."""
    now = lr * schedule.factor(gradients)
    for group in optimizer.param_groups:
        group["lr"] = now
    return now


# -----------------------------------------------------------------------------------------------
# rules for learners


def linear_scale(learners: int) -> float:
    """Goyal et al.: n learners make a batch n times as large, so the learning rate is n times as
    large. For SGD.
    """
    return float(_at_least_one("learners", learners))


def sqrt_scale(learners: int) -> float:
    """sqrt(n): the noise of the averaged gradient falls with it. For Adam, whose steps do not
    grow with gradients.
    """
    return math.sqrt(_at_least_one("learners", learners))


def local_scale(optimizer: torch.optim.Optimizer | str, learners: int) -> float:
    """What a strategy whose optimizers step on *local* gradients needs on top of the synchronous
    learning rate.

    SGD's updates are linear in the gradient: the mean of the replicas moves exactly as with the
    averaged gradient, factor 1. Adam normalises each learner's own noisy gradient, so the mean
    moves less: by sqrt(n) where noise is all. A rule to begin with, not an optimum. On AN4 with 4
    learners (benchmarks/ACOUSTIC.md) the best of the rates tried were 1.0 (DASO), 1.25 (AD-PSGD)
    and 1.5 (delay-by-one) times the synchronous .004; at the rule's .008 delay-by-one and AD-PSGD
    were worse. So search, or lower it.
    """
    return sqrt_scale(learners) if _is_adam(optimizer) else 1.0


def batch_scale(optimizer: torch.optim.Optimizer | str, learners: int) -> float:
    """What the larger batch of n learners needs on top of one learner's rate: n for SGD, sqrt(n)
    for Adam.
    """
    return sqrt_scale(learners) if _is_adam(optimizer) else linear_scale(learners)


def _is_adam(optimizer: torch.optim.Optimizer | str) -> bool:
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    return "adam" in name.lower()


# --------------------------------------------------------------------------------------------------
# schedules


class _Stateless:
    def observe(self, loss: float) -> None:
        """A function of the gradient count alone."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


@dataclass(frozen=True)
class Constant(_Stateless):
    """factor(g) = 1"""

    def factor(self, gradients: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmUp(_Stateless):
    """From 1 to `scale` over `gradients`, linearly, then `scale`:  1 + (scale - 1) * min(1, g /
    gradients)
    """

    scale: float
    gradients: int

    def __post_init__(self) -> None:
        _positive("scale", self.scale)
        if self.gradients < 0:
            raise ValueError(f"gradients must be at least 0, got {self.gradients}")

    def factor(self, gradients: int) -> float:
        done = 1.0 if gradients >= self.gradients else gradients / self.gradients
        return 1.0 + (self.scale - 1.0) * done


@dataclass(frozen=True)
class OneCycle(_Stateless):
    """Cosine from 1/start up to 1 at `peak` of the budget, then cosine down to 1/end, where it
    stays.
    """

    total: int
    peak: float = 0.3
    start: float = 25.0
    end: float = 1e4

    def __post_init__(self) -> None:
        _at_least_one("total", self.total)
        _positive("start", self.start)
        _positive("end", self.end)
        if not 0.0 <= self.peak < 1.0:
            raise ValueError(f"peak must be in [0, 1), got {self.peak}")

    def factor(self, gradients: int) -> float:
        at = min(1.0, gradients / self.total)
        if at < self.peak:
            return _cosine(1.0 / self.start, 1.0, at / self.peak)
        return _cosine(1.0, 1.0 / self.end, (at - self.peak) / (1.0 - self.peak))


class Plateau:
    """`cut` the rate after `patience` observations that do not improve the best loss by more than
    `threshold` of it.

    The defaults are the DASO authors' (observe once an epoch). Not a function of g alone: its state
    is saved.
    """

    def __init__(
        self,
        *,
        cut: float = 0.5,
        patience: int = 5,
        threshold: float = 0.05,
        smallest: float = 1e-4,
    ) -> None:
        if not 0.0 < cut < 1.0:
            raise ValueError(f"cut must be between 0 and 1, got {cut}")
        self.cut = cut
        self.patience = _at_least_one("patience", patience)
        self.threshold = threshold
        self.smallest = smallest
        self._factor = 1.0
        self._best = math.inf
        self._bad = 0

    def factor(self, gradients: int) -> float:
        return self._factor

    def observe(self, loss: float) -> None:
        if (
            loss < self._best - self.threshold * abs(self._best)
            if math.isfinite(self._best)
            else math.isfinite(loss)
        ):
            self._best = loss
            self._bad = 0
            return
        self._bad += 1
        if self._bad > self.patience:
            self._factor = max(self._factor * self.cut, self.smallest)
            self._bad = 0

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self._factor, "best": self._best, "bad": self._bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._factor = float(state["factor"])
        self._best = float(state["best"])
        self._bad = int(state["bad"])


class Product:
    """factor(g) = the product of the parts: warm-up times plateau."""

    def __init__(self, *parts: Schedule) -> None:
        self.parts = parts

    def factor(self, gradients: int) -> float:
        return math.prod(part.factor(gradients) for part in self.parts)

    def observe(self, loss: float) -> None:
        for part in self.parts:
            part.observe(loss)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(state[str(i)])


Name = Literal["constant", "warm-up", "one-cycle", "plateau"]
NAMES: tuple[Name, ...] = ("constant", "warm-up", "one-cycle", "plateau")


def schedule(
    name: str,
    *,
    total: int,
    epoch: int,
    learners: int = 1,
    warm_up: float = 5.0,
    optimizer: str = "sgd",
) -> Schedule:
    """A schedule by name, for a budget of `total` gradients and `epoch` gradients to an epoch.

    "warm-up" and "plateau" scale with the learners (`batch_scale`: n for SGD, sqrt(n) for Adam)
    over `warm_up` epochs, but no more than a tenth of the budget; the base rate of "constant" and
    "one-cycle" is taken as it is.
    """
    _at_least_one("total", total)
    _at_least_one("epoch", epoch)
    ramp = WarmUp(batch_scale(optimizer, learners), min(round(warm_up * epoch), total // 10))
    if name == "constant":
        return Constant()
    if name == "one-cycle":
        return OneCycle(total)
    if name == "warm-up":
        return ramp
    if name == "plateau":
        return Product(ramp, Plateau())
    raise ValueError(f"schedule must be one of {', '.join(NAMES)}, got {name!r}")


def _cosine(start: float, end: float, at: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * at)) / 2.0


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
