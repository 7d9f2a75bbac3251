"""Nodes as network namespaces, each with one cable to a switch, each cable with a limited rate.

    node 0: eth0 ─── p0 ┐
    node 1: eth0 ─── p1 ┼ bridge      (the switch has a namespace of its own)
    node 2: eth0 ─── p2 ┘

A token bucket on eth0 limits what a node sends, one on its port what it receives. The namespaces
have no name in the file system: they live as long as we hold them open or a process runs in them,
so the kernel removes all of it when we are gone, however we went. Nothing leads out of the lab, so
its addresses cannot collide with any in use on the machine.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from loosestep.lab.user_space_wire import UserSpaceWire, open_tap

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
MOST_NODES = 100
INTERFACE = "eth0"
ROOT_HANDLE = 0x10000
PAIRS_HANDLE = 0x20000
ETHERNET_IP = 0x0800
NUD_PERMANENT = 0x80

_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """The namespaces of a lab. `rate` in bits per second, None for no limit; `pairs` limits single
    pairs of nodes.

    With `wired`, every frame passes through a `UserSpaceWire` that can delay, lose and damage it.
    """

    def __init__(
        self,
        nodes: int,
        *,
        rate: int | None,
        pairs: Mapping[tuple[int, int], int],
        wired: bool,
        mark: str,
    ) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"a lab has 1 to {MOST_NODES} nodes, got {nodes}")
        self._rates = [rate] * nodes
        self._earlier = [(0, 0)] * nodes  # what counters that began anew had counted
        self._pairs = dict(pairs)
        self._drops: Counter[tuple[int, int]] = Counter()
        self._drops_lock = threading.Lock()
        self._handles: list[int] = []
        self.wire: UserSpaceWire | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            self._switch = self._open_namespace()
            self._nodes = [self._open_namespace() for _ in range(nodes)]
            mtu = _packet_size(rate) if wired else 1500
            if wired:
                taps = [
                    (
                        _inside(node, open_tap, INTERFACE),
                        _inside(self._switch, open_tap, f"p{number}"),
                    )
                    for number, node in enumerate(self._nodes)
                ]
                self.wire = UserSpaceWire(taps, mark=mark)
            _inside(self._switch, self._build_switch, mtu)
            for number, node in enumerate(self._nodes):
                _inside(node, self._build_node, number, mtu)
            undo.pop_all()

    def close(self) -> None:
        """Let go of everything; the kernel removes what nobody holds."""
        if self.wire is not None:
            self.wire.close()
        while self._handles:
            os.close(self._handles.pop())

    def __len__(self) -> int:
        return len(self._nodes)

    def namespace(self, node: int) -> str:
        """A path by which any process of this machine may enter the node while we live."""
        return f"/proc/{os.getpid()}/fd/{self._nodes[node]}"

    def address(self, node: int) -> str:
        return f"10.83.0.{node + 1}"

    def hosts(self) -> str:
        """The names of the nodes, as lines for /etc/hosts; also in the form in which torch's
        sockets see IPv4.
        """
        named = [
            ("127.0.0.1", "localhost"),
            *((self.address(node), f"node{node}") for node in range(len(self))),
        ]
        return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in named)

    def inside(self, node: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the node's network (in a thread of its own: a namespace belongs to
        a thread).
        """
        return _inside(self._nodes[node], function, *arguments)

    def listen(self, node: int) -> socket.socket:
        """A listening socket in the node, on a free port."""
        return self.inside(node, socket.create_server, ("", 0))

    def rate(self, node: int) -> int | None:
        return self._rates[node]

    def limit(self, node: int, rate: int | None) -> None:
        """Change the rate of a node's cable, both ways."""
        before = self._total(node)
        self._rates[node] = rate
        _inside(self._nodes[node], _reshape, INTERFACE, rate, self._pair_rates(node))
        _inside(self._switch, _reshape, f"p{node}", rate, {})
        sent, received = self._counted(node)
        self._earlier[node] = before[0] - sent, before[1] - received

    def drop(self, source: int, target: int) -> None:
        """From now on nothing that `source` sends reaches `target`; the other direction is not
        touched.

        The source is made to believe that the target has the switch's own address: the switch takes
        the frames and, as no router, throws them away. So what is dropped is lost in the network,
        silently.
        """
        with self._drops_lock:
            self._drops[source, target] += 1
            self._address_frames(source, target, _SWITCH_MAC)

    def restore(self, source: int, target: int) -> None:
        """Undo one `drop`; what was dropped twice flows again when both are undone."""
        with self._drops_lock:
            self._drops[source, target] -= 1
            self._mend()

    def restore_all(self) -> None:
        """Undo every `drop`."""
        with self._drops_lock:
            self._drops = Counter(dict.fromkeys(self._drops, 0))
            self._mend()

    def bytes(self) -> list[tuple[int, int]]:
        """(sent, received) over each node's cable since the lab began."""
        return [self._total(node) for node in range(len(self))]

    def _total(self, node: int) -> tuple[int, int]:
        earlier = self._earlier[node]
        counted = self._counted(node)
        return earlier[0] + counted[0], earlier[1] + counted[1]

    def _counted(self, node: int) -> tuple[int, int]:
        """Since the counters began, which is anew with every change of the limit."""
        sent = _inside(self._nodes[node], sent_through, INTERFACE)
        return sent, _inside(self._switch, sent_through, f"p{node}")

    def pairs(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Of the pairs with a limit of their own: (rate, bytes there, bytes back) since the last
        change of the limits.
        """
        sent = [_inside(node, _class_counters) for node in self._nodes]

        def between(source: int, target: int) -> int:
            return sent[source][list(self._pair_rates(source)).index(self.address(target))]

        return {
            (a, b): (rate, between(a, b), between(b, a)) for (a, b), rate in self._pairs.items()
        }

    def _open_namespace(self) -> int:
        handle = _in_thread(_new_namespace)
        self._handles.append(handle)
        return handle

    def _build_switch(self, mtu: int) -> None:
        with _netlink() as netlink:
            netlink.link("add", ifname="switch", kind="bridge", address=_SWITCH_MAC)
            switch = netlink.link_lookup(ifname="switch")[0]
            for number, node in enumerate(self._nodes):
                if self.wire is None:
                    end = {"ifname": INTERFACE, "net_ns_fd": node}
                    netlink.link("add", ifname=f"p{number}", kind="veth", peer=end)
                port = netlink.link_lookup(ifname=f"p{number}")[0]
                netlink.link("set", index=port, mtu=mtu)
                netlink.link("set", index=port, master=switch, state="up")
                _shape(netlink, port, self._rates[number], {})
            netlink.link("set", index=switch, state="up")

    def _build_node(self, number: int, mtu: int) -> None:
        _disable_ipv6()
        with _netlink() as netlink:
            loopback, cable = (netlink.link_lookup(ifname=name)[0] for name in ("lo", INTERFACE))
            netlink.link("set", index=loopback, state="up")
            netlink.link("set", index=cable, mtu=mtu, address=_mac(number))
            netlink.link("set", index=cable, state="up")
            netlink.addr("add", index=cable, address=self.address(number), prefixlen=24)
            _shape(netlink, cable, self._rates[number], self._pair_rates(number))

    def _pair_rates(self, node: int) -> dict[str, int]:
        """The limits towards single nodes, by address."""
        rates = {pair: rate for (a, b), rate in self._pairs.items() for pair in ((a, b), (b, a))}
        return {
            self.address(target): rate for (source, target), rate in rates.items() if source == node
        }

    def _mend(self) -> None:
        for source, target in [pair for pair, count in self._drops.items() if count <= 0]:
            del self._drops[source, target]
            self._address_frames(source, target, _mac(target))

    def _address_frames(self, source: int, target: int, mac: str) -> None:
        def change() -> None:
            with _netlink() as netlink:
                cable = netlink.link_lookup(ifname=INTERFACE)[0]
                netlink.neigh(
                    "replace",
                    dst=self.address(target),
                    lladdr=mac,
                    ifindex=cable,
                    state=NUD_PERMANENT,
                )

        self.inside(source, change)


_SWITCH_MAC = "02:00:00:00:ff:ff"


def _mac(node: int) -> str:
    return f"02:00:00:00:00:{node + 1:02x}"


def _packet_size(rate: int | None) -> int:
    """About a millisecond's worth: the wire's cost is per packet, whatever its size. Ethernet's
    1500 at the least.
    """
    return 60_000 if rate is None else min(60_000, max(1500, rate // 8 // 1000))


def _shape(netlink: Any, index: int, rate: int | None, pairs: Mapping[str, int]) -> None:
    """A token bucket for the interface, and below it one for each address with a rate of its
    own.
    """
    if rate is not None:
        netlink.tc(
            "add", "tbf", index, ROOT_HANDLE, rate=rate / 8, burst=_burst(rate), limit=_queue(rate)
        )
    if pairs:
        parent = {} if rate is None else {"parent": ROOT_HANDLE + 1}
        netlink.tc("add", "htb", index, PAIRS_HANDLE, **parent)
    for number, (address, pair_rate) in enumerate(pairs.items(), start=1):
        burst = _burst(pair_rate)
        bucket = {"rate": pair_rate / 8, "ceil": pair_rate / 8, "burst": burst, "cburst": burst}
        netlink.tc("add-class", "htb", index, PAIRS_HANDLE + number, parent=PAIRS_HANDLE, **bucket)
        destination = f"0x{socket.inet_aton(address).hex()}/0xffffffff+16"
        target = {"target": PAIRS_HANDLE + number, "keys": [destination]}
        netlink.tc(
            "add-filter", "u32", index, parent=PAIRS_HANDLE, prio=1, protocol=ETHERNET_IP, **target
        )


def _reshape(interface: str, rate: int | None, pairs: Mapping[str, int]) -> None:
    with _netlink() as netlink:
        index = netlink.link_lookup(ifname=interface)[0]
        if any(
            qdisc["handle"] in (ROOT_HANDLE, PAIRS_HANDLE)
            for qdisc in netlink.get_qdiscs(index=index)
        ):
            netlink.tc("del", index=index, root=True)
        _shape(netlink, index, rate, pairs)


def _burst(rate: int) -> int:
    """What may leave at once, in bytes: a whole offloaded TCP segment, or two milliseconds'
    worth.
    """
    return max(1 << 16, rate // 8 // 500)


def _queue(rate: int) -> int:
    """What may wait, in bytes: 50 milliseconds' worth, and never less than a few segments."""
    return max(1 << 18, rate // 8 // 20)


def sent_through(interface: str) -> int:
    """Bytes that left through an interface of this network. Its token bucket counts the headers of
    every packet; the interface's own counter, for where there is no limit, counts one for many
    packets that the kernel hands on together.
    """
    with _netlink() as netlink:
        link = netlink.get_links(ifname=interface)[0]
        for qdisc in netlink.get_qdiscs(index=link["index"]):
            if qdisc.get_attr("TCA_KIND") == "tbf":
                return int(qdisc.get_attr("TCA_STATS")["bytes"])
        return int(link.get_attr("IFLA_STATS64")["tx_bytes"])


def _class_counters() -> list[int]:
    """What the buckets of single pairs let pass, in the order in which they were made."""
    with _netlink() as netlink:
        index = netlink.link_lookup(ifname=INTERFACE)[0]
        classes = {
            found["handle"]: found.get_attr("TCA_STATS")["bytes"]
            for found in netlink.get_classes(index=index)
        }
    return [int(count) for handle, count in sorted(classes.items()) if handle > PAIRS_HANDLE]


@contextmanager
def _netlink() -> Iterator[Any]:
    """A netlink connection in the namespace of the calling thread."""
    from pyroute2 import IPRoute  # late: an optional dependency

    with IPRoute() as netlink:
        yield netlink


def _disable_ipv6() -> None:
    """Its neighbour discovery is traffic that nobody asked for; where /proc/sys may not be
    written, that much is left.
    """
    with suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")


def _new_namespace() -> int:
    if _libc.unshare(CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot make a network namespace: {os.strerror(number)}")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _inside(namespace: int, function: Callable[..., T], *arguments: Any) -> T:
    def enter() -> T:
        if _libc.setns(namespace, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter a network namespace: {os.strerror(number)}")
        return function(*arguments)

    return _in_thread(enter)


def _in_thread(function: Callable[[], T]) -> T:
    """The thread ends with the call, and with it its namespace."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()
