"""Local SGD and its hierarchical, post-local and delayed forms (Lin et al., 1808.07217)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loosestep.core.contracts import Scope
from loosestep.strategies.base import (
    Exchanges,
    Learner,
    State,
    Strategy,
    is_due,
    require,
    require_choice,
    require_count,
)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[Exchanges]):
    """H local steps, then all replicas average their parameters.

    `period` is H. With `delay=0` the average is waited for (torch's PostLocalSGD); with `delay=W`
    it lands W steps later as a delta, hidden behind compute. Before step `start` the gradients of
    all ranks are averaged (post-local SGD). `replica="node"`: gradients are averaged inside the
    node, nodes are the replicas; with `local_period=H_local > 1` the ranks of a node average
    parameters every H_local steps instead, and nodes every `H_local * period` steps. "auto": nodes
    where there are several and one of them has several ranks, else "rank".
    """

    name: ClassVar[str] = "localsgd"
    summary: ClassVar[str] = "replicas step alone, and once a period average their parameters"

    period: int = 8
    delay: int = 0
    start: int = 0
    local_period: int = 1
    replica: Learner = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, least=1)
        require_count("delay", self.delay, least=0)
        require_count("start", self.start, least=0)
        require_count("local_period", self.local_period, least=1)
        require_choice("replica", self.replica, ("auto", "rank", "node"))
        require(
            self.delay <= self.period * self.local_period,
            f"delay must be at most the {self.period * self.local_period} steps between "
            f"exchanges, got {self.delay}: an exchange is folded before the next one starts",
        )
        require(
            self.local_period == 1 or self.replica != "rank",
            f"local_period={self.local_period} averages inside a node and needs replica='node', "
            "got replica='rank'",
        )

    @property
    def averages_gradients(self) -> bool:
        """Before `start`, and inside nodes."""
        return self.start > 0 or self.learner == "node"

    @property
    def spans_world(self) -> bool:
        """Before `start`."""
        return self.start > 0

    @property
    def parts_nodes(self) -> bool:
        """With local steps."""
        return self.local_period > 1

    def period_at(self, state: State) -> int:
        """Always the same."""
        return self.period

    def scope(self, state: State) -> Scope:
        """World before `start`; then the node, unless its ranks are on their own between local
        averages.
        """
        if state["step"] < self.start:
            return "world"
        return "node" if self.learner == "node" and self.local_period == 1 else "rank"

    def boundary(self, state: State, run: Exchanges) -> None:
        """Fold what is due, average what is due."""
        state["step"] += 1
        step = state["step"]
        if step <= self.start:
            return
        if is_due(state, run, self.delay):
            self.land(state, run.replica, run.fold())
        since = step - self.start
        if self.local_period > 1 and since % self.local_period == 0:
            run.average_node()
        if since % (self.period * self.local_period) == 0:
            run.start(now=self.delay == 0)
            if self.delay == 0:
                self.land(state, run.replica, run.fold())
