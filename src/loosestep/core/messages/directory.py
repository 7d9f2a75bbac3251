"""Where the ranks of a gossip find each other: cards in the run's store, read once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import DistStoreError

from loosestep.core.keys import derive
from loosestep.core.messages.address import is_loopback
from loosestep.core.pending import nothing

LOOK = timedelta(seconds=0.25)  # between two looks whether somebody can still come


class Store(Protocol):
    """What a directory needs of a torch.distributed store."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> Any: ...


def wait_for(store: Store, key: str, *, deadline: float, check: Callable[[], None]) -> bytes:
    """What somebody has set, waiting for it; `check` raises when nobody will. TimeoutError after
    the deadline.
    """
    until = time.monotonic() + deadline
    while True:
        check()
        try:
            store.wait([key], LOOK)
        except DistStoreError:  # the time is over
            if time.monotonic() > until:
                raise TimeoutError(f"nobody has set {key} within {deadline:g} s") from None
        else:
            return store.get(key)


class Directory:
    """Cards in the store: address, layout, session. With a key each card carries a proof,
    without one it must not.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        key: bytes | None,
        deadline: float,
        *,
        check: Callable[[], None] = nothing,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._key = key
        self._deadline = deadline
        self._check = check

    def publish(self, rank: int, card: dict[str, Any]) -> None:
        text = json.dumps(card)
        self._store.set(
            f"{self._prefix}/{rank}", json.dumps({"card": text, "proof": self._proof(rank, text)})
        )

    def _proof(self, rank: int, text: str) -> str:
        return (
            derive(self._key, "card", self._prefix, rank, text).hex()
            if self._key is not None
            else ""
        )

    def read(self, peer: int, mine: dict[str, Any]) -> dict[str, Any]:
        name = f"{self._prefix}/{peer}"
        try:
            entry = json.loads(
                wait_for(self._store, name, deadline=self._deadline, check=self._check)
            )
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {peer} has not published its address within {self._deadline:g} s: did it "
                "start?"
            ) from error
        if entry["proof"] != self._proof(peer, entry["card"]):
            had = (
                "a wrong run key"
                if entry["proof"] and self._key
                else "no run key"
                if self._key
                else "a run key, this one has none"
            )
            raise ConnectionError(
                f"rank {peer} has {had}: set LOOSESTEP_KEY (or key=) to the same secret on every "
                "rank"
            )
        card: dict[str, Any] = json.loads(entry["card"])
        if card["layout"] != mine["layout"]:
            raise ValueError(
                f"rank {peer} trains another model (layout {card['layout'][:12]}, here "
                f"{mine['layout'][:12]}): the parameters must have the same names, shapes, dtypes "
                "and order on every rank"
            )
        (there, _) = card["address"]
        (here, _) = mine["address"]
        if is_loopback(there) != is_loopback(here):
            raise ValueError(
                f"rank {peer} listens on {there}, this rank on {here}: the one cannot reach the "
                "other. Set MASTER_ADDR to an address of rank 0's machine that the others reach, "
                "not to a name that its own /etc/hosts takes for loopback"
            )
        if card["codec"] != mine["codec"]:
            raise ValueError(
                f"rank {peer} has codec={card['codec'] or None}, this rank "
                f"{mine['codec'] or None}: use the same on every rank"
            )
        if card["encrypt"] != mine["encrypt"]:
            raise ValueError(
                f"rank {peer} has encrypt={card['encrypt']}, this rank {mine['encrypt']}: use the "
                "same on every rank"
            )
        return card
