"""Delay-by-one: the global average is in flight during exactly one gradient computation (Cui et
al., 2110.11199).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from loosestep.core.contracts import Landed, Vector
from loosestep.core.replica.replica import Replica
from loosestep.strategies.base import (
    Exchanges,
    Learner,
    State,
    Strategy,
    require,
    require_choice,
)


@dataclass(frozen=True, kw_only=True)
class DelayByOne(Strategy[Exchanges]):
    """`x_{k+1} = mean(x_k) - alpha g(x_k)`: models are averaged while the next gradient is
    computed, then both land.

    With `older_gradient` the gradient is one step older still, `x_{k+1} = mean(x_k) - alpha
    g(x_{k-1})`: the model that computes gradients is held one step behind (and one more copy of the
    parameters is kept for it). `replica="auto"`: nodes are the replicas where there are several and
    one of them has several ranks, else every rank is one.
    """

    name: ClassVar[str] = "delay-by-one"
    summary: ClassVar[str] = "models are averaged while the next gradient is computed"

    older_gradient: bool = False
    replica: Learner = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("replica", self.replica, ("auto", "rank", "node"))
        require(
            isinstance(self.older_gradient, bool),
            f"older_gradient must be true or false, got {self.older_gradient!r}",
        )

    @property
    def needs_host(self) -> bool:
        """For the older form, whose newest models are not those that compute gradients."""
        return self.older_gradient

    @property
    def folds_deltas(self) -> bool:
        """But for the older form."""
        return not self.older_gradient

    @property
    def codecs(self) -> list[str]:
        """None with `older_gradient`, which puts the mean itself in the place of a model."""
        return [] if self.older_gradient else super().codecs

    def prepare(self, state: State, replica: Replica, part: tuple[int, int] | None = None) -> None:
        """x_{-1} = x_0"""
        if self.older_gradient:
            state["behind"] = replica.snapshot(keep=False)
            state["ahead"] = replica.snapshot(keep=False)

    def boundary(self, state: State, run: Exchanges) -> None:
        """Land the average of the last step's models, send this step's."""
        state["step"] += 1
        # the first step: all models were equal, their mean is x_0
        if run.in_flight is None and self.older_gradient:
            run.start(**self.form(state))
        if run.in_flight is not None:
            self.land(state, run.replica, run.fold())
        run.start(**self.form(state))

    def form(self, state: State) -> dict[str, Any]:
        """The older form needs the mean itself, of the newest models."""
        return {"form": "mean", "vector": state["ahead"]} if self.older_gradient else {}

    def land(self, state: State, replica: Replica, landed: Landed) -> None:
        """x_{k+1} <- mean(x_k) + u"""
        if not self.older_gradient:
            replica.fold(landed.vector)
            return
        moved = replica.snapshot(keep=False)  # x_{k-1} + u
        torch._foreach_sub_(moved, state["behind"])
        torch._foreach_add_(moved, landed.vector)
        replica.assign(state["ahead"])  # the next gradient is computed at x_k
        state["behind"] = state["ahead"]
        state["ahead"] = moved

    def truth(self, state: State, replica: Replica) -> Vector:
        """The newest model, which no gradient was computed at yet."""
        return (
            [t.clone() for t in state["ahead"]]
            if self.older_gradient
            else replica.snapshot(keep=False)
        )
