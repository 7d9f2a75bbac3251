"""What a gossip engine asks of a mailbox. The real one, the virtual one and the replayed one
pass the same suite of tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray

from loosestep.core.gossip.memory import Fold

Mode = Literal["due", "whole", "publish", "lift"]
"""How a model crosses a step boundary. "due": if that is worth its cost now. "whole": completely,
before the call returns. "publish": before an exchange, unless the shadow holds the parameters of
this step. "lift": a copy crosses in its place.
"""


class Exchange(Protocol):
    """An exchange in flight. `outcome` is "exchanged", or "dropped" when the peer or this rank
    ended, or "skipped".
    """

    outcome: str

    def done(self) -> bool:
        """Whether it has come to its end."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; whether it came within so many seconds."""


class GossipMailbox(Protocol):
    """One rank's end of the gossip about a list of tensors. `steps`: how many this rank has
    made; set it to resume.
    """

    steps: int

    def step(self) -> None:
        """Count a step of this rank. Its parameters cross when `cross` is called."""

    def cross(
        self,
        tensors: Sequence[torch.Tensor],
        mode: Mode,
        *,
        within: int | None = None,
        step: int | None = None,
        peer: int | None = None,
        share: float = 1.0,
    ) -> Fold:
        """y <- y + u; x <- y. What has landed is added to the tensors, and what they have learned
        is published.

        `within`: "due" becomes "whole" once something that has landed, or would, is as many steps
        old. "lift": the tensors are a copy of the parameters after `step`, and become d = y - x;
        any thread may call it. "publish" with a `peer`: in the chunks that the next exchange of
        this `share` with it will carry, where such a part can cross alone.
        """

    def exchange(self, peer: int, weight: float = 0.5, share: float = 1.0) -> Exchange:
        """Begin to average with a peer, both moving by `weight` of their difference. Never
        blocks. A `share` of the model is the next chunks on this edge; they go round.
        """

    def lockstep_round(
        self, number: int, neighbours: dict[int, float], timeout: float = 60.0
    ) -> None:
        """y <- y + sum_j w_j (y_j - y), all values as they were when this round began on each
        rank. Blocks.
        """

    def alive(self) -> set[int]:
        """The peers that answer."""

    def lost(self) -> set[int]:
        """The peers whose models are not in the result."""

    @property
    def global_steps(self) -> int:
        """The gradients of all ranks, as last heard."""

    @property
    def consensus_distance(self) -> float:
        """An estimate of the root mean square distance of a number of a shadow to its mean."""

    def consensus(self, timeout: float | None = 60.0) -> NDArray[Any]:
        """The flat mean of the live shadows, for which nobody stops."""

    def finish(self, params: Sequence[torch.Tensor], timeout: float | None = None) -> None:
        """Wait for the end of every live rank, answering meanwhile; then all hold the mean of
        their shadows.
        """

    @property
    def counters(self) -> dict[str, Any]:
        """What was sent, received, landed and refused so far."""

    @property
    def least_share(self) -> float:
        """The smallest share of the model that can travel."""

    slower: float
    """By which share communication makes this rank's steps slower; others are told."""

    def neighbours_slower(self) -> list[float]:
        """The same of the other ranks of this host."""

    def cpu_seconds(self) -> float:
        """The processor time that gossip has cost this rank."""

    def close(self) -> None:
        """Say goodbye, and let go of threads and sockets."""
