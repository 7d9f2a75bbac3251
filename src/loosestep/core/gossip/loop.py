"""The communication thread of a mailbox: it alone owns the sockets, the edges and what is known
about the peers.

It sleeps until a frame, a command or a timer comes, answers whoever asks, and never waits for the
compute thread except for the shadow's lock, which is held for one chunk at a time. It never touches
the parameters.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loosestep.core.gossip.ending import Ending, average
from loosestep.core.gossip.exchange import Edge, Message, NotFiniteError, pull_of
from loosestep.core.gossip.fetch import Answers, Fetch
from loosestep.core.gossip.memory import Memory
from loosestep.core.gossip.peer import Link, PendingExchange, Timing, Transfer
from loosestep.core.messages.frames import (
    DTYPE_CODES,
    HEADER_BYTES,
    Flags,
    FrameError,
    FrameKind,
    Header,
    Topic,
    Wire,
    claimed_source,
)
from loosestep.core.messages.members import GONE, Members, State
from loosestep.core.messages.slots import Buffer, EdgeSlots, OwnSlots, TheirSlots
from loosestep.core.messages.sockets import Letter, Transport
from loosestep.core.stopping import Stop
from loosestep.record.format import DIED, EARLY, FINISHED, pack, pack_readings
from loosestep.record.format import RecordKind as Record

Array = NDArray[Any]

KNOCKS = 20  # connections without a word, per peer of a run, that outages of the network explain
KEPT_ROUNDS = 4  # how far a neighbour may be behind in lockstep and still read the round it is in
_WITH_VALUE = (FrameKind.REQUEST, FrameKind.REPLY, FrameKind.VALUE)


class Courier:
    """See the module. `commands` are functions to run in its thread; everything public is called
    there only.
    """

    def __init__(
        self,
        rank: int,
        shadow: Memory,
        *,
        wire: Wire,
        transport: Transport,
        peers: list[int],
        window: int,
        timing: Timing,
        stop: Stop,
        emit: Callable[..., None],
        gradients: Mapping[int, int],
        lose: Callable[[Header], bool] | None = None,
        slots: dict[int, EdgeSlots] | None = None,
        near: dict[int, TheirSlots] | None = None,
        own: OwnSlots | None = None,
    ) -> None:
        """`slots`: where values for peers of this host are left, in its `own` memory. `near`: the
        memory of those that this rank reads.
        """
        self._own = own
        now = time.monotonic()
        self._near = near or {}
        slots = slots or {}
        self.rank = rank
        self.shadow = shadow
        self.wire = wire
        self.transport = transport
        self._wish = stop
        self.members = Members(
            peers, now=now, suspend=timing.suspend, deadline=timing.deadline, emit=emit
        )
        self.links = {
            peer: Link(
                Edge(
                    shadow,
                    window,
                    peer=peer,
                    pull=pull_of(gradients[rank], gradients[peer]),
                    slots=slots.get(peer),
                )
            )
            for peer in peers
        }
        self.ending = Ending(rank, shadow, self.members, retry=timing.retry, weights=gradients)
        self.counters: Counter[str] = Counter()
        self.exchanges = 0.0  # begun here and completed, in whole models
        self.rejected: Counter[str] = Counter()
        self.commands: deque[Callable[[], None]] = deque()
        self.fetches: dict[Fetch, PendingExchange] = {}
        self.ended = PendingExchange()
        self.failure: BaseException | None = None
        self.cpu_seconds = 0.0
        self.stopping = False
        self._timing = timing
        self._emit = emit
        self._lose = lose
        self._weights = gradients
        self._per_step = gradients[rank]
        self._rounds: dict[int, Array] = {}
        self._parked: dict[int, set[tuple[int, int]]] = {}
        self.evicted_by: set[int] = set()
        self._complained: set[tuple[str, int]] = set()
        self._fetch_count = 0
        self._readings = 0  # how often the shadow was read for somebody else

    # ---- the loop

    def run(self) -> None:
        try:
            for peer in self.links:
                self._beat(peer)
            while not self.stopping:
                self._turn()
            for peer in self.members.present():
                self._send(self._header(FrameKind.BYE, peer))
            for peer in self.links:
                self._tell_evicted(peer, time.monotonic())
            self.transport.close(linger=0.2)
        except Exception as error:  # noqa: BLE001 it is raised again in the compute thread, at its next call
            self.failure = error
            self._emit("mailbox_failed", error=repr(error))
        finally:
            self.transport.close()
            self._release()

    def _release(self) -> None:
        """Nobody waits for a thread that has ended, and it holds no memory."""
        for link in self.links.values():
            if link.transfer is not None:
                link.transfer.pending.finish("dropped")
        for pending in self.fetches.values():
            pending.finish("dropped")
        self.ended.finish("dropped")
        for link in self.links.values():
            link.edge.close()
        for memory in self._near.values():
            memory.close()
        if self._own is not None:
            self._own.close()

    def _turn(self) -> None:
        news = self.transport.wait(max(0.0, self._next_timer() - time.monotonic()))
        while self.commands:
            self.commands.popleft()()
        for frame in self.transport.frames():
            self._take(frame)
        for peer in news.dead:
            self._gone(peer, State.DEAD, "its process has ended")
        for peer in news.again:
            self._again(peer, time.monotonic())
        for _ in range(news.strangers):
            self._reject(
                "handshake", -1, "a connection that does not speak the protocol, or has no key"
            )
        for _ in range(news.hung_up):
            known = KNOCKS * len(self.links)
            self._reject(
                "hang-up",
                -1,
                f"more than {known} connections that closed without a word",
                told_after=known,
            )
        self._tick(time.monotonic())
        self.cpu_seconds = time.thread_time()

    def _next_timer(self) -> float:
        """The next beat, question or repetition."""
        times = [time.monotonic() + self._timing.beat]
        times += [
            link.sent + self._timing.beat for peer, link in self.links.items() if self._there(peer)
        ]
        # nothing is repeated to one who is silent: it is sent again when he is heard
        alive = self.members.alive()
        times += [
            link.moved + link.patience
            for peer, link in self.links.items()
            if link.edge.pending and peer in alive
        ]
        fetches = [*self.fetches, *([self.ending.fetch] if self.ending.fetch else [])]
        times += [due for due in (fetch.next_ask() for fetch in fetches) if due is not None]
        return min(times)

    def _there(self, peer: int) -> bool:
        return self.members.peers[peer].state not in GONE

    def _tick(self, now: float) -> None:
        for peer in self.members.sweep(now):
            self.members.peers[peer].evicted = True
            self._gone(
                peer, State.DEAD, f"silent for more than {self._timing.deadline:g} s: evicted"
            )
        for peer, link in self.links.items():
            if not self._there(peer):
                continue
            if link.transfer is not None or link.edge.pending:
                self._pump(peer)
                if (
                    now - link.moved >= link.patience
                    and self.members.peers[peer].state is State.ALIVE
                ):
                    self._again(peer, now)
            if now - link.sent >= self._timing.beat:
                self._beat(peer)
        self._end(now)
        for fetch in list(self.fetches):
            if fetch.topic is Topic.SHADOW:  # nobody waits for one who is silent
                for peer in fetch.ranks - self.members.alive():
                    fetch.drop(peer)
                self._settle(fetch)
            self._ask(fetch, now)

    def _end(self, now: float) -> None:
        while self.ending.advance(pending=sum(link.edge.pending for link in self.links.values())):
            for peer in self.members.present():
                self._beat(peer)
        if self.ending.fetch is not None:
            self._ask(self.ending.fetch, now)
        if self.ending.complete:
            self.ended.finish("ended")

    def tell(self, command: Callable[[], None]) -> None:
        """Have something done in the loop's thread; from any thread."""
        self.commands.append(command)
        self.transport.wake()

    def end(self) -> None:
        """Say goodbye and end."""
        self.stopping = True

    @property
    def gradients(self) -> int:
        """That this rank's steps stand for: what it tells its peers."""
        return self.shadow.progress * self._per_step

    # ---- what the compute thread asks for

    def exchange(
        self, peer: int, weight: float, chunks: list[int], pending: PendingExchange
    ) -> None:
        link = self.links[peer]
        if self.members.peers[peer].state is not State.ALIVE or self.ending.done:
            pending.finish("skipped")
            return
        link.transfer = Transfer(
            pending, weight, chunks[::-1], share=len(chunks) / self.shadow.chunks
        )
        link.moved = time.monotonic()
        self._pump(peer)

    def finish(self) -> None:
        """Begin nothing more. Chunks under way are completed, and only then is this rank
        drained.
        """
        self.ending.done = True
        for peer, link in self.links.items():
            if link.transfer is not None:
                if link.transfer.waiting:
                    link.transfer.waiting.clear()
                    link.transfer.outcome = "dropped"
                self._advance(peer)

    def consensus(self, out: Array, pending: PendingExchange) -> None:
        def use(chunk: int, values: Answers) -> None:
            mine = self.shadow.read(chunk, pack_readings(Record.MEAN, chunk, values.serials)).value
            average(self.shadow, chunk, {**values, self.rank: mine}, out, self._weights)

        self._fetch_count += 1
        self._open(Topic.SHADOW, self._fetch_count, self.members.alive(), use, pending)

    def lockstep(self, number: int, weights: dict[int, float], pending: PendingExchange) -> None:
        self.shadow.note(pack_readings(Record.ROUND, number, dict.fromkeys(weights, 0)))
        start = self._rounds[number] = self.shadow.flat()
        for old in [r for r in self._rounds if r <= number - KEPT_ROUNDS]:
            del self._rounds[old]

        def use(chunk: int, values: Answers) -> None:
            mine = self.shadow.slice(chunk, start)
            for rank in sorted(values):
                pull = pull_of(self._weights[self.rank], self._weights[rank])
                weight = weights[rank] * pull
                note = pack(Record.MIX, rank, chunk, number, weight)
                self.shadow.move(
                    chunk,
                    weight,
                    mine=mine,
                    theirs=values[rank],
                    snapshot=self.shadow.steps,
                    note=note,
                )

        for peer, chunk in sorted(self._parked.pop(number, ())):
            self._send_value(peer, Topic.ROUND, number, chunk, self.shadow.slice(chunk, start))
        self._open(Topic.ROUND, number, weights.keys(), use, pending)

    def _open(self, topic: Topic, tag: int, ranks: Any, use: Any, pending: PendingExchange) -> None:
        fetch = Fetch(
            topic, tag, ranks, chunks=self.shadow.chunks, use=use, retry=self._timing.retry
        )
        self.fetches[fetch] = pending
        self._settle(fetch)
        self._ask(fetch, time.monotonic())

    def _settle(self, fetch: Fetch) -> None:
        if fetch.done and fetch in self.fetches:
            self.fetches.pop(fetch).finish("fetched")

    def _ask(self, fetch: Fetch, now: float) -> None:
        for peer, chunk in fetch.asks(now):
            self._send(
                self._header(FrameKind.ASK, peer, topic=fetch.topic, tag=fetch.tag, chunk=chunk)
            )

    # ---- exchanges

    def _pump(self, peer: int) -> None:
        """Begin as many chunks of the transfer as the window allows."""
        link = self.links[peer]
        while link.transfer is not None and link.transfer.waiting:
            message = link.edge.begin(link.transfer.waiting[-1], link.transfer.weight)
            if message is None:
                return
            if message.kind is FrameKind.PING:
                if time.monotonic() - link.pinged >= self._timing.retry / 4:
                    link.pinged = time.monotonic()
                    self._post(peer, message)
                return
            link.transfer.flying.add(link.transfer.waiting.pop())
            self._post(peer, message)

    def _again(self, peer: int, now: float) -> None:
        """Send everything unanswered again: nothing came for a while, or the connection is new.
        What waits for its socket has not left yet.
        """
        link = self.links[peer]
        for message in link.edge.unanswered():
            if not message.value.waiting:
                self.counters["repeated"] += 1
                self._post(peer, message)
        link.moved = now
        link.patience = min(2 * link.patience, 8 * self._timing.retry)

    def _exchange_frame(self, header: Header, value: Array | None) -> None:
        peer = header.source
        link = self.links[header.source]
        applied = link.edge.applied
        message = Message(
            FrameKind(header.kind), header.chunk, header.tag, header.una, header.weight, value
        )
        try:
            answers = link.edge.receive(message)
        except NotFiniteError as error:
            self._quarantine(peer, error)
            return
        for answer in answers:
            self._post(peer, answer)
        if link.edge.applied > applied:
            self.counters["chunks"] += 1
            link.moved = time.monotonic()
            link.patience = self._timing.retry
        self._advance(peer, header.chunk)

    def _advance(self, peer: int, chunk: int | None = None) -> None:
        link = self.links[peer]
        transfer = link.transfer
        if transfer is None:
            return
        if chunk is not None and link.edge.finished(chunk):
            transfer.flying.discard(chunk)
        if not transfer.flying and not transfer.waiting:
            link.transfer = None
            if transfer.outcome == "exchanged":
                self.exchanges += transfer.share
            transfer.pending.finish(transfer.outcome)
        else:
            self._pump(peer)

    # ---- frames

    def _take(self, frame: memoryview) -> None:
        try:
            header, body = self.wire.open(frame)
            value = self._value(header, body)
        except FrameError as error:
            self._reject(error.reason, claimed_source(frame), error.detail)
            return
        self.counters["frames_received"] += 1
        self.counters["bytes_received"] += (
            len(frame) if value is None else HEADER_BYTES + value.nbytes
        )
        now = time.monotonic()
        peer = header.source
        # Also from one who is gone: this process may have been stopped. After a cut each side
        # evicts the other, and goes on.
        if header.kind == FrameKind.EVICTED and not self.members.peers[peer].evicted:
            self.evicted_by.add(peer)
            self._gone(peer, State.DEAD, "it has evicted this rank")
        if not self._there(peer):
            self._tell_evicted(peer, now)
            return
        self._wish.asked = self._wish.asked or bool(header.flags & Flags.STOP)
        if self.members.hear(
            peer, now, progress=header.progress, flags=header.flags, slower=header.slower
        ):
            self._again(peer, now)
        slots = self.links[peer].edge.slots
        if slots is not None:
            slots.ready = bool(header.flags & Flags.READS)
        if header.kind in (FrameKind.REQUEST, FrameKind.REPLY, FrameKind.ACK, FrameKind.PING):
            self._exchange_frame(header, value)
        elif header.kind == FrameKind.BEAT:
            self.ending.highest = max(self.ending.highest, header.tag)
        elif header.kind == FrameKind.ASK:
            self._answer(header)
        elif header.kind == FrameKind.VALUE and value is not None:
            if not np.isfinite(value).all():
                self._quarantine(peer, f"chunk {header.chunk} holds NaN or Inf")
                return
            for fetch in [*self.fetches, *([self.ending.fetch] if self.ending.fetch else [])]:
                fetch.receive(
                    peer, header.topic, header.tag, header.chunk, value, serial=header.una
                )
                self._settle(fetch)
        elif header.kind == FrameKind.BYE:
            self._gone(peer, State.LEFT, "it left")

    def _value(self, header: Header, body: memoryview) -> Array | None:
        """The numbers of a frame that fit this model; refused when they do not."""
        if header.chunk >= self.shadow.chunks:
            raise FrameError("size", f"chunk {header.chunk}, the model has {self.shadow.chunks}")
        if header.kind not in _WITH_VALUE:
            return None
        # A pair is offered in a code, where there is one; what is read for a mean is not.
        offered = header.kind != FrameKind.VALUE
        dtype = self.shadow.offer_dtype if offered else self.shadow.dtype
        if header.dtype != DTYPE_CODES[dtype]:
            raise FrameError(
                "dtype", f"rank {header.source} sends dtype {header.dtype}, expected {dtype}"
            )
        whole = self.shadow.length(header.chunk) * self.shadow.dtype.itemsize
        expected = self.shadow.offer_bytes(header.chunk) if offered else whole
        if header.slot >= 0 and header.source in self._near and not body:
            body = self._near[header.source].read(header.slot, expected) or body
        if len(body) != expected:
            raise FrameError(
                "size", f"chunk {header.chunk} has {len(body)} bytes, expected {expected}"
            )
        if header.kind != FrameKind.VALUE and not 0 < header.weight <= 1:
            raise FrameError("weight", f"weight {header.weight} is not between 0 and 1")
        return np.frombuffer(body, dtype=dtype)

    def _answer(self, header: Header) -> None:
        peer = header.source
        topic = header.topic
        tag = header.tag
        chunk = header.chunk
        if topic == Topic.SHADOW:
            buffer = self.shadow.read(chunk, self._note_reading(chunk))
            self._send_buffer(
                self._header(
                    FrameKind.VALUE, peer, topic=topic, tag=tag, chunk=chunk, una=self._readings
                ),
                buffer,
            )
        elif topic == Topic.ROUND:
            if tag in self._rounds:
                self._send_value(
                    peer, Topic.ROUND, tag, chunk, self.shadow.slice(chunk, self._rounds[tag])
                )
            elif tag <= max(self._rounds, default=0) + KEPT_ROUNDS:
                self._parked.setdefault(tag, set()).add((peer, chunk))
        elif topic in (Topic.FINAL, Topic.RESULT):
            value = self.ending.answer(topic, tag, chunk, self._note_reading(chunk))
            if value is not None:
                self._send_value(peer, Topic(topic), tag, chunk, value, serial=self._readings)

    def _note_reading(self, chunk: int) -> bytes:
        """The next reading of the shadow by somebody else: its number goes into the recording
        and onto the wire.
        """
        self._readings += 1
        return pack(Record.READ, chunk, self._readings)

    def _reject(self, reason: str, source: int, detail: str, *, told_after: int = 0) -> None:
        self.rejected[reason] += 1
        if self.rejected[reason] <= told_after:
            return
        if (reason, source) not in self._complained and len(self._complained) < 256:
            self._complained.add((reason, source))
            self._emit("frame_refused", reason=reason, source=source, detail=detail)

    # ---- peers

    def _quarantine(self, peer: int, why: object) -> None:
        """What it sends must not get into any model."""
        self.members.peers[peer].evicted = True
        self._gone(peer, State.DEAD, f"quarantined: {why}")

    def _gone(self, peer: int, state: State, why: str) -> None:
        """A peer is lost: drop its edge, say once what stays in doubt, go on without it."""
        if not self.members.remove(peer, state):
            return
        finished = bool(self.members.peers[peer].flags & Flags.HOLDS)
        self.shadow.note(
            pack(
                Record.GONE, peer, DIED if state is State.DEAD else FINISHED if finished else EARLY
            )
        )
        link = self.links[peer]
        doubt = link.edge.drop()
        if link.transfer is not None:
            link.transfer.pending.finish("dropped")
            link.transfer = None
        self._emit(
            "peer_left" if state is State.LEFT else "peer_dead",
            peer=peer,
            why=why,
            finished=finished,
            progress=self.members.peers[peer].progress,
            unanswered=doubt.unanswered,
            unconfirmed=doubt.unconfirmed,
            moved=doubt.moved,
            estimate=doubt.estimate,
        )
        for fetch in [fetch for fetch in self.fetches if peer in fetch.ranks]:
            if fetch.topic is Topic.ROUND:
                # a round without a neighbour is not that round
                self.fetches.pop(fetch).finish("dropped")
            else:
                fetch.drop(peer)
                self._settle(fetch)
        if self.members.peers[peer].evicted:
            # waits on the connection for one who is stopped
            self._tell_evicted(peer, time.monotonic())
        else:
            self.transport.forget(peer)

    def _tell_evicted(self, peer: int, now: float) -> None:
        link = self.links[peer]
        if self.members.peers[peer].evicted and now - link.told >= 1.0:
            link.told = now
            self._send(self._header(FrameKind.EVICTED, peer))

    def _flags(self, peer: int, now: float) -> Flags:
        flags = self.ending.flags()
        if self._wish.asked:
            flags |= Flags.STOP
        if now - self.shadow.stepped > self._timing.stall and not self.ending.done:
            flags |= Flags.STALLED
        if peer in self._near:
            flags |= Flags.READS
        return flags | (Flags.DEAF if self.members.deaf_to(peer, now) else Flags.NONE)

    # ---- sending

    def _beat(self, peer: int) -> None:
        if self.transport.kept(peer):  # what waits for its socket will say as much
            self.links[peer].sent = time.monotonic()
            return
        self._send(self._header(FrameKind.BEAT, peer, tag=self.ending.promised))

    def _header(self, kind: FrameKind, dest: int, **fields: Any) -> Header:
        now = time.monotonic()
        return Header(
            kind,
            self.rank,
            dest,
            progress=self.gradients,
            flags=self._flags(dest, now),
            slower=self.shadow.slower,
            **fields,
        )

    def _post(self, peer: int, message: Message) -> None:
        header = self._header(
            message.kind,
            peer,
            chunk=message.chunk,
            tag=message.q,
            una=message.una,
            weight=message.weight,
        )
        if message.value is None:
            self._send(header)
        else:
            self._send_frame(header, message.value)

    def _send_value(
        self, peer: int, topic: Topic, tag: int, chunk: int, value: Array, serial: int = 0
    ) -> None:
        header = self._header(FrameKind.VALUE, peer, topic=topic, tag=tag, chunk=chunk, una=serial)
        self._send_buffer(header, self.shadow.buffer(chunk, value))

    def _send_buffer(self, header: Header, buffer: Buffer) -> None:
        self._send_frame(header, buffer)
        self.shadow.give(buffer)

    def _send_frame(self, header: Header, buffer: Buffer) -> None:
        header.dtype = DTYPE_CODES[buffer.value.dtype]
        header.slot = buffer.slot
        self._send(header, buffer, size=HEADER_BYTES + buffer.value.nbytes)

    def _send(
        self, header: Header, letter: Letter | None = None, *, size: int = HEADER_BYTES
    ) -> None:
        if self._lose is not None and self._lose(header):
            self.counters["lost"] += 1
            return
        letter = letter or Letter(bytearray(HEADER_BYTES))
        if letter.waiting:  # for its socket already, and older than what it would say now
            return
        self.wire.seal(header, letter.frame)
        self.links[header.dest].sent = time.monotonic()
        if self.transport.send(header.dest, letter):
            self.counters["frames_sent"] += 1
            self.counters["bytes_sent"] += size
            self.counters["bytes_in_memory"] += size - len(letter.frame)
            self.counters["queue_full"] += letter.waiting
