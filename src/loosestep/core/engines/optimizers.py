"""What optimizers hold at the start: the same on the ranks of one learner, or they would drift
apart with the same gradients.

A rank's *source* is the first rank of its learner; rank 0 where that one's optimizers have no state
yet and rank 0's have, as when rank 0 alone has loaded a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash

from loosestep.core.contracts import Comm
from loosestep.core.engines.learner import Learner
from loosestep.core.plain_state import flatten
from loosestep.core.replica.shards import load_localised, localise
from loosestep.topology import Topology

log = logging.getLogger("loosestep")


class Fingerprint(NamedTuple):
    """What a rank's optimizers hold, in numbers that can be compared."""

    readable: float  # not where a state cannot be read or sent
    fresh: float  # no state yet
    digest: float


def align_optimizers(learner: Learner, comm: Comm, topology: Topology) -> None:
    """Every rank whose optimizers differ from those of its source takes them over, and says so."""
    rows = [Fingerprint(*row) for row in comm.census(*_fingerprint(learner))]
    if not all(row.readable for row in rows):
        return
    sources = [_source(rank, rows, learner, topology) for rank in range(len(rows))]
    behind = [rank for rank, source in enumerate(sources) if rows[rank] != rows[source]]
    if not behind:
        return
    held = [localise(optimizer.state_dict()) for optimizer in learner.optimizers]
    # shards travel along their lanes, all at once
    roots = {0} if learner.replica.sharded else {sources[rank] for rank in behind}
    for root in sorted(roots):
        received = comm.broadcast_state({"optimizers": held}, root=root)["optimizers"]
        if comm.rank in behind and (learner.replica.sharded or sources[comm.rank] == root):
            for optimizer, state in zip(learner.optimizers, received, strict=True):
                load_localised(optimizer, state)
    if comm.rank == 0:
        log.warning(
            "the optimizers of rank(s) %s held other settings or another state than those of "
            "rank(s) %s, with which they train one model; they have taken them over",
            ", ".join(map(str, behind)),
            ", ".join(map(str, sorted({sources[rank] for rank in behind}))),
        )


def _fingerprint(learner: Learner) -> Fingerprint:
    try:
        held = [localise(optimizer.state_dict()) for optimizer in learner.optimizers]
        text, tensors = flatten(held)
    except (TypeError, RuntimeError):  # RuntimeError: a state that is spread over ranks
        return Fingerprint(readable=0.0, fresh=0.0, digest=0.0)
    fresh = not any(optimizer.state for optimizer in learner.optimizers)
    return Fingerprint(readable=1.0, fresh=float(fresh), digest=digest(text, tensors))


def digest(text: str, tensors: Sequence[torch.Tensor]) -> float:
    """A fingerprint that a float holds exactly."""
    state = xxhash.xxh3_64(text.encode())
    for tensor in tensors:
        held = tensor.detach().to("cpu").contiguous().reshape(-1)
        state.update(held.view(torch.uint8).numpy().data)
    return float(state.intdigest() >> 12)


def _source(rank: int, rows: list[Fingerprint], learner: Learner, topology: Topology) -> int:
    if learner.replica.sharded:  # each rank of a node holds another part
        first = rank
        zero = topology.lane(topology.local_index(rank))[0]
    else:
        groups = {"rank": [rank], "node": topology.mates(rank), "world": range(len(rows))}
        first = groups[learner.strategy.learner][0]
        zero = 0
    return zero if rows[first].fresh and not rows[zero].fresh else first
