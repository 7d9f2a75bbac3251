"""What a strategy is: what the user chose (a frozen dataclass) and where it is (a plain dict).

A strategy decides when to exchange, with whom, and how to fold. It never communicates itself: it
sees `Exchanges`, so the same object runs on real processes, in a simulator and in a replay.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Protocol

import torch

from loosestep.core.contracts import Landed, Outer, Scope, Vector
from loosestep.core.replica.replica import Replica

State = dict[str, Any]


class Exchanges(Protocol):
    """What a run offers its strategy at a step boundary."""

    @property
    def in_flight(self) -> int | None:
        """The step at which the exchange in flight was started, None without one."""

    def start(
        self,
        *,
        form: Literal["mean", "delta"] = "delta",
        lane: int | None = None,
        vector: Vector | None = None,
        outer: Outer | None = None,
    ) -> None:
        """Take a snapshot (or `vector` in its place) and exchange it with all replicas in the
        background. `outer` makes of their mean what they become.
        """

    def fold(self) -> None:
        """Wait for the exchange in flight and hand it to the strategy's `land`."""

    def gather(self) -> None:
        """Wait for all replicas and make each of them their mean."""

    def average(self, *, wire: torch.dtype | None = None) -> None:
        """Blocking, between replicas that are in step: parameters <- mean, sent as `wire`."""

    def average_node(self) -> None:
        """Blocking, inside the node: parameters <- the mean of the node's ranks."""


class Gossiping(Protocol):
    """What a run offers a gossip strategy at a step boundary."""

    def fold(self) -> None:
        """y <- y + u; x <- y: what was averaged in the background lands, what was learned is
        published.
        """

    def due(self) -> int:
        """How many exchanges to begin now: `rate`, less when communication costs too much CPU."""

    def exchange(self, round_number: int) -> None:
        """Begin to average with this learner's partner in its round; never waits."""

    def mix(self, round_number: int) -> None:
        """One round in lockstep, with exactly the round's mixing matrix; waits for the
        neighbours.
        """

    def wait_for(self, age: int) -> None:
        """Wait for own exchanges that were begun `age` or more steps ago."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base of all strategies. `replica` says who is one learner: a rank, a node, or everybody
    together.
    """

    name: ClassVar[str]
    gossip: ClassVar[bool] = False

    @property
    def learner(self) -> Scope:
        """Whose ranks hold the same parameters."""
        return getattr(self, "replica", "rank")

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are ever averaged during backward."""
        return self.learner != "rank"

    @property
    def spans_world(self) -> bool:
        """Whether the gradients of all ranks are ever averaged during backward."""
        return self.learner == "world"

    def begin(self) -> State:
        """The state before the first step."""
        return {"step": 0, "exchanges": 0}

    def prepare(self, state: State, replica: Replica, part: tuple[int, int] | None = None) -> None:
        """Called once, when all replicas hold the same parameters. `part`: the only row of the
        vector, of so many, that this rank exchanges itself.
        """

    def truth(self, state: State, replica: Replica) -> Vector:
        """The parameters this replica stands for (in new memory): those of the model, unless
        some are held back.
        """
        return replica.snapshot(keep=False)

    def scope(self, state: State) -> Scope:
        """Over whom the gradients of the next backward are averaged."""
        return self.learner

    def boundary(self, state: State, run: Any) -> None:
        """Called after every optimizer step; `run` is an `Exchanges`, or for gossip a
        `Gossiping`.
        """
        state["step"] += 1

    def land(
        self, state: State, replica: Replica, landed: Landed, *, staleness: int, replicas: int
    ) -> None:
        """Fold what has arrived, `staleness` steps after its snapshot."""
        replica.fold(landed.vector)

    def form(self, state: State) -> dict[str, Any]:
        """How this strategy's exchanges travel: the arguments of `Exchanges.start`."""
        return {}

    def gathered(self, state: State) -> None:
        """Another rank has called all replicas together (a cool-down): follow it."""

    def scaled(self, state: State) -> None:
        """A step was left out, or could have been, as a GradScaler does: replicas may scale
        their losses differently.
        """

    def __str__(self) -> str:
        """The form that `loosestep.strategy` reads: the name and the fields that differ from
        their defaults.
        """
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_count(name: str, value: int, *, least: int) -> None:
    """A whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(
        whole and value >= least,
        f"{name} must be a whole number of at least {least}, got {value!r}",
    )


def require_delay(delay: int, period: int) -> None:
    """An exchange lands before the next one starts."""
    require(
        delay <= period,
        f"delay must be at most period, got delay={delay} and period={period}: an exchange is "
        "folded before the next one starts",
    )


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    require(
        value in choices, f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
    )
