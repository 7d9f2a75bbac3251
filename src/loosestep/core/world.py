"""Opening a run: the process group, the store, who is where, and whether everybody can take part.

Nothing is torn down that was not created here.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from loosestep.core.collectives.gloo import Channel, open_devices
from loosestep.core.collectives.nccl import NearChannel, Reach
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.gossip.mailbox import Mailbox
from loosestep.core.messages.directory import wait_for
from loosestep.core.messages.heartbeat import Pulse, connect
from loosestep.core.thread import Stream
from loosestep.events import Trace
from loosestep.record.values import Condition, StoreValues, Values
from loosestep.topology import Topology
from loosestep.topology.launchers import detect_launch, find_master, require_company

TOKEN = "token"  # of this run, from rank 0
_attachments = itertools.count()  # every rank attaches in the same order, so the numbers agree

Opener = Callable[[Topology | None, float], "World"]
# set inside a simulated rank
simulated: ContextVar[Opener | None] = ContextVar("simulated", default=None)


@dataclass
class World:
    """The processes of a run. `store` is shared by all ranks, `pulse` is None in a world of one.
    `names`: what messages call the ranks, where this is a part of a larger world.
    """

    rank: int
    topology: Topology
    deadline: float
    prefix: str
    store: dist.Store
    owned: bool  # we initialised torch.distributed, so we end it
    pulse: Pulse | None = None
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

    def connect(self) -> dist.Store:
        """Another connection to the store, so that a long wait on it delays no heartbeat."""
        return connect(self.store, timeout=self.deadline)

    def notes(self, name: str) -> dist.Store:
        """The store, for the training's own use."""
        return dist.PrefixStore(name, self.connect())

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

    def stream(self, name: str) -> Stream:
        """A thread for communication."""
        return Stream(name, narrow=self.reach is None or self.reach.device.type == "cpu")

    def mailbox(self, members: Sequence[int], **arguments: Any) -> GossipMailbox:
        """This rank's end of the gossip among `members`."""
        return Mailbox(
            self.connect(),
            self.rank,
            world=members,
            run_id=self.run_id,
            deadline=self.deadline,
            check=self.check,
            **arguments,
        )

    def check(self) -> None:
        """Raise what another rank has failed of, while heartbeats tell."""
        if self.pulse is not None:
            self.pulse.check()

    @cached_property
    def run_id(self) -> str:
        """A name that no other run has, so that a letter that has come to the wrong one is
        refused.
        """
        return f"{self.prefix}/{self.store.get(TOKEN).decode()}"

    def values(self) -> Values:
        """Where the ranks of a replay leave values for each other."""
        return StoreValues(self.connect, self.rank)

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
                0, Topology([[0]]), self.deadline, self.prefix, dist.HashStore(), owned=False
            )
        if local == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.store.set(name, str(store.port))
        else:
            port = int(wait_for(self.connect(), name, deadline=self.deadline, check=self.check))
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        world = World(
            local, Topology([range(len(mates))]), self.deadline, self.prefix, store, owned=False
        )
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
            )

    def close(self) -> None:
        """Give back what was created here."""
        self.__dict__.pop("_devices", None)
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()
            self.owned = False


def open_world(topology: Topology | None, *, deadline: float) -> World:
    """Use torch.distributed as it is, or initialise it from what started this process."""
    virtual = simulated.get()
    if virtual is not None:
        return virtual(topology, deadline)
    launch = detect_launch()
    owned = not dist.is_initialized()
    if owned:
        _initialise(deadline)
    rank = dist.get_rank()
    world = dist.get_world_size()
    prefix = f"loosestep/{next(_attachments)}"
    shared = dist.PrefixStore(
        prefix, connect(dist.distributed_c10d._get_default_store(), timeout=deadline)
    )
    if rank == 0:
        shared.set(TOKEN, secrets.token_hex(8))
    if topology is None:
        # A process that was started by hand and initialised torch itself has no launcher: its host
        # is its node.
        node = launch.node if launch.world == world else socket.gethostname()
        topology = Topology.from_names(_publish(shared, "node", rank, world, node, deadline))
    elif topology.world != world:
        raise ValueError(
            f"the topology names {topology.world} ranks, but {world} processes were started"
        )
    return World(rank, topology, deadline, prefix, shared, owned)


def _initialise(deadline: float) -> None:
    launch = detect_launch()
    require_company(launch)
    if launch.world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    rendezvous = find_master(launch)
    os.environ.setdefault("MASTER_ADDR", rendezvous.hosts[0])
    os.environ.setdefault("MASTER_PORT", str(rendezvous.ports[0]))
    patience = timedelta(seconds=max(deadline, 300.0))  # start-up may be slow: imports, queues
    dist.init_process_group("gloo", rank=launch.rank, world_size=launch.world, timeout=patience)


def _publish(
    store: dist.Store, key: str, rank: int, world: int, text: str, deadline: float
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
