"""A rendezvous store behind a socket that listens already, and what its host tells in it."""

from __future__ import annotations

import hmac
import json
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from loosestep.core.keys import derive

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ENDED = "loosestep/launcher/ended"
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


def tell_ended(store: Any, rank: int, how: str, *, key: str, run: str) -> None:
    """Let ranks that still wait for others know that one of these will never come."""
    store.set(ENDED, json.dumps({"rank": rank, "how": how, "proof": _proof(key, run, rank, how)}))


def who_ended(store: Any, *, key: str, run: str) -> tuple[int, str] | None:
    """The rank of which the launcher has told that, and how it ended."""
    if not store.check([ENDED]):
        return None
    try:
        note = json.loads(store.get(ENDED))
        rank = int(note["rank"])
        how = str(note["how"])
        proven = hmac.compare_digest(str(note["proof"]), _proof(key, run, rank, how))
    except (ValueError, KeyError, TypeError):  # a stranger's
        return None
    return (rank, how) if proven else None


def _proof(key: str, run: str, rank: int, how: str) -> str:
    return derive(key.encode(), "launcher", run, rank, how).hex()
