"""What collectives ask of a world, real or virtual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from loosestep.core.collectives.gloo import Channel
from loosestep.core.collectives.nccl import Reach
from loosestep.core.messages.heartbeat import Pulse
from loosestep.core.thread import CommThread


class Surroundings(Protocol):
    """The ranks of a run and the ways between them."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def pulse(self) -> Pulse | None:
        """The heartbeats; None where nobody else is."""

    @property
    def reach(self) -> Reach | None:
        """What the ranks know about their devices."""

    def now(self) -> float:
        """Seconds on the run's clock."""

    def channels(self, name: str) -> Callable[[Sequence[int]], Channel]:
        """What opens channels among ranks; those of another name do not meet them."""

    def near_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        """A channel for values on this rank's device."""

    def stream(self, name: str) -> CommThread:
        """A thread for communication."""
