"""The lab: nodes, links, ranks and faults on one machine.

with Lab(nodes=4, ranks_per_node=2, bandwidth="500mbit") as lab:
    result = lab.run(["train.py"])

with Lab(nodes=2, bandwidth="100mbit", loss="1%") as lab:
    job = lab.start(["train.py"])
    job.ranks[0].expect("epoch 1")
    lab.partition({0}, {1})
    lab.heal()
    result = job.wait(timeout=60)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from loosestep import launch, units
from loosestep.core.store import host_store
from loosestep.lab import grammar, torchrun
from loosestep.lab.faults import Announce, FaultTimer, Slowdown
from loosestep.lab.grammar import Fault, Partition
from loosestep.lab.leftovers import MARK, new_mark
from loosestep.lab.meeting import has_met
from loosestep.lab.network import INTERFACE, Network
from loosestep.launch import Job, Output, RankCommand, Result
from loosestep.launch.become_rank import add_hosts

SLOW = "LOOSESTEP_SLOW"
LAUNCHERS = ("loosestep", "torchrun")
LOOK = 0.25
"""Seconds between two looks at who has come to the rendezvous."""


class LabError(RuntimeError):
    """The lab cannot be made here; the message says what is missing."""


class Lab:
    """A cluster of `nodes`, each with `ranks_per_node` ranks (a list for uneven nodes), gone when
    the block ends.

    bandwidth  of each node's cable, both ways ("500mbit"); None: unlimited links      limits of
    single pairs of nodes below it: {(2, 3): "50mbit"} delay      one way between two nodes
    ("20ms"): a round trip takes twice that loss       share of the packets that vanish ("1%") flip
    share of the larger packets that are damaged unseen by TCP ("0.1%") slow       {rank: factor}:
    the rank and what it starts get 1/factor of the time; LOOSESTEP_SLOW=factor in its environment
    faults     what is to happen when, counted from `start`: Kill, Stop, Partition network    False:
    no namespaces and no limits, the rest as usual launcher   "loosestep" (siblings of a dead rank
    live on) or "torchrun" wire       lead all traffic through user space even if neither delay,
    loss nor flip is given: they can come later
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int | Sequence[int] = 1,
        *,
        bandwidth: str | None = None,
        links: Mapping[tuple[int, int], str] | None = None,
        delay: str | None = None,
        loss: str | None = None,
        flip: str | None = None,
        slow: Mapping[int, float] | None = None,
        faults: Collection[Fault] = (),
        network: bool = True,
        launcher: str = "loosestep",
        wire: bool = False,
    ) -> None:
        self.counts = launch.ranks_of_nodes(nodes, ranks_per_node)
        if launcher == "torchrun":
            torchrun.require_even(self.counts)
        rate = None if bandwidth is None else grammar.link_rate(bandwidth)
        pairs = {
            pair: grammar.link_rate(text, what=f"link {pair}")
            for pair, text in (links or {}).items()
        }
        self._effects = {
            "delay": 0.0 if delay is None else units.duration(delay),
            "loss": 0.0 if loss is None else grammar.share(loss),
            "flip": 0.0 if flip is None else grammar.share(flip, what="--flip"),
        }
        self.slow = dict(slow or {})
        self.faults = list(faults)
        self.launcher = launcher
        self.job: Job | None = None
        self._attendants: list[FaultTimer | Slowdown] = []
        self._meeting_port: int | None = None
        self._mark = new_mark()
        self._check(pairs, rate)
        self.network: Network | None = None
        if network:
            wired = wire or any(self._effects.values())
            self.network = _make_network(
                nodes, rate=rate, pairs=pairs, wired=wired, mark=self._mark
            )
            if self.network.wire is not None:
                self.network.wire.set(**self._effects)
        elif (
            rate is not None
            or pairs
            or wire
            or any(self._effects.values())
            or self._has_partitions()
        ):
            raise LabError(
                "without a network there is nothing to limit, delay, lose or cut: leave those "
                "options out"
            )

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        output: Output | None = None,
    ) -> Result:
        """`start`, and wait for the end. TimeoutError with the last lines of every rank that
        still runs.
        """
        with self.start(command, env=env, output=output) as job:
            return job.wait(timeout)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: Output | None = None,
        announce: Announce | None = None,
    ) -> Job:
        """Start SCRIPT ARGS (or any command) on every rank; the faults' clock starts too. One job
        at a time.

        `output(rank, line)` is called for every line, `announce(text)` for every fault that is
        carried out.
        """
        if self.job is not None and self.job.running:
            raise LabError(
                "this lab is running a job; wait for its end, stop it, or make another lab"
            )
        self._dismiss()
        command = launch.command_for(command[0], command[1:])
        if self.launcher == "torchrun":
            places = torchrun.places(command, self.counts, self.network)
            store = None
        else:
            places, store = self._places(command)
            self._meeting_port = int(places[0].env["MASTER_PORT"])
        places = [self._complete(place, env or {}) for place in places]
        self.job = Job(places, output=output, store=store)
        self._attendants = [
            Slowdown(self.job, rank, factor) for rank, factor in self.slow.items() if factor > 1
        ]
        self._attendants.append(FaultTimer(self.faults, self.job, self, announce=announce))
        return self.job

    def close(self) -> None:
        """End the job if it runs and remove the network."""
        try:
            if self.job is not None:
                self.job.stop()
            self._dismiss()
        finally:
            if self.network is not None:
                self.network.close()
                self.network = None

    def wait_for_start(self, timeout: float) -> None:
        """Until all ranks have met at the rendezvous. TimeoutError with the last lines of those
        that have not, be it that they ended before.

        A job of which no rank goes there within the time is one without torch.distributed, and left
        alone; so is one under torchrun, which has a deadline of its own.
        """
        if self.job is None or self._meeting_port is None:
            return
        missing = {rank.number: rank for rank in self.job.ranks}
        met = 0
        until = time.monotonic() + timeout
        while True:
            for rank in list(missing.values()):
                if rank.returncode == 0 or (
                    rank.returncode is None and has_met(rank.pid, self._meeting_port)
                ):
                    met += rank.returncode is None
                    del missing[rank.number]
            left = until - time.monotonic()
            if not missing or self.job.ended(max(0.0, min(left, LOOK))):
                return
            if left <= 0:
                break
        if met:
            stories = "".join(rank.story() for rank in missing.values())
            raise TimeoutError(
                f"not at the rendezvous after {timeout:g} s, where others wait:\n{stories}"
            )

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def limit(self, node: int, rate: str | None) -> None:
        """Change the rate of a node's cable; None takes the limit away."""
        self._net().limit(node, None if rate is None else grammar.link_rate(rate))

    def partition(self, *groups: Collection[int]) -> None:
        """Cut the groups off from each other (nodes not named form one more) until `heal`."""
        for source, target in self._cuts(groups):
            self._net().drop(source, target)

    def drop(self, source: int, target: int) -> None:
        """One-way: nothing that node `source` sends reaches node `target`, until `heal`."""
        self._net().drop(source, target)

    def rejoin(self, *groups: Collection[int]) -> None:
        """Undo one `partition` of these groups; what others cut stays cut."""
        for source, target in self._cuts(groups):
            self._net().restore(source, target)

    def heal(self) -> None:
        """Undo every `partition` and `drop`."""
        self._net().restore_all()

    def flip_bytes(self, share: str) -> None:
        """Damage so many of the larger packets ("1%"), in a way that TCP does not notice; "0%"
        ends it.
        """
        self._set_wire(flip=grammar.share(share, what="flip_bytes"))

    def lose(self, share: str) -> None:
        """Change the share of packets that vanish."""
        self._set_wire(loss=grammar.share(share, what="lose"))

    def delay(self, duration: str) -> None:
        """Change the delay, one way."""
        self._set_wire(delay=units.duration(duration, what="delay"))

    def bytes(self) -> list[tuple[int, int]]:
        """(sent, received) over each node's cable since the lab began."""
        return self._net().bytes()

    def _net(self) -> Network:
        if self.network is None:
            raise LabError("this lab has no network (network=False, or it is closed)")
        return self.network

    def _set_wire(self, **settings: float) -> None:
        wire = self._net().wire
        if wire is None:
            raise LabError(
                "the links of this lab are the kernel's; make it with wire=True to delay, lose or "
                "damage packets"
            )
        wire.set(**settings)

    def _dismiss(self) -> None:
        """Wait for those that attended the last job; they end with it."""
        for attendant in self._attendants:
            attendant.join()
        self._attendants = []

    def _has_partitions(self) -> bool:
        return any(isinstance(fault, Partition) for fault in self.faults)

    def _cuts(self, groups: Collection[Collection[int]]) -> Iterator[tuple[int, int]]:
        named = grammar.complete(tuple(frozenset(group) for group in groups), len(self.counts))
        for group in named:
            for source in group:
                yield from (
                    (source, target) for other in named if other is not group for target in other
                )

    def _places(self, command: Sequence[str]) -> tuple[list[RankCommand], object]:
        if self.network is None:
            return launch.local_places(command, self.counts)
        listener = self.network.listen(0)
        address = self.network.address(0)
        port = listener.getsockname()[1]
        hosts = self.network.hosts()

        def host() -> object:
            add_hosts(hosts)
            return host_store(listener)

        store = self.network.inside(0, host)  # there, since the store connects to itself
        return launch.places(command, self.counts, address, port), store

    def _complete(self, place: RankCommand, env: Mapping[str, str]) -> RankCommand:
        """What the lab adds: the node's network, the mark by which `clean` finds leftovers, how
        slow the rank is.
        """
        extra = {MARK: self._mark}
        namespace = hosts = "-"
        if self.network is not None:
            namespace = self.network.namespace(place.node)
            hosts = self.network.hosts()
            extra |= {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "NCCL_SOCKET_IFNAME": INTERFACE,
                "TP_SOCKET_IFNAME": INTERFACE,
            }
        factor = self.slow.get(int(place.env.get("RANK", -1)))
        if factor is not None:
            extra[SLOW] = f"{factor:g}"
        return RankCommand(
            place.label, place.command, {**place.env, **extra, **env}, place.node, namespace, hosts
        )

    def _check(self, pairs: Mapping[tuple[int, int], int], cable: int | None) -> None:
        """Every fault and limit names ranks and nodes that exist."""
        nodes = len(self.counts)
        ranks = sum(self.counts)
        for (a, b), rate in pairs.items():
            for node in (a, b):
                if not 0 <= node < nodes:
                    raise ValueError(
                        f"link {a}-{b}: there is no node {node}; the nodes are 0 to {nodes - 1}"
                    )
            if a == b:
                raise ValueError(f"link {a}-{b}: expected two different nodes")
            if cable is not None and rate > cable:
                raise ValueError(
                    f"link {a}-{b}: {rate / 1e6:g} Mbit/s is more than the {cable / 1e6:g} Mbit/s "
                    "of each node's cable, which it goes through"
                )
        for fault in self.faults:
            if isinstance(fault, Partition):
                grammar.complete(fault.groups, nodes)
        for rank, factor in self.slow.items():
            if not factor >= 1:
                raise ValueError(
                    f"slow rank {rank}: expected a factor of at least 1, got {factor:g}"
                )
        of_ranks = [
            (f"{fault}", fault.rank) for fault in self.faults if not isinstance(fault, Partition)
        ]
        of_ranks += [(f"slow rank {rank}", rank) for rank in self.slow]
        for what, rank in of_ranks:
            if not 0 <= rank < ranks:
                raise ValueError(f"{what}: there is no rank {rank}; the ranks are 0 to {ranks - 1}")
        if self.launcher not in LAUNCHERS:
            raise ValueError(
                f"launcher must be one of {', '.join(LAUNCHERS)}, got {self.launcher!r}"
            )
        if self.launcher == "torchrun" and of_ranks:
            raise ValueError(
                "torchrun owns its ranks: kill, stop and slow need the launcher 'loosestep'"
            )


@contextmanager
def _clear_refusal() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise LabError(
            "the lab needs pyroute2: pip install 'loosestep[lab]', or use --no-network"
        ) from None
    except PermissionError as error:
        raise LabError(
            f"{error.strerror}; the lab needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), or "
            "--no-network"
        ) from None
    except FileNotFoundError as error:
        raise LabError(
            f"{error.filename} is missing: delay, loss and flip need the kernel's TUN driver"
        ) from None


def _make_network(nodes: int, **options: object) -> Network:
    if sys.platform != "linux":
        raise LabError(
            f"network namespaces exist on Linux only, this is {sys.platform}; use --no-network"
        )
    with _clear_refusal():
        from pyroute2 import NetlinkError

        try:
            return Network(nodes, **options)  # type: ignore[arg-type]
        except NetlinkError as error:
            raise LabError(
                f"the kernel refused a part of the network ({error}); the lab needs bridge and "
                "veth, sch_tbf for a bandwidth, sch_htb and cls_u32 for single links: load those "
                "modules, leave the option out, or use --no-network"
            ) from None
