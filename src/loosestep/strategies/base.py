"""What a strategy is: what the user chose (a frozen dataclass) and where it is (a plain dict).

A strategy decides when to exchange, with whom, and how to fold. It never communicates itself: it
sees `Exchanges` or `Gossiping`, so the same object runs on real processes, in a simulator, on
clocks alone and in a replay. What it needs elsewhere are facts on its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Protocol

import torch
from typing_extensions import Self, TypeVar

from loosestep.codecs import Codec
from loosestep.codecs import codec as named_codec
from loosestep.codecs.registry import CODECS
from loosestep.core.contracts import Landed, Outer, Scope, Vector
from loosestep.core.replica.replica import Replica
from loosestep.registry import Preset, spell
from loosestep.strategies.registry import STRATEGIES
from loosestep.topology.graphs import GossipGraph

State = dict[str, Any]
Learner = Literal["auto", "rank", "node"]


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
        wire: torch.dtype | None = None,
        now: bool = False,
    ) -> None:
        """Take a snapshot (or `vector` in its place) and exchange it with all replicas in the
        background, or `now`. `outer` makes of their mean what they become; `wire`: what values
        travel as, where no codec carries what they have changed.
        """

    @property
    def replica(self) -> Replica:
        """This rank's copy of the model, for what has landed."""

    def fold(self) -> Landed:
        """Wait for the exchange in flight; the strategy puts what has landed into the replica."""

    def gather(self) -> None:
        """Wait for all replicas and make each of them their mean."""

    def average(self, *, wire: torch.dtype | None = None) -> None:
        """Blocking, between replicas that are in step: parameters <- mean, sent as `wire`."""

    def average_node(self) -> None:
        """Blocking, inside the node: parameters <- the mean of the node's ranks."""


def is_due(state: State, run: Exchanges, delay: int) -> bool:
    """Whether the exchange in flight was started `delay` or more steps ago."""
    return run.in_flight is not None and state["step"] - run.in_flight >= delay


class Gossiping(Protocol):
    """What a run offers a gossip strategy at a step boundary."""

    def fold(self) -> None:
        """y <- y + u; x <- y: what was averaged in the background lands, what was learned is
        published.
        """

    def due(self) -> float:
        """How many models to begin to exchange now, or which share of one: `rate`, less when
        communication makes steps too slow.
        """

    def exchange(self, round_number: int, share: float = 1.0) -> None:
        """Begin to average a share of the model with this learner's partner in its round; never
        waits.
        """

    def mix(self, round_number: int) -> None:
        """One round in lockstep, with exactly the round's mixing matrix; waits for the
        neighbours.
        """

    def wait_for(self, age: int) -> None:
        """Wait for own exchanges that were begun `age` or more steps ago."""


class GossipPlan(Protocol):
    """What the engine and the clocks of gossip ask of a strategy."""

    @property
    def rate(self) -> float:
        """The most exchanges a learner begins per step."""

    @property
    def slowdown(self) -> float:
        """By which share communication may make steps slower."""

    @property
    def max_staleness(self) -> int | None:
        """How many steps before it is folded a value may have been read; None: any number."""

    @property
    def lockstep(self) -> bool:
        """Whether every round is exactly the mixing matrix."""

    @property
    def average_momentum(self) -> bool:
        """Whether the optimizer's momentum is averaged too."""

    @property
    def moves_in(self) -> Codec | None:
        """The codec of what pairs exchange; None: parameters as they are."""

    @property
    def replica(self) -> Learner:
        """Who is one learner."""

    def graph_of(self, learners: int) -> GossipGraph:
        """Who is whose neighbour; refuses a graph that does not fit the number of learners."""

    def begin(self) -> State:
        """The state before the first step."""

    def boundary(self, state: State, run: Gossiping) -> None:
        """Called after every optimizer step."""


Asks = TypeVar("Asks", default=Any, contravariant=True)
"""What a strategy asks of a run: `Exchanges` or `Gossiping`."""


@dataclass(frozen=True, kw_only=True)
class Strategy(Generic[Asks]):
    """Base of all strategies. A subclass with a `name` is known by it everywhere."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: for help, the demo and the documentation."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Further names, for the class with other defaults."""

    codec: str | Codec | None = None

    def __post_init__(self) -> None:
        if self.codec is not None:
            chosen = named_codec(self.codec)
            object.__setattr__(self, "codec", chosen)
            require(
                chosen.name in self.codecs,
                f"{self.name} cannot have codec={chosen} with these fields; the codecs it can have "
                f"are: {', '.join(self.codecs) or 'none'}",
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            STRATEGIES.enter(cls)

    # Facts ----------------------------------------------------------------------------------------

    @property
    def replica(self) -> Learner:
        """Who is one learner: a rank, a node, or whichever suits the nodes ("auto")."""
        return "rank"

    @property
    def codecs(self) -> list[str]:
        """The names of the codecs it can have."""
        return list(CODECS.entries())

    @property
    def moves_in(self) -> Codec | None:
        """The codec of what replicas exchange; None if that is parameters as they are."""
        return None if self.codec is None else named_codec(self.codec)

    @property
    def gradients_in(self) -> Codec | None:
        """The codec of gradients where they are averaged between nodes."""
        return None if self.codec is None or not self.spans_world else named_codec(self.codec)

    @property
    def learner(self) -> Scope:
        """Whose ranks hold the same parameters."""
        if self.replica == "auto":
            raise ValueError(
                f"who is one learner under {self} depends on the nodes: ask "
                "strategy.fitted(ranks_of_nodes)"
            )
        return self.replica

    @property
    def gossip(self) -> GossipPlan | None:
        """How learners gossip; None where all replicas exchange together."""
        return None

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are ever averaged during backward."""
        return self.learner != "rank"

    @property
    def spans_world(self) -> bool:
        """Whether the gradients of all ranks are ever averaged during backward."""
        return self.learner == "world"

    @property
    def parts_nodes(self) -> bool:
        """Whether the ranks of a node that is one learner step apart from each other."""
        return False

    @property
    def needs_host(self) -> bool:
        """Whether the host has to see what is exchanged, so that NCCL cannot carry it."""
        return self.gossip is not None

    @property
    def folds_deltas(self) -> bool:
        """Whether what lands is added to the parameters, and not put in their place."""
        return True

    @property
    def exchanges_alike(self) -> bool:
        """Whether every exchange is of the whole vector, in its own types and over all lanes."""
        return self.codec is None

    def fitted(self, ranks_of_nodes: Sequence[int]) -> Self:
        """The strategy with `replica="auto"` decided: a node is one learner where there are
        several nodes and one of them has several ranks. Few large replicas, which average
        gradients inside, lose less than many small ones.
        """
        if self.replica != "auto":
            return self
        several = len(ranks_of_nodes) > 1 and max(ranks_of_nodes) > 1
        return replace(self, replica="node" if several or self.parts_nodes else "rank")  # type: ignore[call-arg]

    def note(self, ranks_of_nodes: Sequence[int]) -> str | None:
        """What the user should know of this strategy on such nodes: that it has nothing to do."""
        ranks = sum(ranks_of_nodes)
        if ranks == 1:
            return f"one rank: {self} has nobody to exchange with, so this is plain training"
        if self.learner == "node" and len(ranks_of_nodes) == 1:
            return (
                f"all {ranks} ranks are on one node, which is one learner to {self}: it has no "
                "other node to exchange with, so this is plain synchronous training. Start more "
                "nodes, or say with topology= which ranks are on which"
            )
        return None

    def period_at(self, state: State) -> int | None:
        """The steps between exchanges at present; None without a period."""
        return None

    # The algorithm --------------------------------------------------------------------------------

    def begin(self) -> State:
        """The state before the first step."""
        return {"step": 0, "exchanges": 0}

    def prepare(self, state: State, replica: Replica, part: tuple[int, int] | None = None) -> None:
        """Called once, when all replicas hold the same parameters. `part`: the only row of the
        vector, of so many, that this rank exchanges itself.
        """

    def reference(self, state: State) -> Vector | None:
        """What all replicas agree on, bit for bit, if the strategy keeps such a thing: codecs then
        carry what has moved since. Of the part that this rank exchanges itself.
        """
        return None

    def truth(self, state: State, replica: Replica) -> Vector:
        """The parameters this replica stands for (in new memory): those of the model, unless
        some are held back.
        """
        return replica.snapshot(keep=False)

    def scope(self, state: State) -> Scope:
        """Over whom the gradients of the next backward are averaged."""
        return self.learner

    def boundary(self, state: State, run: Asks) -> None:
        """Called after every optimizer step."""
        state["step"] += 1

    def land(self, state: State, replica: Replica, landed: Landed) -> None:
        """Fold what has arrived; also called where this rank joins a round of the others."""
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
        """The text that `loosestep.strategy` reads."""
        return spell(self)


def strategy(text: str | Strategy) -> Strategy:
    """The strategy that `NAME` or `NAME:field=value,field=value` spells."""
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise TypeError(
            "a strategy is given as an object or by name, as in 'daso:period=8', got "
            f"{type(text).__name__}"
        )
    chosen: Strategy = STRATEGIES.read(text)
    return chosen


def whole_values() -> list[str]:
    """The names of the codecs that are fine enough for parameters themselves."""
    return [name for name, entry in CODECS.entries().items() if entry.kind.whole_values]


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
