"""DiLoCo: many inner steps, then one outer step on what they have moved (Douillard et al.,
2311.08105).

In the paper's letters: H = `period`; theta, the model that all replicas agree on; `mean_i(theta -
x_i)`, the outer gradient, which SGD with Nesterov momentum follows. With a `delay` it is the
overlapped form (2501.18512), of the whole vector at once: the exchange is in flight for W steps,
and what they moved is kept (`x <- x + theta' - s`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from loosestep.core.contracts import Vector
from loosestep.core.replica.replica import Replica
from loosestep.strategies.base import (
    Exchanges,
    Learner,
    State,
    Strategy,
    is_due,
    require,
    require_choice,
    require_count,
    require_delay,
)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy[Exchanges]):
    """H local steps, then all replicas follow the mean of what they moved, with the momentum of the
    exchanges before.

    `period` is H. With `delay=0` the exchange is waited for; with `delay=W` it lands W steps later,
    hidden behind compute. `outer_lr` and `outer_momentum` are of the outer step. `replica="node"`:
    gradients are averaged inside the node, nodes are the replicas; "auto": where there are several
    nodes and one of them has several ranks, else "rank". Theta and its momentum are kept
    by the ranks that exchange them: of the L ranks of a node each keeps its L-th part of both,
    beside the snapshot; where every rank is a replica, all of both.
    """

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "as localsgd, and the averages have a momentum: rare exchanges"

    period: int = 32
    delay: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    replica: Learner = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, least=1)
        require_count("delay", self.delay, least=0)
        require_delay(self.delay, self.period)
        require(
            isinstance(self.outer_lr, int | float) and 0 < self.outer_lr <= 2,
            "outer_lr must be above 0 and at most 2 (1 without momentum is local SGD), got "
            f"{self.outer_lr!r}",
        )
        require(
            isinstance(self.outer_momentum, int | float) and 0 <= self.outer_momentum < 1,
            f"outer_momentum must be at least 0 and below 1, got {self.outer_momentum!r}",
        )
        require_choice("replica", self.replica, ("auto", "rank", "node"))

    def period_at(self, state: State) -> int:
        """Always the same."""
        return self.period

    def prepare(self, state: State, replica: Replica, part: tuple[int, int] | None = None) -> None:
        """theta_0 = x_0, at rest"""
        row, rows = part or (0, 1)
        theta = [flat.view(rows, -1)[row] for flat in replica.snapshot(keep=False)]
        theta = [
            flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True) for flat in theta
        ]
        state["outer"] = {"theta": theta, "momentum": [torch.zeros_like(flat) for flat in theta]}

    def reference(self, state: State) -> Vector:
        """theta"""
        theta: Vector = state["outer"]["theta"]
        return theta

    def boundary(self, state: State, run: Exchanges) -> None:
        """Fold what is due, exchange what is due."""
        state["step"] += 1
        step = state["step"]
        if is_due(state, run, self.delay):
            self.land(state, run.replica, run.fold())
        if step % self.period == 0:
            run.start(**self.form(state), now=self.delay == 0)
            if self.delay == 0:
                self.land(state, run.replica, run.fold())

    def form(self, state: State) -> dict[str, Any]:
        """Every exchange is an outer step."""
        return {"outer": partial(self.advance, state["outer"])}

    def advance(self, outer: State, number: int, span: slice, mean: torch.Tensor) -> torch.Tensor:
        """theta' from the mean of the snapshots: a `span` of tensor `number` of this rank's
        part.
        """
        theta, momentum = (
            _there(outer[name], number, mean.device)[span] for name in ("theta", "momentum")
        )
        gradient = theta - mean
        momentum.mul_(self.outer_momentum).add_(gradient)
        return theta.sub_(gradient.add_(momentum, alpha=self.outer_momentum), alpha=self.outer_lr)


def _there(vector: list[torch.Tensor], number: int, device: torch.device) -> torch.Tensor:
    """The tensor, brought to where the means are made."""
    if vector[number].device != device:
        vector[number] = vector[number].to(device)
    return vector[number]
