"""Synchronous training: the gradients of all ranks are averaged on every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loosestep.core.contracts import Scope
from loosestep.strategies.base import Exchanges, Strategy


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy[Exchanges]):
    """The baseline, as torch's DistributedDataParallel: `g <- mean of the gradients of all ranks`,
    every step.

    Inside a node first, then across nodes on all lanes at once, overlapped with backward.
    """

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "synchronous: every step waits for the mean gradient of all ranks"

    @property
    def learner(self) -> Scope:
        """All ranks are one learner."""
        return "world"

    @property
    def moves_in(self) -> None:
        """Its replicas are equal: only gradients travel."""
