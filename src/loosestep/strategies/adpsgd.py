"""AD-PSGD: asynchronous decentralised parallel SGD (Lian et al., 1710.06952; for acoustic models
2110.11199).

In the papers' letters: `X_{k+1} = X_k T_k - alpha G(X_{k - tau_k})`. Every learner computes
gradients on its own model while its communication thread averages a shadow of it with neighbours;
T_k is one pair of learners at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from loosestep.strategies.base import (
    Gossiping,
    State,
    Strategy,
    require,
    require_choice,
    require_count,
    whole_values,
)
from loosestep.topology.graphs import GRAPHS, GossipGraph


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy[Gossiping]):
    """Learners average with one neighbour at a time, in the background; a slow or dead one delays
    nobody.

    `graph`: "ring", "random-ring" (a new permutation every round, from `seed` and round),
    "pairs", "exponential", a graph {learner: neighbours} or a symmetric, doubly stochastic matrix.
    `rate`: the most models a learner begins to exchange per step, a part of one at a time; fewer
    when communication would make steps slower by more than `slowdown` (.03: 3 %). `max_staleness`: what is folded was read at most so many
    steps before; own exchanges are waited for, unless their peer is silent. `lockstep`: rounds of
    exactly the mixing matrix, waiting, so every learner must make as many steps; for tests.
    `average_momentum`: the optimizer's momentum is averaged too. `replica="node"`: the ranks of a
    node are one learner: gradients are averaged inside, local rank k exchanges shard k.
    """

    name: ClassVar[str] = "adpsgd"
    summary: ClassVar[str] = "gossip: average with one neighbour at a time; nobody waits"

    graph: str | Mapping[int, Sequence[int]] | Sequence[Sequence[float]] = "ring"
    rate: float = 1.0
    max_staleness: int | None = None
    lockstep: bool = False
    average_momentum: bool = False
    replica: Literal["rank", "node"] = "rank"
    seed: int = 0
    slowdown: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.graph, "tolist"):  # a matrix of numpy or torch
            object.__setattr__(self, "graph", self.graph.tolist())
        if isinstance(self.graph, str) or not isinstance(self.graph, Mapping | Sequence):
            known = ", ".join(GRAPHS)
            require(
                self.graph in GRAPHS,
                f"unknown graph {self.graph!r}; valid are {known}, a graph {{rank: "
                "neighbours} or a mixing matrix",
            )
        require(
            isinstance(self.rate, int | float) and 0 < self.rate <= 16,
            f"rate must be above 0 and at most 16 exchanges per step, got {self.rate!r}",
        )
        if self.max_staleness is not None:
            require_count("max_staleness", self.max_staleness, least=1)
        for field in ("lockstep", "average_momentum"):
            require(
                isinstance(getattr(self, field), bool),
                f"{field} must be true or false, got {getattr(self, field)!r}",
            )
        require_choice("replica", self.replica, ("rank", "node"))
        require_count("seed", self.seed, least=0)
        require(
            isinstance(self.slowdown, int | float) and 0 < self.slowdown <= 1,
            f"slowdown must be above 0 and at most 1, got {self.slowdown!r}",
        )

    @property
    def gossip(self) -> ADPSGD:
        """As its fields say."""
        return self

    @property
    def codecs(self) -> list[str]:
        """Those that are fine enough for parameters: two learners agree on nothing else."""
        return whole_values()

    def graph_of(self, learners: int) -> GossipGraph:
        """Who is whose neighbour; refuses a graph that does not fit the number of learners."""
        return GossipGraph(self.graph, range(learners), seed=self.seed)

    def begin(self) -> State:
        """No step, no round."""
        return {"step": 0, "round": 0}

    def boundary(self, state: State, run: Gossiping) -> None:
        """One step of a learner."""
        state["step"] += 1
        if self.lockstep:
            run.mix(state["round"])
            state["round"] += 1
            return
        if self.max_staleness is not None:
            run.wait_for(self.max_staleness)
        run.fold()
        share = run.due()
        while share > 0:
            run.exchange(state["round"], min(1.0, share))
            state["round"] += 1
            share -= 1.0
