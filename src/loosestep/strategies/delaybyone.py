"""Delay-by-one: the global average is in flight during exactly one gradient computation (Cui et al., 2110.11199)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from loosestep.strategies.base import Exchanges, State, Strategy, require_choice


@dataclass(frozen=True, kw_only=True)
class DelayByOne(Strategy):
    """`x_{k+1} = mean(x_k) - alpha g(x_k)`: models are averaged while the next gradient is computed, then both land.

    With `older_gradient` the gradient is one step older still, `x_{k+1} = mean(x_k) - alpha g(x_{k-1})`: what lands is
    held back for one step before the model that computes gradients sees it.
    """

    name: ClassVar[str] = "delay-by-one"

    older_gradient: bool = False
    replica: Literal["rank", "node"] = "rank"

    def __post_init__(self) -> None:
        require_choice("replica", self.replica, ("rank", "node"))
        require_choice("older_gradient", str(bool(self.older_gradient)), ("True", "False"))

    def boundary(self, state: State, run: Exchanges) -> None:
        """Land the average of the last step's models, send this step's."""
        state["step"] += 1
        if run.in_flight is not None:
            run.fold()
        run.start()
