"""Opening a run: the process group, the store, who is where, and whether everybody can take part.

Nothing is torn down that was not created here.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from loosestep.core.collectives.gloo import Channel, open_devices
from loosestep.core.collectives.nccl import NearChannel, Reach
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.gossip.mailbox import Mailbox
from loosestep.core.messages.directory import wait_for
from loosestep.core.messages.gathering import Gathering, gather
from loosestep.core.messages.heartbeat import Pulse
from loosestep.core.messages.sealed_store import SealedStore, lonely_store
from loosestep.core.stopping import Stop
from loosestep.core.store import host_store
from loosestep.core.thread import CommThread
from loosestep.events import Trace
from loosestep.record.values import Condition, StoreValues, Values
from loosestep.topology import Topology
from loosestep.topology.launchers import detect_launch

Opener = Callable[[Topology | None, float], "World"]
# set inside a simulated rank
simulated: ContextVar[Opener | None] = ContextVar("simulated", default=None)


@dataclass
class World:
    """The processes of a run. `prefix` is a name that no other run has, `store` is shared by all
    ranks, `pulse` is None in a world of one. `names`: what messages call the ranks, where this is a
    part of a larger world.
    """

    timed: ClassVar[bool] = True  # time decides what happens first, so that it may be recorded

    rank: int
    topology: Topology
    deadline: float
    prefix: str
    store: SealedStore
    gathering: Gathering | None = None  # what this run gives back at its end
    pulse: Pulse | None = None
    stop: Stop = field(default_factory=Stop)
    reach: Reach | None = None  # what the ranks know about their devices
    names: Sequence[int] | None = None

    def agree(self, report: dict[str, object]) -> list[dict[str, object]]:
        """Publish this rank's report and read everybody's; the ranks that do not show up in time
        are named.
        """
        return [
            json.loads(text)
            for text in _publish(
                self.store,
                "report",
                self.rank,
                self.topology.world,
                json.dumps(report),
                self.deadline,
            )
        ]

    def connect(self) -> SealedStore:
        """Another connection to the store, so that a long wait on it delays no heartbeat."""
        return self.store.clone()

    def notes(self, name: str) -> dist.Store:
        """The store, for the training's own use."""
        return self.connect().within(name)

    def channels(self, name: str) -> Callable[[Sequence[int]], Channel]:
        """What opens channels among ranks of this world; those of another name do not meet them."""
        store = self.connect()

        def channel(ranks: Sequence[int]) -> Channel:
            nodes = [self.topology.node_of(rank) for rank in ranks]
            return Channel(
                ranks,
                self.rank,
                name=name,
                store=store,
                pulse=self.pulse,
                nodes=nodes,
                devices=self._devices,
            )

        return channel

    @cached_property
    def _devices(self) -> list[ProcessGroupGloo.Device]:
        return open_devices()

    def near_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        """A channel for values on this rank's device; one for a rank alone has nobody to carry
        them to.
        """
        if len(ranks) == 1:
            return self.channels(name)(ranks)
        assert self.reach is not None
        nodes = [self.topology.node_of(rank) for rank in ranks]
        return NearChannel(
            ranks,
            self.rank,
            name=name,
            store=self.connect(),
            pulse=self.pulse,
            nodes=nodes,
            device=self.reach.device,
        )

    def stream(self, name: str) -> CommThread:
        """A thread for communication."""
        return CommThread(name, narrow=self.reach is None or self.reach.device.type == "cpu")

    def mailbox(self, members: Sequence[int], **arguments: Any) -> GossipMailbox:
        """This rank's end of the gossip among `members`."""
        return Mailbox(
            self.connect(),
            self.rank,
            world=members,
            run_id=self.prefix,
            deadline=self.deadline,
            check=self.check,
            stop=self.stop,
            password=self.store.secret_name("mailbox"),
            **arguments,
        )

    def check(self) -> None:
        """Raise what another rank has failed of, while heartbeats tell."""
        if self.pulse is not None:
            self.pulse.check()

    def values(self) -> Values:
        """Where the ranks of a replay leave values for each other."""
        return StoreValues(lambda: self.notes("replay"), self.rank)

    def condition(self) -> Condition:
        """Something that threads of this rank wait for."""
        return threading.Condition()

    def spawn(self, function: Callable[[], None], name: str) -> Callable[[], None]:
        """Run a function on a thread of its own; what is returned waits for its end."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread.join

    def trace(self) -> Trace:
        """A log of events on this world's clock."""
        return Trace()

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def worked(self, backward: float | None = None) -> None:
        """This step's computation is done, or so much of its backward. A simulation moves its
        clock on.
        """

    def inside_node(self) -> World:
        """The ranks of this node as a world of their own, with a store of their own: other nodes
        may die.
        """
        mates = self.topology.mates(self.rank)
        local = mates.index(self.rank)
        name = f"node/{mates[0]}/port"
        if len(mates) == 1:
            return World(
                0, Topology([[0]]), self.deadline, self.prefix, lonely_store(self.deadline)
            )
        if local == 0:
            hosted = host_store(socket.create_server(("127.0.0.1", 0)))
            self.store.set(name, str(hosted.port))
        else:
            port = int(wait_for(self.connect(), name, deadline=self.deadline, check=self.check))
            hosted = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = self.store.on(hosted, name=f"node/{mates[0]}", rank=local)
        nodes = Topology([range(len(mates))])
        world = World(local, nodes, self.deadline, self.prefix, store, stop=self.stop)
        world.reach = self.reach and self.reach.within(mates)
        world.names = mates
        world.start_pulse()
        return world

    def start_pulse(self) -> None:
        """Begin to beat; the others are known to be here."""
        if self.topology.world > 1:
            self.pulse = Pulse(
                self.store,
                self.rank,
                world=self.topology.world,
                deadline=self.deadline,
                names=self.names,
                stop=self.stop,
            )

    def close(self) -> None:
        """Give back what was created here."""
        self.__dict__.pop("_devices", None)
        if self.gathering is not None:
            self.gathering.leave()
            self.gathering = None


def open_world(topology: Topology | None, *, deadline: float, key: str | None = None) -> World:
    """Use torch.distributed as it is, or initialise it from what started this process."""
    virtual = simulated.get()
    if virtual is not None:
        return virtual(topology, deadline)
    gathering = gather(key, deadline=deadline)
    store = gathering.enter(deadline)
    with ExitStack() as undo:
        undo.callback(gathering.leave)
        rank = dist.get_rank()
        world = dist.get_world_size()
        if topology is None:
            # A process that was started by hand and initialised torch itself has no launcher: its
            # host is its node.
            launch = detect_launch()
            node = launch.node if launch.world == world else socket.gethostname()
            topology = Topology.from_names(_publish(store, "node", rank, world, node, deadline))
        elif topology.world != world:
            raise ValueError(
                f"the topology names {topology.world} ranks, but {world} processes were started"
            )
        undo.pop_all()
    return World(rank, topology, deadline, store.prefix, store, gathering)


def _publish(
    store: SealedStore, key: str, rank: int, world: int, text: str, deadline: float
) -> list[str]:
    """Set `key/rank`, then read everybody's."""
    store.set(f"{key}/{rank}", text)
    keys = [f"{key}/{r}" for r in range(world)]
    try:
        store.wait(keys, timedelta(seconds=deadline))
    except RuntimeError as error:
        missing = [r for r in range(world) if not store.check([keys[r]])]
        raise TimeoutError(
            f"rank(s) {', '.join(map(str, missing))} did not call loosestep.attach within "
            f"{deadline:g} s; every rank must attach the same model (raise deadline= if they only "
            "start late)"
        ) from error
    return [value.decode() for value in store.multi_get(keys)]
