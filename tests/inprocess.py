"""Whole runs on threads of one process: fast enough for property tests, the same sums in the same order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loosestep.comm.base import Kind, Landed, Member, Offer, Parcel, Pending, Scope
from loosestep.comm.channel import ordered_sum
from loosestep.comm.state import flatten, unflatten
from loosestep.comm.world import World
from loosestep.exchanges import CollectiveEngine
from loosestep.learner import Learner
from loosestep.replica import Replica
from loosestep.run import Run
from loosestep.strategies import strategy as read_strategy
from loosestep.topology import Topology
from loosestep.trace.events import Trace


class Hub:
    """Where the threads of all ranks leave things for each other, by name and number."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._condition = threading.Condition()
        self._slots: dict[Any, dict[int, Any]] = {}

    def collect(self, key: Any, rank: int, value: Any, members: tuple[int, ...]) -> list[Any]:
        """Leave a value and wait for those of all members."""
        with self._condition:
            self._slots.setdefault(key, {})[rank] = value
            self._condition.notify_all()
            ready = self._condition.wait_for(lambda: len(self._slots[key]) == len(members), timeout=20)
            assert ready, f"rank {rank} waited in vain at {key}"
            return [self._slots[key][member] for member in members]


class ThreadComm:
    """A `Comm` for one thread. Everybody must do the same things in the same order: nobody joins."""

    def __init__(self, hub: Hub, rank: int, topology: Topology) -> None:
        self.hub, self.rank, self.topology = hub, rank, topology
        self.step, self.missed, self.identical = 0, "rank", False
        self.member: Member | None = None
        self._numbers: dict[Any, int] = {}

    def now(self) -> float:
        return time.monotonic()

    def all_reduce(self, offer: Offer) -> Pending[Landed]:
        pending: Pending[Landed] = Pending()
        thread = threading.Thread(target=self._land, args=(offer, pending, self._next("exchange")), daemon=True)
        thread.start()
        return pending

    def average(self, offer: Offer) -> Landed:
        return self.all_reduce(offer).wait(20)

    def meet(self, kind: Kind) -> None:
        self.census(kind)

    def census(self, *numbers: float) -> list[list[float]]:
        return self._everybody("census", list(numbers))

    def open_round(self, scope: Scope, checksum: float) -> None:
        pass

    def reduce(self, parcel: Parcel, scope: Scope) -> Pending[None]:
        flat = parcel.flat
        parcel.pack(flat)
        members = tuple(range(self.hub.world)) if scope == "world" else self.topology.mates(self.rank)
        parts = self.hub.collect((scope, members, self._next(scope)), self.rank, flat.clone(), members)
        parcel.unpack(parts, len(parts))
        pending: Pending[None] = Pending()
        pending.fulfil(None)
        return pending

    def broadcast_state(self, state: dict[str, Any], root: int, scope: Scope = "world") -> dict[str, Any]:
        text, tensors = flatten(state)
        return unflatten(*self._everybody("state", (text, [tensor.clone() for tensor in tensors]))[root])

    def close(self) -> None:
        pass

    def abort(self, reason: str, culprit: int | None = None) -> None:
        pass

    def _everybody(self, name: str, value: Any) -> list[Any]:
        return self.hub.collect((name, self._next(name)), self.rank, value, tuple(range(self.hub.world)))

    def _next(self, name: str) -> int:
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return self._numbers[name]

    def _land(self, offer: Offer, pending: Pending[Landed], number: int) -> None:
        copies = [tensor.to(offer.wire or tensor.dtype) for tensor in offer.vector]
        mine = (
            [t.clone() for t in copies],
            offer.buffers.clone(),
            (float(offer.losses[0]), offer.losses[1]),
            self.step,
        )
        offers = self.hub.collect(("offer", number), self.rank, mine, tuple(range(self.hub.world)))
        weights = self.topology.weights
        even = len(set(weights)) == 1
        assert not offer.settle, "use real processes for this"
        for position, tensor in enumerate(offer.vector):
            stack = torch.stack([offers[node[0]][0][position] for node in self.topology.nodes])
            total = ordered_sum(stack.unbind(0), None if even else weights).div_(len(weights) if even else sum(weights))
            mean = total.to(stack.dtype).to(tensor.dtype)
            tensor.copy_(mean - tensor if offer.form == "delta" else mean)
        losses = [entry[2] for entry in offers]
        pending.fulfil(
            Landed(
                vector=offer.vector,
                buffers=torch.stack([entry[1] for entry in offers]).mean(0),
                loss_sum=sum(loss for loss, _ in losses),
                loss_count=sum(count for _, count in losses),
                distance=0.0,
                seconds=0.0,
                steps=[entry[3] for entry in offers],
            )
        )


def train(
    spec: str,
    topology: Topology,
    body: Callable[[Run, int], Any],
    *,
    model: Callable[[int], nn.Module],
    lr: float = 0.1,
    momentum: float = 0.0,
) -> list[Any]:
    """Attach a model per rank and run `body(run, rank)` on a thread for each; the results in rank order."""
    strategy = read_strategy(spec)
    units = topology.flat() if strategy.learner == "rank" else topology
    hub = Hub(topology.world)
    results: list[Any] = [None] * topology.world

    def work(rank: int) -> None:
        net = model(rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
        world = World(rank, topology, 20.0, "", None, owned=False)  # type: ignore[arg-type]
        replica = Replica(net, multiple=units.lanes * len(units.nodes))
        comm: Any = ThreadComm(hub, rank, units)
        learner = Learner(net, [optimizer], strategy, replica, Trace())
        engine = CollectiveEngine(learner, world=world, comm=comm)
        run = Run(learner, engine, world=world, hooks=True, closed=lambda: None)
        results[rank] = body(run, rank)
        run._detach()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(topology.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank is stuck"
    assert all(result is not None for result in results), "a rank failed"
    return results
