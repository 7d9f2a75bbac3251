"""Where a mailbox listens: loopback when the run is on one machine, else the interface that
reaches its store.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """Whether an address or host name stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass  # a name, not an address
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR={host!r} cannot be resolved ({error}): set it to an address of rank 0"
        ) from error
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def bind_host() -> str:
    """The address to listen on, from GLOO_SOCKET_IFNAME and MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if is_loopback(master):
        return "127.0.0.1"
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names:
        return _interface_address(names.split(",")[0])
    return route_to(master)


def route_to(host: str) -> str:
    """The own address on the way to a host."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # a datagram socket sends nothing here: the kernel only chooses the interface
            probe.connect(target)
        except OSError as error:
            raise ValueError(
                f"no interface reaches {host!r} ({error}): set GLOO_SOCKET_IFNAME"
            ) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface with an IPv4 address; None where it has none."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            if _interface_address(name) == address:
                return name
    return None


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
            )
        except OSError as error:
            known = ", ".join(found for _, found in socket.if_nameindex())
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={name!r} has no IPv4 address; interfaces here: {known}"
            ) from error
    return socket.inet_ntoa(reply[20:24])


def port_range() -> range | None:
    """LOOSESTEP_PORT as a range (`29600` or `29600-29700`); None lets the system choose."""
    text = os.environ.get("LOOSESTEP_PORT", "")
    if not text:
        return None
    first, _, last = text.partition("-")
    try:
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError(
            f"LOOSESTEP_PORT={text!r}: expected a port (29600) or a range of ports (29600-29700)"
        )
    return ports
