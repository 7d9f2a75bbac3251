"""`simulate()`: a training function on many virtual ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from loosestep.core.world import simulated
from loosestep.sim.clock import Killed
from loosestep.sim.cluster import Cluster
from loosestep.sim.generators import Generators
from loosestep.sim.world import Moment, Stage
from loosestep.topology import Topology

# ranks: with more, torch computes on one processor, for every rank's thread would get helpers of
# its own
MANY = 16


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What happened. `results`: what the training function returned on each rank, None for a rank
    that was killed.

    `seconds`: virtual, until the last rank ended. `gradients_per_second`: steps of all ranks over
    that time. `waiting_share`: the part of the ranks' time that they waited for others. `distance`:
    the last consensus distance that a rank knew of. `lost`: {rank: time} of those that were killed.
    `events`: everything that ranks logged, in order.
    """

    ranks: int
    cluster: Cluster
    topology: Topology
    seconds: float
    results: list[Any] = field(repr=False)
    steps: list[int] = field(repr=False)
    lost: dict[int, float]
    waiting_share: float
    bytes_sent: int
    bytes_between_nodes: int
    distance: float
    events: Sequence[Moment] = field(repr=False)

    @property
    def gradients_per_second(self) -> float:
        """Of all ranks, in virtual time."""
        return sum(self.steps) / self.seconds if self.seconds else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The figures, as a plain dict."""
        return {
            "seconds": self.seconds,
            "gradients": sum(self.steps),
            "gradients_per_second": self.gradients_per_second,
            "waiting_share": self.waiting_share,
            "bytes_sent": self.bytes_sent,
            "bytes_between_nodes": self.bytes_between_nodes,
            "consensus_distance": self.distance,
        }


def simulate(
    train: Callable[..., Any],
    *,
    ranks: int,
    ranks_per_node: int = 1,
    cluster: Cluster | None = None,
    topology: Topology | None = None,
) -> Simulation:
    """Run `train(rank)` (or `train()`) on `ranks` virtual ranks in this process, on a virtual
    clock.

    `train` is an ordinary training function that calls `loosestep.attach`, unmodified: gradients
    are computed, exchanged and folded by the same code as on real processes. Time is that of the
    cluster: every optimizer step of an attached model takes `cluster.compute`, messages take what
    its links need, everything else nothing. Every rank has its own random generators (torch, numpy,
    random), grad mode and autocast; other globals of the process are shared. An error in `train`
    ends its rank as it would end a process, and is raised here when all is over.
    """
    if topology is None:
        topology = _grid(ranks, ranks_per_node)
    elif topology.world != ranks:
        raise ValueError(f"the topology names {topology.world} ranks, got ranks={ranks}")
    if simulated.get() is not None:
        raise RuntimeError(
            "simulate() was called by a virtual rank; a simulation cannot run inside another"
        )
    cluster = cluster or Cluster()
    cluster.check(topology)
    return _Driver(_with_rank(train), cluster, topology).run()


class _Driver:
    def __init__(self, train: Callable[[int], Any], cluster: Cluster, topology: Topology) -> None:
        self._train = train
        self._cluster = cluster
        self._topology = topology
        self._stage = Stage(cluster, topology)
        self._generators = Generators(cluster.seed)
        self._results: list[Any] = [None] * topology.world
        self._errors: list[tuple[int, BaseException]] = []

    def run(self) -> Simulation:
        clock = self._stage.clock
        for rank in range(self._topology.world):
            at = self._cluster.arrivals.get(rank, 0.0)
            strand = clock.spawn(partial(self._live, rank), name=f"rank {rank}", rank=rank, at=at)
            strand.on_resume = partial(self._generators.take, rank)
        for rank, at in self._cluster.deaths.items():
            clock.call(at, partial(self._stage.kill, rank))
        threads = torch.get_num_threads()
        if self._topology.world > MANY:
            torch.set_num_threads(1)
        try:
            with no_real_distributed():
                stuck = clock.run()
        finally:
            torch.set_num_threads(threads)
            self._generators.give_back()
        if self._errors:
            rank, error = self._errors[0]
            if sys.version_info >= (3, 11):
                error.add_note(
                    f"on virtual rank {rank}, after {self._stage.ended[rank]:g} virtual seconds"
                )
            raise error
        waiting = [strand for strand in stuck if strand.rank not in self._stage.ended]
        if waiting:
            where = "; ".join(
                f"{strand.name} waits for {strand.waits_for}" for strand in waiting[:4]
            )
            raise RuntimeError(
                f"nothing can happen any more after {clock.now:g} virtual seconds, but "
                f"{len(waiting)} strands wait: {where}. In collective strategies all ranks call "
                "consensus() and finish() equally often"
            )
        return self._summary()

    def _live(self, rank: int) -> None:
        simulated.set(lambda topology, deadline: self._stage.open(rank, topology, deadline))
        reason = f"rank {rank} ended without run.finish()"
        # On an accelerator backward would run on one thread for all ranks, and its callbacks could
        # not wait there.
        torch.autograd.set_multithreading_enabled(False)
        try:
            self._results[rank] = self._train(rank)
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001  raised by simulate() when all is over
            self._errors.append((rank, error))
            reason = f"rank {rank} failed: {error}"
        finally:
            self._stage.leave(rank, reason)

    def _summary(self) -> Simulation:
        stage = self._stage
        totals = [trace.totals for actor in stage.actors for trace in actor.traces]
        seconds = max(stage.ended.values(), default=0.0)
        lived = sum(stage.lost.get(rank, end) for rank, end in stage.ended.items())
        distances = [moment.fields["value"] for moment in stage.events if moment.kind == "distance"]
        return Simulation(
            ranks=self._topology.world,
            cluster=self._cluster,
            topology=self._topology,
            seconds=seconds,
            results=self._results,
            steps=[sum(trace.totals.steps for trace in actor.traces) for actor in stage.actors],
            lost=dict(stage.lost),
            waiting_share=sum(total.wait_seconds for total in totals) / lived if lived else 0.0,
            bytes_sent=sum(total.bytes_sent for total in totals) + stage.links.sent,
            bytes_between_nodes=sum(total.bytes_between_nodes for total in totals)
            + stage.links.sent_between_nodes,
            distance=distances[-1] if distances else 0.0,
            events=list(stage.events),
        )


def _grid(ranks: int, ranks_per_node: int) -> Topology:
    for name, value in (("ranks", ranks), ("ranks_per_node", ranks_per_node)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if ranks % ranks_per_node:
        raise ValueError(
            f"{ranks} ranks do not fill nodes of {ranks_per_node}; pass topology=Topology([[...], "
            "...]) for uneven nodes"
        )
    return Topology.grid(ranks // ranks_per_node, ranks_per_node)


def _with_rank(train: Callable[..., Any]) -> Callable[[int], Any]:
    """`train` with one argument, the rank, or without any."""
    if not callable(train):
        raise TypeError(
            f"simulate needs a training function train(rank), got {type(train).__name__}"
        )
    try:
        inspect.signature(train).bind(0)
    except TypeError:
        inspect.signature(train).bind()
        return lambda rank: train()
    return train


# By the last two also what was imported by name before.
REAL = (
    "init_process_group",
    "get_rank",
    "get_world_size",
    "barrier",
    "all_reduce",
    "broadcast",
    "all_gather",
    "new_group",
    "_get_default_group",
    "_new_process_group_helper",
)


@contextmanager
def no_real_distributed() -> Iterator[None]:
    """Inside, a virtual rank that turns to torch.distributed itself is told what to do instead."""
    inner = dist.distributed_c10d
    kept = {name: getattr(inner, name) for name in REAL}

    def guarded(name: str) -> Callable[..., Any]:
        @wraps(kept[name])
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if simulated.get() is not None:
                raise RuntimeError(
                    "the training function uses torch.distributed itself, whose processes a "
                    "simulated rank does not have; use the rank that train(rank) gets, run.rank "
                    f"and run.topology, and loosestep.attach for averages ({name})"
                )
            return kept[name](*args, **kwargs)

        return refuse

    places = [(module, name) for module in (dist, inner) for name in kept if hasattr(module, name)]
    for module, name in places:
        setattr(module, name, guarded(name))
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, kept[name])
