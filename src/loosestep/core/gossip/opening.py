"""How a rank's end of the gossip is opened: its sockets and its memory first, of which a card tells
the others, then the loop that knows theirs. Needs no torch, so a process of its own can do it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loosestep.core.gossip.loop import Courier
from loosestep.core.gossip.memory import Memory
from loosestep.core.gossip.peer import Timing
from loosestep.core.messages.frames import HEADER_BYTES, Header, Wire, curve_pair
from loosestep.core.messages.slots import EdgeSlots, TheirSlots, make_slots, reach, this_host
from loosestep.core.messages.sockets import Curve, Transport
from loosestep.core.stopping import Stop

QUEUE = 16  # frames that the socket of an edge takes at a time; the others wait for it


@dataclass(slots=True)
class Settings:
    """What a rank knows about its end before it has met anybody. Plain values."""

    rank: int
    world: list[int]
    run_id: str
    layout: str
    generation: int
    session: str
    host: str
    ports: tuple[int, int] | None
    window: int
    timing: dict[str, float]
    gradients: list[tuple[int, int]]
    key: str | None = None
    encrypt: bool = False
    shared: bool = True
    password: str = ""

    @property
    def peers(self) -> list[int]:
        """The others."""
        return [peer for peer in self.world if peer != self.rank]


class Opening:
    """An end that is being opened, in the process that will run it."""

    def __init__(
        self,
        settings: Settings,
        shadow: Memory,
        *,
        emit: Callable[..., None],
        stop: Stop,
        lose: Callable[[Header], bool] | None = None,
    ) -> None:
        self._settings = settings
        self._shadow = shadow
        self._emit = emit
        self._stop = stop
        self._lose = lose
        key = None if settings.key is None else bytes.fromhex(settings.key)
        largest = shadow.largest_chunk_bytes
        self._wire = Wire(
            settings.rank,
            settings.world,
            run_id=settings.run_id,
            layout=bytes.fromhex(settings.layout),
            generation=settings.generation,
            largest_body=largest,
            key=key,
            session=settings.session,
        )
        curve = None
        if settings.encrypt and key is not None:
            public, secret = curve_pair(key, settings.run_id, settings.rank)
            theirs = {peer: curve_pair(key, settings.run_id, peer)[0] for peer in settings.peers}
            curve = Curve(public, secret, theirs)
        ports = None if settings.ports is None else range(*settings.ports)
        self._transport = Transport(
            settings.host,
            ports,
            largest=HEADER_BYTES + largest,
            queue=QUEUE,
            curve=curve,
            password=settings.password,
        )
        self._here = this_host() if settings.shared else ""
        slots = 3 * settings.window * len(settings.peers)
        self._own = make_slots(slots, largest) if self._here and slots else None

    def card(self) -> dict[str, Any]:
        """Where it can be found."""
        return {
            "host": self._here,
            "memory": self._own.card() if self._own is not None else None,
            "address": self._transport.address,
            "session": self._settings.session,
        }

    def meet(self, cards: dict[int, dict[str, Any]]) -> Courier:
        """The loop among the ranks that these cards tell of."""
        settings = self._settings
        slots: dict[int, EdgeSlots] = {}
        near: dict[int, TheirSlots] = {}
        for index, peer in enumerate(settings.peers):
            card = cards[peer]
            if self._own is not None and card["host"] == self._here:
                places = range(3 * settings.window * index, 3 * settings.window * (index + 1))
                slots[peer] = EdgeSlots(self._own, places, self._shadow.offer_dtype)
                memory = reach(card["memory"])
                if memory is not None:
                    near[peer] = memory
            self._wire.meet(peer, card["session"])
            host, port = card["address"]
            self._transport.connect(peer, (host, port))
        return Courier(
            settings.rank,
            self._shadow,
            wire=self._wire,
            transport=self._transport,
            peers=settings.peers,
            window=settings.window,
            emit=self._emit,
            lose=self._lose,
            gradients=dict(settings.gradients),
            slots=slots,
            near=near,
            stop=self._stop,
            timing=Timing(**settings.timing),
            own=self._own,
        )

    def close(self) -> None:
        """Let go of all of it; nobody was met."""
        self._transport.close()
        if self._own is not None:
            self._own.close()
