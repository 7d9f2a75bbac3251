"""Speed on a cluster nobody has: the same strategy objects on clocks instead of tensors, for
thousands of ranks.

    prediction = predict("daso:period=4", Topology.grid(64, 4), Cluster(bandwidth="100gbit"), parameters=102_000_000)

What is modelled and what is not: links, computation with stragglers and jitter, the overlap of
communication with backward and with later steps, uplinks that ranks share, the work of a processor
for it (`Machine`). Not: congestion beyond fair shares, other jobs, failing ranks, data loading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.costs import Costs, Times
from loosestep.sim.predict.gossip import GossipClocks
from loosestep.sim.predict.lockstep import CollectiveClocks
from loosestep.sim.predict.machine import Machine
from loosestep.strategies import Strategy
from loosestep.strategies import strategy as read_strategy
from loosestep.topology import Topology

LAYERS = 64  # a model given by its size is this many equal tensors


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How fast a strategy would be.

    `seconds`: of the whole run. `gradients_per_second`: of all ranks. `seconds_per_step`: ranks /
    gradients_per_second. `waiting`: by rank, the share of its time that it waits.
    `bytes_per_gradient`: between nodes. `exchanges`: rounds of all replicas; under gossip, pairs.
    `efficiency`: speed over that of the same ranks without any communication.
    """

    strategy: str
    ranks: int
    seconds: float
    gradients_per_second: float
    seconds_per_step: float
    waiting: Times = field(repr=False)
    bytes_per_gradient: float
    exchanges: int
    efficiency: float


def predict(
    strategy: Strategy | str,
    topology: Topology,
    cluster: Cluster,
    *,
    parameters: int | Sequence[int],
    steps: int = 1000,
    losses: Callable[[int], float] | Sequence[float] | None = None,
    machine: Machine | None = None,
) -> Prediction:
    """Time `steps` steps of every rank (under gossip as many gradients in all) without computing
    any.

    `parameters`: bytes of the model, or of each of its tensors in order. `losses`: what the
    schedule sees at each step.
    """
    chosen = read_strategy(strategy).fitted(topology.weights)
    machine = machine or Machine()
    sizes = _sizes(parameters)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    cluster.check(topology)
    if cluster.failures or cluster.joins:
        raise ValueError(
            "timing only knows no failures and no joins; leave them out, or simulate with real "
            "mathematics"
        )
    durations = np.stack([cluster.durations(rank, steps) for rank in range(topology.world)])
    if not (durations.mean(axis=1) > 0).all():
        raise ValueError(f"every rank must compute for some time, got compute={cluster.compute!r}")
    costs = Costs(topology, cluster, machine, single=chosen.learner == "rank")
    clocks: GossipClocks | CollectiveClocks
    plan = chosen.gossip
    if plan is not None:
        clocks = GossipClocks(
            plan, topology, cluster, machine, costs=costs, sizes=sizes, durations=durations
        )
        clocks.run(steps)
        made = clocks.steps
    else:
        loss = _loss(losses, steps)
        clocks = CollectiveClocks(
            chosen,
            topology,
            costs,
            sizes=sizes,
            fixed=machine.step / min(1.0, machine.cores),
            loss=loss,
        )
        for step in range(steps):
            clocks.step(durations[:, step])
        made = np.full(topology.world, steps)
    # a rank that was too slow to make a step has no clock yet
    total = np.maximum(clocks.clock, np.finfo(float).tiny)
    speed = float((made / total).sum())
    return Prediction(
        strategy=str(chosen),
        ranks=topology.world,
        seconds=float(clocks.clock.max()),
        gradients_per_second=speed,
        seconds_per_step=topology.world / speed,
        waiting=clocks.waited / total,
        bytes_per_gradient=clocks.sent / int(made.sum()),
        exchanges=clocks.exchanges,
        efficiency=speed / float((1 / durations.mean(axis=1)).sum()),
    )


def _sizes(parameters: int | Sequence[int]) -> list[int]:
    given = [parameters] if isinstance(parameters, int) else list(parameters)
    if not given or any(
        isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in given
    ):
        raise ValueError(
            "parameters must be the bytes of the model, or those of each tensor, at least 1; got "
            f"{parameters!r}"
        )
    if isinstance(parameters, int):
        edges = [parameters * layer // LAYERS for layer in range(LAYERS + 1)]
        return [after - before for before, after in pairwise(edges) if after > before]
    return given


def _loss(
    losses: Callable[[int], float] | Sequence[float] | None, steps: int
) -> Callable[[int], float] | None:
    if losses is None or callable(losses):
        return losses
    if len(losses) < steps:
        raise ValueError(
            f"losses has {len(losses)} entries for {steps} steps; give one a step, or a function "
            "of the step"
        )
    return losses.__getitem__
