"""DASO: distributed asynchronous and selective optimization (Coquelin et al., 2104.05588).

In the paper's letters: P nodes; B = `period`, the steps between global exchanges; W = `delay`, the
steps from sending to merging; S the steps waited. Gradients are averaged inside the node on every
step; across nodes parameters travel asynchronously, every B steps, and a plateau of the training
loss halves B and W until they return to their maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from loosestep.codecs import Codec
from loosestep.core.contracts import Landed, Scope
from loosestep.core.replica.replica import Replica
from loosestep.registry import Preset
from loosestep.strategies.base import (
    Exchanges,
    State,
    Strategy,
    is_due,
    require,
    require_choice,
    require_count,
    require_delay,
    whole_values,
)


@dataclass(frozen=True, kw_only=True)
class DASO(Strategy[Exchanges]):
    """Nodes are the replicas. Steps: `warmup` in lockstep, then cycling, then `cooldown` in
    lockstep until `total`.

    Ours by default; `DASO.paper()` is the published behaviour. They differ in `merge`: "delta"
    keeps every local step (`x += mean(s) - s`), "stale" is `x <- (2 S x + sum_i s_i) / (2 S + P)`;
    `lanes`: "sharded" sends 1/L of the vector on each of L lanes, "rotating" all of it on one lane
    at a time; `ramp`: warm-up and cool-down average "gradients" in backward, or "parameters" as
    bfloat16 after every step; `epoch`: with a number of steps, the exchange at the end of every
    epoch is waited for.
    """

    name: ClassVar[str] = "daso"
    summary: ClassVar[str] = "nodes exchange models in the background, once a period"
    presets: ClassVar[Mapping[str, Preset]] = {
        "daso-paper": Preset("paper", "daso as it was published")
    }

    period: int = 4
    delay: int = 1
    warmup: int = 0
    cooldown: int = 0
    total: int | None = None
    epoch: int | None = None
    window: int = 100
    patience: int = 3
    threshold: float = 0.05
    merge: Literal["delta", "stale"] = "delta"
    lanes: Literal["sharded", "rotating"] = "sharded"
    ramp: Literal["gradients", "parameters"] = "gradients"

    @classmethod
    def paper(cls, **overrides: Any) -> DASO:
        """The published behaviour; W is a quarter of B, at least 1."""
        period = overrides.get("period", 4)
        preset: dict[str, Any] = {"merge": "stale", "lanes": "rotating", "ramp": "parameters"}
        if isinstance(period, int):
            preset["delay"] = max(1, period // 4)
        return cls(**{**preset, **overrides})

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (
            ("period", 1),
            ("delay", 0),
            ("warmup", 0),
            ("cooldown", 0),
            ("window", 1),
            ("patience", 1),
        ):
            require_count(field, getattr(self, field), least=least)
        for field in ("total", "epoch"):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field), least=1)
        require_delay(self.delay, self.period)
        require(
            self.cooldown == 0 or self.total is not None,
            f"cooldown={self.cooldown} needs total, the number of optimizer steps of the whole "
            "run, to know when to begin",
        )
        if self.total is not None:
            require(
                self.warmup + self.cooldown <= self.total,
                f"warmup + cooldown must fit into total={self.total} steps, got {self.warmup} + "
                f"{self.cooldown}",
            )
        require(
            isinstance(self.threshold, int | float) and 0 <= self.threshold < 1,
            f"threshold must be at least 0 and below 1, got {self.threshold!r}",
        )
        require_choice("merge", self.merge, ("delta", "stale"))
        require_choice("lanes", self.lanes, ("sharded", "rotating"))
        require_choice("ramp", self.ramp, ("gradients", "parameters"))

    @property
    def codecs(self) -> list[str]:
        """Stale merges mix parameters themselves; on rotating lanes no rank knows the reference."""
        if self.merge == "stale":
            return whole_values()
        return [] if self.lanes == "rotating" else super().codecs

    @property
    def moves_in(self) -> Codec | None:
        """Not where parameters themselves are mixed."""
        return None if self.merge == "stale" else super().moves_in

    @property
    def learner(self) -> Scope:
        """A node is one learner."""
        return "node"

    @property
    def spans_world(self) -> bool:
        """In a warm-up or cool-down of gradients."""
        return self.ramp == "gradients" and self.warmup + self.cooldown > 0

    @property
    def exchanges_alike(self) -> bool:
        """Not where lanes take turns, or a ramp rounds what it sends."""
        alike = self.lanes == "sharded" and self.ramp == "gradients"
        return alike and super().exchanges_alike

    @property
    def folds_deltas(self) -> bool:
        """In our own merge."""
        return self.merge == "delta"

    def period_at(self, state: State) -> int:
        """As the plateau controller has left it."""
        return int(state["period"])

    def begin(self) -> State:
        """Before the first step: the longest period, no loss seen."""
        return {
            "step": 0,
            "exchanges": 0,
            "last": self.warmup,
            "period": self.period,
            "delay": self.delay,
            "cooling": False,
            "scaled": False,
            "best": None,
            "stalled": 0,
            "loss_sum": 0.0,
            "loss_count": 0,
        }

    def ramping(self, state: State) -> bool:
        """Whether the next step is in lockstep: warm-up or cool-down."""
        return bool(state["step"] < self.warmup or state["cooling"])

    def scope(self, state: State) -> Scope:
        """Gradients of the node; of the world while ramping, unless nodes that cycled scale
        their losses differently.
        """
        comparable = not (state["cooling"] and state.get("scaled", False))
        return (
            "world" if self.ramping(state) and self.ramp == "gradients" and comparable else "node"
        )

    def boundary(self, state: State, run: Exchanges) -> None:
        """One step of the algorithm."""
        lockstep = self.ramping(state)
        scope = self.scope(state)
        state["step"] += 1
        step = state["step"]
        if lockstep:
            if scope == "node":
                run.average(wire=torch.bfloat16 if self.ramp == "parameters" else None)
            return
        if is_due(state, run, state["delay"]):
            self.land(state, run.replica, run.fold())
        if self.cooldown and self.total is not None and step >= self.total - self.cooldown:
            run.gather()
            return
        epoch_ends = self.epoch is not None and step % self.epoch == 0
        if step - state["last"] >= state["period"] or epoch_ends:
            if run.in_flight is not None:
                self.land(state, run.replica, run.fold())
            run.start(**self.form(state), now=state["delay"] == 0 or epoch_ends)
            state["last"] = step
            if state["delay"] == 0 or epoch_ends:
                self.land(state, run.replica, run.fold())

    def form(self, state: State) -> dict[str, Any]:
        """How the next exchange travels."""
        lane = None if self.lanes == "sharded" else state["exchanges"]
        if self.merge == "delta":
            return {"lane": lane}
        return {"form": "mean", "lane": lane, "wire": self.codec and torch.bfloat16}

    def land(self, state: State, replica: Replica, landed: Landed) -> None:
        """Merge, then let the loss that came along decide the next period."""
        if self.merge == "delta":
            replica.fold(landed.vector)
        elif landed.replicas > 1:
            replica.blend(landed.vector, waited=landed.staleness, replicas=landed.replicas)
        state["loss_sum"] += landed.loss_sum
        state["loss_count"] += landed.loss_count
        if state["loss_count"] >= self.window * len(landed.steps):
            self.evaluate(state, state["loss_sum"] / state["loss_count"])
            state["loss_sum"] = 0.0
            state["loss_count"] = 0

    def evaluate(self, state: State, loss: float) -> None:
        """The plateau controller: B and W halve after `patience` evaluations without progress,
        and start over at 1.
        """
        best = state["best"]
        if math.isfinite(loss) and (best is None or loss < best - self.threshold * abs(best)):
            state["best"] = loss
            state["stalled"] = 0
            return
        state["stalled"] += 1
        if state["stalled"] < self.patience:
            return
        state["stalled"] = 0
        if state["period"] == 1:
            state["period"] = self.period
            state["delay"] = self.delay
        else:
            state["period"] = max(1, state["period"] // 2)
            state["delay"] = min(max(min(1, self.delay), state["delay"] // 2), state["period"])

    def gathered(self, state: State) -> None:
        """The cool-down has begun, wherever this rank's own count is."""
        state["cooling"] = True

    def scaled(self, state: State) -> None:
        """In a cool-down, averages of gradients of different scales would be wrong: parameters
        are averaged instead.
        """
        state["scaled"] = True
