"""A mailbox on the virtual clock: the real shadow and the real protocol of an edge, events instead
of sockets.

No thread: the arrival of a message is an event, so a learner answers while it computes, as a
communication thread would. Nothing is lost or doubled. Beats and membership need no messages here:
who is gone is known `NOTICED` seconds after its death, how many steps the others have made at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loosestep.codecs import Codec
from loosestep.core.gossip.contract import Mode
from loosestep.core.gossip.ending import average
from loosestep.core.gossip.exchange import Edge, Message, NotFiniteError, pull_of
from loosestep.core.gossip.loop import KEPT_ROUNDS
from loosestep.core.gossip.mailbox import in_flight, spread
from loosestep.core.gossip.memory import Fold
from loosestep.core.gossip.peer import PendingExchange, Rota, Transfer
from loosestep.core.gossip.shadow import Shadow
from loosestep.core.messages.frames import HEADER_BYTES, FrameKind
from loosestep.sim.clock import Gate, VirtualClock
from loosestep.sim.links import Links

Array = NDArray[Any]

NOTICED = 0.13  # seconds from a kill until its edges are dropped, as measured on processes
RETRY = 1.0  # seconds until a request that the peer had no room for is sent again
SAMPLED = 10  # steps of every learner between two looks at the consensus distance


class VirtualExchange(PendingExchange):
    """An exchange in flight, on the virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._gate = Gate(clock)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in virtual time."""
        return self._gate.wait(timeout, why="an exchange")

    def finish(self, outcome: str) -> None:
        """Done."""
        super().finish(outcome)
        self._gate.open()


class Peers:
    """The mailboxes that gossip with each other, the links between them, and who is there."""

    def __init__(self, clock: VirtualClock, links: Links) -> None:
        self.clock = clock
        self._links = links
        self.boxes: dict[int, VirtualMailbox] = {}
        self.lost: set[int] = set()
        self._steps = 0

    def distance(self) -> float | None:
        """After every `SAMPLED` steps of everybody: the root mean square distance of the shadows
        to their mean.
        """
        self._steps += 1
        if self._steps % (SAMPLED * len(self.boxes)):
            return None
        values = np.stack([box.shadow.flat() for box in self.present()])
        return float(np.sqrt(np.square(values - values.mean(0)).sum(1).mean()))

    def send(
        self, source: int, dest: int, size: int, deliver: Callable[[VirtualMailbox], None]
    ) -> None:
        """Have something done at a peer when a message of so many bytes has arrived there, if
        both still live.
        """

        def arrive() -> None:
            box = self.boxes.get(dest)
            if box is not None and dest not in self.lost:
                deliver(box)

        self.clock.call(self._links.send(self.clock.now, source, dest, size), arrive)

    def lose(self, rank: int) -> None:
        """A rank has died with its mailbox open: it answers nobody any more; its peers notice a
        little later.
        """
        if rank in self.boxes and not self.boxes[rank].closed and rank not in self.lost:
            self.lost.add(rank)
            self.clock.call(self.clock.now + NOTICED, lambda: self._notice(rank))

    def _notice(self, rank: int) -> None:
        for box in self.present():
            box.drop_peer(rank)
        self.settle()

    def present(self) -> list[VirtualMailbox]:
        """Of the living, in rank order."""
        return [self.boxes[rank] for rank in sorted(self.boxes) if rank not in self.lost]

    def settle(self) -> None:
        """When everybody is done and nothing is in the air: all become the mean of all, in rank
        order.
        """
        boxes = [box for box in self.present() if not box.closed]
        if not boxes or not all(box.drained for box in boxes):
            return
        first = boxes[0]
        result = mean_of(
            first.shadow, {box.rank: box.shadow.flat() for box in boxes}, first.weights
        )
        waited_for = {box.rank for box in boxes}
        for box in boxes:
            box.done = False  # a mailbox settles once

        def collected(box: VirtualMailbox, _: VirtualMailbox) -> None:
            waited_for.discard(box.rank)
            if not waited_for:
                for other in boxes:
                    self.send(
                        first.rank,
                        other.rank,
                        first.message_bytes,
                        lambda there: there.receive_result(result),
                    )

        for box in boxes:
            self.send(box.rank, first.rank, first.message_bytes, partial(collected, box))


class VirtualMailbox:
    """One virtual rank's end of the gossip."""

    def __init__(
        self,
        peers: Peers,
        rank: int,
        *,
        members: Sequence[int],
        params: Sequence[torch.Tensor],
        emit: Callable[..., None],
        deadline: float,
        gradients: Mapping[int, int] | None = None,
        codec: Codec | None = None,
        **_: Any,
    ) -> None:
        self.rank = rank
        self.world = tuple(members)
        self.peers = [peer for peer in members if peer != rank]
        chunk_bytes, window = in_flight(
            sum(p.numel() * max(4, p.element_size()) for p in params), len(self.peers)
        )
        self.shadow = Shadow(params, chunk_bytes=chunk_bytes, relayed=False, codec=codec)
        self.message_bytes = HEADER_BYTES + self.shadow.size * self.shadow.dtype.itemsize
        self.steps = 0
        self.weights = gradients or dict.fromkeys(members, 1)
        self.per_step = self.weights[rank]
        self.closed = False
        self.done = False
        self._network = peers
        self._window = window
        self._emit = emit
        self._deadline = deadline
        self._edges: dict[int, Edge] = {}
        self._transfers: dict[int, Transfer] = {}
        self._alive = set(self.peers)
        self._dead: set[int] = set()
        self._counters: Counter[str] = Counter()
        self._exchanged = 0.0
        self._rota = Rota(self.shadow.chunks)
        self._rounds: dict[int, Array] = {}
        self._asked: dict[int, list[int]] = {}
        self._result: Array | None = None
        self._ended = Gate(peers.clock)
        peers.boxes[rank] = self

    # ---- training

    def exchange(self, peer: int, weight: float = 0.5, share: float = 1.0) -> PendingExchange:
        """Average the shadow with the peer's, or a share of it; never waits."""
        if peer not in self.peers:
            raise ValueError(
                f"rank {peer} is not a peer of rank {self.rank}; the peers are {self.peers}"
            )
        flying = self._transfers.get(peer)
        if flying is not None:
            return flying.pending
        pending = VirtualExchange(self._network.clock)
        if peer not in self._alive:
            pending.finish("skipped")
            return pending
        chunks = self._rota.take(peer, share)
        self._transfers[peer] = Transfer(
            pending, weight, chunks[::-1], share=len(chunks) / self.shadow.chunks
        )
        self._pump(peer)
        return pending

    def step(self) -> None:
        """A step was made."""
        self.steps += 1
        self.shadow.steps += 1
        distance = self._network.distance()
        if distance is not None:
            self._emit("distance", value=distance)

    def cross(
        self,
        tensors: Sequence[torch.Tensor],
        mode: Mode,
        *,
        within: int | None = None,
        step: int | None = None,
        peer: int | None = None,
        share: float = 1.0,
    ) -> Fold:
        """y += u; x <- y. It takes no virtual time, so it is always worth its cost."""
        chunks: list[int] | None = None
        if mode == "publish":
            chunks = self.shadow.stale(self._rota.next(peer, share) if peer is not None else None)
        if chunks == []:
            return Fold(skipped=True)
        if mode == "lift":
            fold = self.shadow.lift(tensors, step=self.shadow.steps if step is None else step)
        else:
            fold = self.shadow.settle(tensors, chunks)
        fold.seconds = 0.0
        self._counters["folds"] += 1
        return fold

    def lockstep_round(
        self, number: int, neighbours: dict[int, float], timeout: float = 60.0
    ) -> None:
        """y <- y + sum_j w_j (y_j - y), all values taken from the start of this round on every
        rank.
        """
        start = self._rounds[number] = self.shadow.flat()
        for old in [r for r in self._rounds if r <= number - KEPT_ROUNDS]:
            del self._rounds[old]
        for peer in self._asked.pop(number, []):
            self._answer_round(peer, number)
        values = self._fetch(set(neighbours), lambda box: box.ask_round(self.rank, number), timeout)
        if set(neighbours) - values.keys():
            raise ConnectionError(
                f"lockstep round {number} with ranks {sorted(neighbours)} was interrupted"
            )
        for chunk in range(self.shadow.chunks):
            mine = self.shadow.slice(chunk, start)
            for rank in sorted(values):
                theirs = self.shadow.slice(chunk, values[rank])
                self.shadow.move(
                    chunk,
                    neighbours[rank] * pull_of(self.per_step, self.weights[rank]),
                    mine=mine,
                    theirs=theirs,
                    snapshot=self.shadow.steps,
                )

    # ---- who is there

    def alive(self) -> set[int]:
        return self._alive

    def suspended(self) -> set[int]:
        return set()

    def dead(self) -> set[int]:
        return self._dead

    def lost(self) -> set[int]:
        return self._dead

    def left(self) -> set[int]:
        return set(self.peers) - self._alive - self._dead

    @property
    def global_steps(self) -> int:
        """Gradients of all ranks."""
        return sum(box.steps * box.per_step for box in self._network.boxes.values())

    @property
    def consensus_distance(self) -> float:
        """From the differences exchanges saw."""
        return spread(
            [
                edge.square
                for peer, edge in self._edges.items()
                if edge.applied and peer not in self._dead
            ]
        )

    # ---- the average model

    def consensus(self, timeout: float | None = 60.0) -> Array:
        """The flat mean of all live shadows, each read when the question reaches it."""
        values = self._fetch(set(self._alive), lambda box: box.ask_shadow(self.rank), timeout)
        return mean_of(self.shadow, {**values, self.rank: self.shadow.flat()}, self.weights)

    def finish(self, params: Sequence[torch.Tensor], timeout: float | None = None) -> None:
        """Wait until every live rank has finished too, answering meanwhile; then all hold the
        mean.
        """
        self.cross(params, "whole")
        self.done = True
        for peer in list(self._transfers):
            self._transfers[peer].waiting.clear()
            self._advance(peer)
        self._network.settle()
        if not self._ended.wait(timeout, why="the end of the gossip"):
            raise TimeoutError(f"the end of the run took longer than {timeout} s")
        assert self._result is not None
        self.shadow.assign(params, self._result)

    @property
    def drained(self) -> bool:
        """Done, and nothing of its own is unfinished."""
        return self.done and not any(edge.pending for edge in self._edges.values())

    def receive_result(self, result: Array) -> None:
        """The mean of all has arrived."""
        self._result = result
        self._ended.open()

    # ---- costs

    @property
    def counters(self) -> dict[str, Any]:
        """As of a real mailbox; computation for communication takes no virtual time."""
        counted: dict[str, Any] = dict.fromkeys(("bytes_sent", "exchanges", "chunks", "folds"), 0)
        return {
            **counted,
            **self._counters,
            "exchanges": round(self._exchanged, 6),
            "fold_seconds": 0.0,
            "fold_cpu_seconds": 0.0,
            "rejected": {},
        }

    slower = 0.0

    @property
    def least_share(self) -> float:
        return 1 / self.shadow.chunks

    def neighbours_slower(self) -> list[float]:
        return []

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        """Be gone, in order; who was killed says nothing any more."""
        if self.rank in self._network.lost:
            return
        self.closed = True
        for box in self._network.present():
            if self.rank in box._alive:
                box._alive = box._alive - {self.rank}
        self._network.settle()

    # ---- messages

    def drop_peer(self, peer: int, why: str = "its process has ended") -> None:
        """A peer is dead: drop its edge, go on without it."""
        if peer not in self._alive:
            return
        self._alive = self._alive - {peer}
        self._dead.add(peer)
        doubt = self._edge(peer).drop()
        transfer = self._transfers.pop(peer, None)
        if transfer is not None:
            transfer.pending.finish("dropped")
        if self._waiting is not None:
            ranks, values, gate = self._waiting
            ranks.discard(peer)
            if ranks <= values.keys():
                gate.open()
        self._emit(
            "peer_dead", peer=peer, why=why, unanswered=doubt.unanswered,
            unconfirmed=doubt.unconfirmed, moved=doubt.moved, estimate=doubt.estimate,
        )  # fmt: skip

    def ask_round(self, peer: int, number: int) -> None:
        """A neighbour wants the vector of a round; later, if this rank is not there yet."""
        if number in self._rounds:
            self._answer_round(peer, number)
        else:
            self._asked.setdefault(number, []).append(peer)

    def _answer_round(self, peer: int, number: int) -> None:
        value = self._rounds[number]
        self._send(peer, self.message_bytes, lambda box: box._arrived(self.rank, value))

    def ask_shadow(self, peer: int) -> None:
        """A peer wants the shadow as it is."""
        value = self.shadow.flat()
        self._send(peer, self.message_bytes, lambda box: box._arrived(self.rank, value))

    _waiting: tuple[set[int], dict[int, Array], Gate] | None = None

    def _fetch(
        self, ranks: set[int], ask: Callable[[VirtualMailbox], None], timeout: float | None
    ) -> dict[int, Array]:
        """Ask the peers for a vector and wait for all that live."""
        values: dict[int, Array] = {}
        gate = Gate(self._network.clock)
        self._waiting = ranks, values, gate
        for peer in sorted(ranks):
            self._send(peer, HEADER_BYTES, ask)
        if ranks and not gate.wait(timeout, why=f"vectors of ranks {sorted(ranks)}"):
            raise TimeoutError(
                f"no answer within {timeout} s from rank(s) {sorted(ranks - values.keys())}"
            )
        self._waiting = None
        return values

    def _arrived(self, peer: int, value: Array) -> None:
        if self._waiting is not None:
            ranks, values, gate = self._waiting
            values[peer] = value
            if ranks <= values.keys():
                gate.open()

    def _send(self, peer: int, size: int, deliver: Callable[[VirtualMailbox], None]) -> None:
        self._counters["bytes_sent"] += size
        self._network.send(self.rank, peer, size, deliver)

    # ---- exchanges, as in `core/gossip/loop.py`

    def _edge(self, peer: int) -> Edge:
        if peer not in self._edges:
            pull = pull_of(self.per_step, self.weights[peer])
            self._edges[peer] = Edge(self.shadow, self._window, pull=pull)
        return self._edges[peer]

    def _pump(self, peer: int) -> None:
        """Begin as many chunks of the transfer as the window allows."""
        transfer = self._transfers[peer]
        while transfer.waiting:
            message = self._edge(peer).begin(transfer.waiting[-1], transfer.weight)
            if message is None:
                return
            if message.kind is FrameKind.PING:
                self._transmit(peer, message)
                return
            transfer.flying.add(transfer.waiting.pop())
            self._transmit(peer, message)

    def _transmit(self, peer: int, message: Message) -> None:
        size = HEADER_BYTES + (0 if message.value is None else message.value.value.nbytes)
        self._send(peer, size, lambda box: box.receive(self.rank, message))

    def receive(self, peer: int, message: Message) -> None:
        """A message of an exchange has arrived."""
        if peer not in self._alive:
            return
        edge = self._edge(peer)
        applied = edge.applied
        value = None if message.value is None else message.value.value
        try:
            answers = edge.receive(
                Message(message.kind, message.chunk, message.q, message.una, message.weight, value)
            )  # fmt: skip
        except NotFiniteError as error:
            self.drop_peer(peer, f"quarantined: {error}")
            return
        if message.kind is FrameKind.PING and edge.pending:
            self._network.clock.call(self._network.clock.now + RETRY, lambda: self._again(peer))
        for answer in answers:
            self._transmit(peer, answer)
        self._counters["chunks"] += edge.applied - applied
        self._advance(peer, message.chunk)
        if self.done:
            self._network.settle()

    def _again(self, peer: int) -> None:
        if peer in self._alive and self.rank not in self._network.lost:
            for message in self._edge(peer).unanswered():
                self._transmit(peer, message)

    def _advance(self, peer: int, chunk: int | None = None) -> None:
        transfer = self._transfers.get(peer)
        if transfer is None:
            return
        if chunk is not None and self._edge(peer).finished(chunk):
            transfer.flying.discard(chunk)
        if not transfer.flying and not transfer.waiting:
            del self._transfers[peer]
            self._exchanged += transfer.share
            transfer.pending.finish("exchanged")
        else:
            self._pump(peer)


def mean_of(shadow: Shadow, values: dict[int, Array], weights: Mapping[int, int]) -> Array:
    """The mean in rank order, chunk by chunk as everywhere."""
    out = np.empty(shadow.size, dtype=shadow.dtype)
    for chunk in range(shadow.chunks):
        parts = {rank: shadow.slice(chunk, value) for rank, value in values.items()}
        average(shadow, chunk, parts, out, weights)
    return out
