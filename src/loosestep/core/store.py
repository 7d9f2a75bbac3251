"""A rendezvous store behind a socket that listens already."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def host_store(listener: socket.socket) -> TCPStore:
    """The store, served until it is dropped.

    Bound by us, so the port is known before anyone asks for it, and nothing listens on any other
    address.
    """
    from torch.distributed import TCPStore  # late: the help needs no torch

    address, port = listener.getsockname()[:2]
    return TCPStore(
        UNSPECIFIED.get(address, address),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
