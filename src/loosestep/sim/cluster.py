"""What is simulated: links, compute times, slow and failing ranks. All of it follows from the
arguments and the seed.

A message of `b` bytes between two nodes takes `latency + b / bandwidth`; the ranks of a node share
its uplink, which carries one message after another in each direction, and all nodes share the
`backbone` if there is one. Inside a node it takes `node_latency + b / node_bandwidth`. A step's
computation takes

    compute * slow[rank] * jitter factor        the factor: log-normal, mean 1, standard deviation `jitter`

of which the first `FORWARD` share is spent before the first gradient is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from math import inf, isfinite, log, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loosestep import units
from loosestep.topology import Topology

FORWARD = 1 / 3  # a backward costs about twice its forward
_BLOCK = 256  # jitter factors drawn at a time


def _nothing() -> Mapping[int, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster: `Cluster(bandwidth="10gbit", latency="50us", compute="120ms", slow={3: 10})`.

    `bandwidth`: of every node's uplink, each way; `backbone`: of all traffic between nodes
    together, None for no limit. `compute`: of one step on every rank, a duration, or seconds of
    successive steps, repeated; `traces` replaces it for single ranks. `slow`: {rank: factor}.
    `jitter`: standard deviation of a step's time, as a share of it. `failures` and `joins`: {rank:
    time} at which a rank is killed or starts.
    """

    bandwidth: str = "10gbit"
    latency: str = "50us"
    node_bandwidth: str = "200gbit"
    node_latency: str = "5us"
    backbone: str | None = None
    compute: str | Sequence[float] = "100ms"
    traces: Mapping[int, Sequence[float]] = field(default_factory=_nothing)
    slow: Mapping[int, float] = field(default_factory=_nothing)
    jitter: float = 0.0
    failures: Mapping[int, str] = field(default_factory=_nothing)
    joins: Mapping[int, str] = field(default_factory=_nothing)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("traces", "slow", "failures", "joins"):
            object.__setattr__(
                self, name, MappingProxyType(dict(_by_rank(name, getattr(self, name))))
            )
        for rank, factor in self.slow.items():
            if not isinstance(factor, int | float) or not 0 < factor < inf:
                raise ValueError(
                    f"slow={{{rank}: {factor!r}}}: expected a positive factor, such as 10 for ten "
                    "times slower"
                )
        if not 0 <= self.jitter < inf:
            raise ValueError(
                "jitter must be at least 0, a share of the step's time such as 0.1, got "
                f"{self.jitter!r}"
            )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        _ = self.bytes_per_second, self.node_bytes_per_second, self.backbone_bytes_per_second
        _ = self.latency_seconds, self.node_latency_seconds, self.deaths, self.arrivals
        for rank in self.traces:
            self.step_seconds(rank, 0)
        if not self._seconds("compute", self.compute):
            raise ValueError(
                "compute must be a duration such as 120ms, or seconds of several steps, got "
                f"{self.compute!r}"
            )

    # Links ----------------------------------------------------------------------------------------

    @cached_property
    def bytes_per_second(self) -> float:
        """Of a node's uplink, each way."""
        return _rate("bandwidth", self.bandwidth)

    @cached_property
    def node_bytes_per_second(self) -> float:
        """Between two ranks of a node."""
        return _rate("node_bandwidth", self.node_bandwidth)

    @cached_property
    def backbone_bytes_per_second(self) -> float:
        """Of all nodes together; infinite without a limit."""
        return inf if self.backbone is None else _rate("backbone", self.backbone)

    @cached_property
    def latency_seconds(self) -> float:
        """Between two nodes, one way."""
        return _duration("latency", self.latency)

    @cached_property
    def node_latency_seconds(self) -> float:
        """Between two ranks of a node, one way."""
        return _duration("node_latency", self.node_latency)

    # Computation ----------------------------------------------------------------------------------

    def steps(self, rank: int) -> Iterator[float]:
        """Seconds of this rank's steps, one after another, for ever."""
        times = cycle(self._seconds(f"traces[{rank}]", self.traces.get(rank, self.compute)))
        factor = self.slow.get(rank, 1.0)
        if not self.jitter:
            return (factor * seconds for seconds in times)
        return (
            factor * seconds * noise
            for seconds, noise in zip(times, self._noise(rank), strict=False)
        )

    def durations(self, rank: int, steps: int) -> NDArray[np.float64]:
        """The first so many of `steps(rank)`."""
        return np.fromiter(islice(self.steps(rank), steps), dtype=np.float64, count=steps)

    def step_seconds(self, rank: int, step: int) -> float:
        """Seconds of one step, counted from 0."""
        return next(islice(self.steps(rank), step, None))

    def _noise(self, rank: int) -> Iterator[float]:
        generator = np.random.default_rng([self.seed, rank])
        sigma = sqrt(log(1 + self.jitter**2))
        while True:
            yield from np.exp(sigma * generator.standard_normal(_BLOCK) - sigma**2 / 2).tolist()

    @staticmethod
    def _seconds(name: str, given: str | Sequence[float]) -> list[float]:
        if isinstance(given, str):
            return [_duration(name, given)]
        times = [float(seconds) for seconds in given]
        if not times or any(not isfinite(seconds) or seconds < 0 for seconds in times):
            raise ValueError(
                f"{name} must be a duration such as 120ms, or seconds of several steps, got "
                f"{given!r}"
            )
        return times

    # Life and death -------------------------------------------------------------------------------

    @cached_property
    def deaths(self) -> dict[int, float]:
        """Seconds at which ranks are killed."""
        return {rank: _duration(f"failures[{rank}]", text) for rank, text in self.failures.items()}

    @cached_property
    def arrivals(self) -> dict[int, float]:
        """Seconds at which late ranks start."""
        return {rank: _duration(f"joins[{rank}]", text) for rank, text in self.joins.items()}

    def check(self, topology: Topology) -> None:
        """Raise if a rank is named that the topology does not have."""
        for name in ("traces", "slow", "failures", "joins"):
            strangers = sorted(rank for rank in getattr(self, name) if rank >= topology.world)
            if strangers:
                raise ValueError(
                    f"{name} names rank {strangers[0]}, but there are only ranks 0 to "
                    f"{topology.world - 1}"
                )


def _by_rank(name: str, given: Any) -> Mapping[int, Any]:
    if not isinstance(given, Mapping) or any(
        isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in given
    ):
        raise ValueError(
            f"{name} must be a dict whose keys are ranks, such as {{3: ...}}, got {given!r}"
        )
    return given


def _rate(name: str, text: str) -> float:
    """Bytes per second of `10gbit`."""
    _require_text(name, text, "a rate such as 500mbit, 2.5gbit or 800kbit")
    return units.rate(text, what=name) / 8


def _duration(name: str, text: str) -> float:
    _require_text(name, text, "a duration such as 50us, 20ms or 1.5s")
    return units.duration(text, what=name)


def _require_text(name: str, given: Any, expected: str) -> None:
    if not isinstance(given, str):
        raise ValueError(f"{name} must be text, {expected}; got {given!r}")
