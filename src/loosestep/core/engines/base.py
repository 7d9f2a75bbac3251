"""What a run asks of its engine: the collective one (`exchanges.py`) or gossip (`gossip.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from loosestep.core.engines.gradients import GradientAverager


class Engine(Protocol):
    """Carries a strategy's decisions out."""

    averager: GradientAverager | None

    def boundary(self) -> None:
        """An optimizer step was made."""

    def enter_consensus(self) -> Callable[[], None]:
        """Put the mean of all replicas into the model; what is returned puts everything back."""

    def finish(self) -> None:
        """Drain, and leave the same parameters on every rank; then let go of threads and
        sockets.
        """

    def abort(self, reason: str, culprit: int | None) -> None:
        """End at once; tell the others why."""

    def global_steps(self) -> int:
        """Gradients of all learners so far, as far as known here."""

    def stats(self) -> dict[str, Any]:
        """What only this engine knows."""

    def advice(self) -> str | None:
        """Something the user should be warned about, once."""

    def save(self) -> dict[str, Any]:
        """What is needed to resume, beside the strategy's state."""

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `save`; the strategy's state is loaded already."""
