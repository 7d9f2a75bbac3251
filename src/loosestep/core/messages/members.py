"""Who is there: what every peer last said about itself, and when it counts as suspended or gone.

A peer is heard through any of its frames; when it has nothing to say it sends a beat. Silence for
`suspend` seconds suspends it: no new exchange, everything pending is kept, and its next frame
resumes it. Silence for `deadline` seconds evicts it. A closed connection that cannot be opened
again is a death (the mailbox finds that out). Every transition is reported once. Only monotonic
clocks: a jump of the wall clock changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from loosestep.core.messages.frames import Flags


class State(Enum):
    ALIVE = "alive"
    SUSPENDED = "suspended"
    DEAD = "dead"  # gone without a word: killed, evicted or quarantined
    LEFT = "left"  # said goodbye


GONE = (State.DEAD, State.LEFT)


@dataclass(slots=True)
class Peer:
    """What is known about one peer."""

    rank: int
    heard: float
    state: State = State.ALIVE
    progress: int = 0
    flags: int = 0
    stalled: bool = False
    slower: float = 0.0
    evicted: bool = False  # gone by our decision: it may still be there and deserves to be told


class Members:
    """The peers of one rank."""

    def __init__(
        self,
        peers: Iterable[int],
        *,
        now: float,
        suspend: float,
        deadline: float,
        emit: Callable[..., None],
    ) -> None:
        self.peers = {rank: Peer(rank, now) for rank in peers}
        self._suspend = suspend
        self._deadline = deadline
        self._emit = emit
        self._swept = now

    def ranks(self, *states: State) -> set[int]:
        return {rank for rank, peer in list(self.peers.items()) if peer.state in states}

    def alive(self) -> set[int]:
        return self.ranks(State.ALIVE)

    def present(self) -> set[int]:
        """Everybody who is not gone: alive or suspended."""
        return self.ranks(State.ALIVE, State.SUSPENDED)

    def hear(
        self, rank: int, now: float, *, progress: int, flags: int, slower: float = 0.0
    ) -> bool:
        """A frame came. True when the peer was suspended and is back."""
        peer = self.peers[rank]
        peer.heard = now
        peer.progress = max(peer.progress, progress)
        peer.flags = flags
        peer.slower = slower
        stalled = bool(flags & Flags.STALLED)
        if stalled and not peer.stalled:
            self._emit("peer_no_progress", peer=rank, progress=peer.progress)
        peer.stalled = stalled
        if peer.state is State.SUSPENDED and not flags & Flags.DEAF:
            peer.state = State.ALIVE
            self._emit("peer_resumed", peer=rank)
            return True
        if peer.state is State.ALIVE and flags & Flags.DEAF:
            self._silence(peer, "it does not hear this rank")
        return False

    def sweep(self, now: float) -> list[int]:
        """Suspend who is silent; the ranks whose silence has reached the deadline."""
        pause = now - self._swept
        self._swept = now
        # this process itself was stopped: nobody can be blamed for that time
        if pause > self._suspend / 2:
            for peer in self.peers.values():
                # who was heard since then was not silent at all
                peer.heard = min(peer.heard + pause, now)
        for peer in self.peers.values():
            if peer.state is State.ALIVE and now - peer.heard > self._suspend:
                self._silence(peer, f"silent for {now - peer.heard:.2f} s")
        return [
            p.rank
            for p in self.peers.values()
            if p.state is State.SUSPENDED and now - p.heard > self._deadline
        ]

    def _silence(self, peer: Peer, why: str) -> None:
        peer.state = State.SUSPENDED
        self._emit("peer_suspended", peer=peer.rank, why=why)

    def deaf_to(self, rank: int, now: float) -> bool:
        """Whether this rank should tell the peer that it does not hear it."""
        return now - self.peers[rank].heard > self._suspend

    def remove(self, rank: int, state: State) -> bool:
        """The peer is gone; False when that was known. What it last said about its progress
        stays.
        """
        peer = self.peers[rank]
        if peer.state in GONE:
            return False
        peer.state = state
        return True

    def progress(self) -> int:
        """Gradients of all peers, as last heard."""
        return sum(peer.progress for peer in list(self.peers.values()))

    def all_flag(self, ranks: Iterable[int], flag: Flags) -> bool:
        return all(self.peers[rank].flags & flag for rank in ranks)
