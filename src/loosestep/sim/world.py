"""What all virtual ranks of a simulation share, and the world that each of them attaches to."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, NamedTuple, cast

import torch.distributed as dist

from loosestep.core.collectives.gloo import Channel
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.messages.sealed_store import SealedStore
from loosestep.core.stopping import Stop
from loosestep.core.thread import CommThread
from loosestep.core.world import World
from loosestep.events import Trace
from loosestep.record.values import Condition, Values
from loosestep.sim.clock import VirtualClock
from loosestep.sim.cluster import FORWARD, Cluster
from loosestep.sim.collectives import Meetings, VirtualChannel, VirtualPulse, VirtualStream
from loosestep.sim.links import Links
from loosestep.sim.mailbox import Peers, VirtualMailbox
from loosestep.sim.replay import Shelf, VirtualCondition, VirtualValues
from loosestep.topology import Topology

KEPT = 1_000_000  # events; the oldest are forgotten first
LOOK = 0.05  # seconds between two looks at a note that is not there yet


class Moment(NamedTuple):
    """An event of a rank at a virtual time: what `Trace` logs, and `killed`, `ended`."""

    time: float
    rank: int
    kind: str
    fields: dict[str, Any]


class Notes:
    """A store for the ranks of a simulation; reading and writing take no time."""

    def __init__(
        self, clock: VirtualClock, prefix: str = "", notes: dict[str, bytes] | None = None
    ) -> None:
        self._clock = clock
        self._prefix = prefix
        self._notes: dict[str, bytes] = {} if notes is None else notes

    def under(self, prefix: str) -> Notes:
        """The same notes, by other names."""
        return Notes(self._clock, f"{self._prefix}{prefix}/", self._notes)

    def set(self, key: str, value: str) -> None:
        self._notes[self._prefix + key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._notes[self._prefix + key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(self._prefix + key in self._notes for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Look again every now and then, as long as others may still write."""
        until = self._clock.now + timeout.total_seconds()
        while not self.check(keys):
            if self._clock.now >= until:
                raise RuntimeError(f"no {', '.join(keys)} within {timeout.total_seconds():g} s")
            self._clock.sleep(LOOK)


class Actor:
    """One virtual rank: its computation, and what it is attached to."""

    def __init__(self, rank: int, clock: VirtualClock, cluster: Cluster) -> None:
        self.rank = rank
        self._clock = clock
        self.attachments = count()
        self.traces: list[Trace] = []
        self._durations = cluster.steps(rank)
        self._began: float | None = None
        self._duration = 0.0

    def worked(self, backward: float, *, whole_step: bool) -> None:
        """Let the time pass until so much of this step's backward is done."""
        if self._began is None:
            self._began = self._clock.now
            self._duration = next(self._durations)
        until = self._began + (FORWARD + (1 - FORWARD) * backward) * self._duration
        if whole_step:
            until = self._began + self._duration
            self._began = None
        self._clock.sleep(until - self._clock.now)


class Stage:
    """The clock, the links and what the ranks leave for each other."""

    def __init__(self, cluster: Cluster, topology: Topology) -> None:
        self.cluster = cluster
        self.topology = topology
        self.clock = VirtualClock(cluster.seed)
        self.links = Links(cluster, topology)
        self.meetings = Meetings(self.clock)
        self.shelf = Shelf(self.clock)
        self.actors = [Actor(rank, self.clock, cluster) for rank in range(topology.world)]
        self.events: deque[Moment] = deque(maxlen=KEPT)
        self.ended: dict[int, float] = {}
        self.lost: dict[int, float] = {}
        self._pulses: dict[str, dict[int, VirtualPulse]] = {}
        self._gossip: dict[Any, Peers] = {}
        self.stop = Stop()
        self._notes = Notes(self.clock)

    def open(self, rank: int, topology: Topology | None, deadline: float) -> World:
        """The world in which virtual rank `rank` attaches."""
        if topology is not None and topology.world != self.topology.world:
            raise ValueError(
                f"the topology names {topology.world} ranks, but {self.topology.world} are "
                "simulated; leave it out"
            )
        prefix = f"loosestep/{next(self.actors[rank].attachments)}"
        store = cast(SealedStore, self._notes.under(prefix))
        return VirtualWorld(
            rank,
            topology or self.topology,
            deadline,
            prefix,
            store,
            stop=self.stop,
            stage=self,
            actor=self.actors[rank],
            home=tuple(range(self.topology.world)),
        )

    def pulse(self, world: VirtualWorld) -> VirtualPulse:
        """Heartbeats of a rank in a world."""
        peers = self._pulses.setdefault(world.prefix, {})
        return VirtualPulse(
            self.clock, world.rank, world=peers, deadline=world.deadline, names=world.home
        )

    def peers(self, prefix: str, members: Sequence[int]) -> Peers:
        """The mailboxes of some ranks, which gossip with each other."""
        key = prefix, tuple(members)
        if key not in self._gossip:
            self._gossip[key] = Peers(self.clock, self.links)
        return self._gossip[key]

    def log(self, rank: int, kind: str, **fields: Any) -> None:
        """An event of a rank."""
        self.events.append(Moment(self.clock.now, rank, kind, fields))

    # The end of a rank ----------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """As kill -9 would: it says nothing to anybody."""
        if rank in self.ended:
            return
        self.lost[rank] = self.clock.now
        self.log(rank, "killed")
        self.clock.kill(rank)
        for pulse in self._pulses_of(rank):
            pulse.die()
        for peers in self._gossip.values():
            peers.lose(rank)

    def leave(self, rank: int, reason: str) -> None:
        """Its training function has returned, or failed: what it is still attached to ends as
        with its process.
        """
        self.ended[rank] = self.clock.now
        if rank in self.lost:
            return
        self.log(rank, "ended")
        for pulse in self._pulses_of(rank):
            pulse.fail(reason)
        for peers in self._gossip.values():
            peers.lose(rank)
        self.clock.call(self.clock.now, lambda: self.clock.kill(rank))  # its communication threads

    def _pulses_of(self, rank: int) -> list[VirtualPulse]:
        """In the whole world, and in the worlds of its node."""
        mates = self.topology.mates(rank)
        inner = f"/node/{mates[0]}"
        found = []
        for prefix, pulses in self._pulses.items():
            index = (
                mates.index(rank)
                if prefix.endswith(inner)
                else None
                if "/node/" in prefix
                else rank
            )
            if index in pulses:
                found.append(pulses[index])
        return found


@dataclass
class VirtualWorld(World):
    """The ranks of a simulation as a world to attach to. `home`: this world's ranks as ranks of
    the simulation.
    """

    timed: ClassVar[bool] = False  # a seed decides

    stage: Stage = field(kw_only=True)
    actor: Actor = field(kw_only=True)
    home: tuple[int, ...] = field(kw_only=True)

    def agree(self, report: dict[str, object]) -> list[dict[str, object]]:
        """Everybody's report; the ranks that do not show up in time are named."""
        key = (self.prefix, "report")
        size = self.topology.world
        reports: list[dict[str, object]] | None = self.stage.meetings.meet(
            key,
            self.rank,
            size=size,
            value=report,
            combine=list,
            ends=lambda now: now,
            pulse=None,
            timeout=self.deadline,
        )
        if reports is None:
            missing = self.stage.meetings.missing(key, size)
            raise TimeoutError(
                f"rank(s) {', '.join(map(str, missing))} did not call loosestep.attach within "
                f"{self.deadline:g} s; every rank must attach the same model (raise deadline= if "
                "they only start late)"
            )
        return reports

    def connect(self) -> SealedStore:
        """There is none."""
        raise RuntimeError("virtual ranks have no store of torch.distributed; use run.notes(name)")

    def notes(self, name: str) -> dist.Store:
        """For the training's own use."""
        return cast(dist.Store, cast(Notes, self.store).under(name))

    def channels(self, name: str) -> Callable[[Sequence[int]], Channel]:
        """Meetings on the stage instead of sockets."""
        opened: Counter[tuple[int, ...]] = Counter()

        def channel(ranks: Sequence[int]) -> Channel:
            opened[tuple(ranks)] += 1
            return VirtualChannel(
                ranks,
                self.rank,
                key=(self.prefix, name, tuple(ranks), opened[tuple(ranks)]),
                nodes=[self.topology.node_of(rank) for rank in ranks],
                home=self.home,
                meetings=self.stage.meetings,
                links=self.stage.links,
                pulse=cast("VirtualPulse | None", self.pulse),
            )

        return channel

    def stream(self, name: str) -> CommThread:
        """A strand of this rank."""
        return VirtualStream(self.stage.clock, self.actor.rank, name)

    def mailbox(self, members: Sequence[int], **arguments: Any) -> GossipMailbox:
        """This rank's end of the gossip among `members`, whose messages take the time of the
        links.
        """
        peers = self.stage.peers(self.prefix, members)
        return VirtualMailbox(
            peers, self.rank, members=members, deadline=self.deadline, **arguments
        )

    def values(self) -> Values:
        """A shelf on the stage."""
        return VirtualValues(self.stage.shelf, self.rank)

    def condition(self) -> Condition:
        """Something that strands of this rank wait for."""
        return VirtualCondition(self.stage.clock)

    def spawn(self, function: Callable[[], None], name: str) -> Callable[[], None]:
        """A strand of this rank; it ends with the rank, so nobody needs to wait for it."""
        self.stage.clock.spawn(function, name=name, rank=self.actor.rank)
        return lambda: None

    def trace(self) -> Trace:
        """On the virtual clock; the simulation keeps a copy of every event."""
        trace = StageTrace(clock=self.now, stage=self.stage, rank=self.actor.rank)
        self.actor.traces.append(trace)
        return trace

    def now(self) -> float:
        """Virtual seconds."""
        return self.stage.clock.now

    def worked(self, backward: float | None = None) -> None:
        """Let the virtual time of this step's computation pass."""
        self.actor.worked(1.0 if backward is None else backward, whole_step=backward is None)

    def inside_node(self) -> World:
        """The ranks of this node as a world of their own."""
        mates = self.topology.mates(self.rank)
        prefix = f"{self.prefix}/node/{mates[0]}"
        home = tuple(self.home[mate] for mate in mates)
        world = VirtualWorld(
            mates.index(self.rank),
            Topology([range(len(mates))]),
            self.deadline,
            prefix,
            self.store,
            stage=self.stage,
            actor=self.actor,
            home=home,
        )
        world.start_pulse()
        return world

    def start_pulse(self) -> None:
        """Be missed from now on."""
        if self.topology.world > 1:
            self.pulse = self.stage.pulse(self)

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class StageTrace(Trace):
    """A rank's events, also on the simulation's list."""

    stage: Stage | None = None
    rank: int = 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Log one event now."""
        super().emit(kind, **fields)
        if self.stage is not None:
            self.stage.log(self.rank, kind, **fields)
