"""The mailbox: peer-to-peer averaging of models in the background, on ZeroMQ.

    mailbox = Mailbox(store, rank, world=[0, 1, 2, 3], params=tensors, layout=digest, run_id="run-7")
    pending = mailbox.exchange(peer, 0.5)      # never blocks: the shadows of both ranks are averaged in the background
    mailbox.step()                             # after the optimizer's step
    fold = mailbox.cross(params, "due")        # what has landed is added to the parameters
    mean = mailbox.consensus()                 # flat mean of the live shadows, nobody stops for it
    mailbox.finish(params)                     # identical parameters on every live rank
    mailbox.close()

`world` lists the ranks that gossip with each other, so a mailbox may serve one lane of a cluster
and `params` may be one shard of the model. Addresses are exchanged through the store once;
afterwards it is not used. See `edge.py` for why the mean never moves, `shadow.py` for the step
boundary, `ending.py` for the end, `members.py` for who counts as there.

Events through `emit(kind, **fields)`, from the communication thread: peer_suspended, peer_resumed,
peer_no_progress, peer_left (`finished`: it holds the result), peer_dead (once; with the deltas in
doubt), frame_refused (once per reason and source), mailbox_failed (the thread has ended by an
error, which the next call raises). From the compute thread, once a second and at the end: traffic
(bytes sent since the last one, consensus distance).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loosestep.codecs import Codec
from loosestep.core.gossip.apart import Apart
from loosestep.core.gossip.budget import IDLE
from loosestep.core.gossip.contract import Mode
from loosestep.core.gossip.loop import Courier
from loosestep.core.gossip.memory import Fold
from loosestep.core.gossip.opening import Opening, Settings
from loosestep.core.gossip.peer import PendingExchange, Rota, Timing
from loosestep.core.gossip.shadow import Shadow
from loosestep.core.keys import key_bytes
from loosestep.core.messages.address import bind_host, is_loopback, port_range
from loosestep.core.messages.directory import Directory, Store
from loosestep.core.messages.frames import Flags, Header
from loosestep.core.messages.members import State
from loosestep.core.pending import nothing
from loosestep.core.stopping import Stop
from loosestep.record.format import RecordKind as Record
from loosestep.record.format import pack
from loosestep.record.recorder import Recorder

Array = NDArray[Any]

CHUNK_BYTES = 1 << 20
LEAST_MEMORY = 32 << 20  # models below 16 MB may use this much for values in flight
TELL = 1.0  # seconds between two events about traffic
# seconds between two looks, while waiting, whether the communication thread is still there
LOOK = 1.0


class Mailbox:
    """One rank's end of the gossip. Every method is called by the compute thread."""

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        world: Sequence[int],
        params: Sequence[torch.Tensor],
        layout: bytes,
        run_id: str = "run",
        generation: int = 0,
        key: bytes | str | None = None,
        encrypt: bool = False,
        deadline: float = 60.0,
        emit: Callable[..., None] = lambda kind, **fields: None,
        timing: Timing | None = None,
        lose: Callable[[Header], bool] | None = None,
        tape: Recorder | None = None,
        fold_share: float = 0.05,
        gradients: Mapping[int, int] | None = None,
        check: Callable[[], None] = nothing,
        shared: bool = True,
        stop: Stop | None = None,
        password: str = "",
        codec: Codec | None = None,
        apart: bool | None = None,
    ) -> None:
        """`gradients`: how many a step of each rank stands for, and so how much its model weighs.
        `check`: called while peers are waited for, and raises when one of them will not come.
        `shared`: peers of this host read values in this rank's memory, and it in theirs. `codec`:
        how what pairs exchange is written. `password`: what ranks of the run alone know; who does
        not may not send anything (where it is empty, everybody may, and is refused later). `apart`:
        communication in a process of its own; None: as LOOSESTEP_GOSSIP=process says.
        """
        if rank not in world or len(set(world)) != len(world):
            raise ValueError(
                f"rank {rank} must be in world, each rank once; got world={list(world)}"
            )
        secret = key_bytes(key if key is not None else os.environ.get("LOOSESTEP_KEY") or None)
        if encrypt and secret is None:
            raise ValueError(
                "encrypt=True needs a run key: pass key= or set LOOSESTEP_KEY to the same secret "
                "on every rank"
            )
        host = bind_host()
        require_key(host, secret)
        peers = [peer for peer in world if peer != rank]
        chunk_bytes, window = in_flight(
            sum(p.numel() * max(4, p.element_size()) for p in params), len(peers)
        )
        self.rank = rank
        self.world = tuple(world)
        # A recording needs boundaries that are complete at once, on an accelerator too: that waits
        # for it.
        relayed = None if tape is None else False
        # What cannot cross to another process: a tape, and a test that loses frames.
        if apart is None:
            apart = os.environ.get("LOOSESTEP_GOSSIP") == "process"
        apart = apart and tape is None and lose is None and bool(peers)
        self._shadow = Shadow(
            params, chunk_bytes=chunk_bytes, relayed=relayed, codec=codec, apart=apart
        )
        if tape is not None:
            tape.number(chunk_bytes)
            self._shadow.tape = tape
        beat = max(0.25, 0.03 * len(peers))
        ports = port_range()
        settings = Settings(
            rank=rank,
            world=list(world),
            run_id=run_id,
            layout=layout.hex(),
            generation=generation,
            session=secrets.token_hex(8),
            host=host,
            ports=None if ports is None else (ports.start, ports.stop),
            window=window,
            timing=asdict(timing or Timing(beat=beat, suspend=4 * beat, deadline=deadline)),
            gradients=list((gradients or dict.fromkeys(world, 1)).items()),
            key=None if secret is None else secret.hex(),
            encrypt=encrypt,
            shared=shared,
            password=password,
        )
        self._stop = stop or Stop()
        opening: Opening | Apart
        if self._shadow.room is not None:
            opening = Apart(
                settings,
                self._shadow,
                self._shadow.room,
                per_chunk=self._shadow.per_chunk,
                codec=codec,
                emit=emit,
                stop=self._stop,
            )
        else:
            opening = Opening(settings, self._shadow, emit=emit, stop=self._stop, lose=lose)
        with ExitStack() as undo:
            undo.callback(opening.close)
            directory = Directory(
                store, f"loosestep/mailbox/{run_id}/{generation}", secret, deadline, check=check
            )
            card = opening.card()
            card |= {"layout": layout.hex(), "encrypt": encrypt, "codec": str(codec or "")}
            directory.publish(rank, card)
            cards = {}
            for peer in peers:
                cards[peer] = directory.read(peer, card)
                require_key(cards[peer]["address"][0], secret)
            undo.pop_all()
        # peers of this host
        self._neighbours = {peer for peer in peers if cards[peer]["host"] == card["host"] != ""}
        self._courier: Courier | Apart = opening.meet(cards)
        self._exchanges: dict[int, PendingExchange] = {}
        self._rota = Rota(self._shadow.chunks)
        self._fold_share = fold_share
        self._emit = emit
        self._told = time.monotonic()
        self._told_bytes = 0
        self._io_read = 0.0
        self._io_seconds = 0.0
        self._folds = 0
        self._fold_seconds = 0.0
        self._fold_cpu = 0.0
        self._fold_cost = 0.0  # of a whole one, smoothed
        self._fold_spent = 0.0  # by the last one
        self._folded_at = 0.0
        self._whole_at = 0.0  # a whole one
        self._thread = threading.Thread(
            target=self._courier.run, name=f"loosestep-mailbox-{rank}", daemon=True
        )
        self._thread.start()

    # ---- training

    def exchange(self, peer: int, weight: float = 0.5, share: float = 1.0) -> PendingExchange:
        """Average the shadow with the peer's: both move by `weight` of their difference. Never
        blocks. With a `share` below 1 so much of the model, the next chunks on this edge: they go
        round. While an exchange with this peer is in flight, that one is returned; with a peer
        that is not there, one that is done already.
        """
        self._check()
        if peer not in self._courier.links:
            raise ValueError(
                f"rank {peer} is not a peer of rank {self.rank}; the peers are "
                f"{sorted(self._courier.links)}"
            )
        if not 0 < weight <= 0.5:
            raise ValueError(f"weight must be above 0 and at most 1/2, got {weight}")
        flying = self._exchanges.get(peer)
        if flying is not None and not flying.done():
            return flying
        chunks = self._rota.take(peer, share)
        pending = self._exchanges[peer] = PendingExchange()
        begin = partial(
            self._courier.tell, lambda: self._courier.exchange(peer, weight, chunks, pending)
        )
        self._shadow.when_published(begin)
        return pending

    def step(self) -> None:
        """Count a step of this rank."""
        self._check()
        now = time.monotonic()
        self._shadow.progress += 1
        self._shadow.steps += 1
        self._shadow.stepped = now
        if now - self._told > TELL:
            self._tell(now)

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
        """y += u; x <- y. "due" crosses the chunks where something has landed, and is skipped while
        folding would take more than `fold_share` of a core; all of them where they take a part of
        that, so that peers meet what is not too old. "publish" with a `peer` crosses the chunks
        that the next exchange of this `share` with it will carry.
        """
        self._check()
        shadow = self._shadow
        now = time.monotonic()
        if mode == "due" and within is not None and max(shadow.age, shadow.unpublished) >= within:
            mode = "whole"  # what lands next is as old as what is published
        chunks = self._worth_it(now) if mode == "due" else None
        if mode == "publish":
            chunks = shadow.stale(self._rota.next(peer, share) if peer is not None else None)
        if chunks == []:
            return Fold(skipped=True)
        used = time.thread_time()
        if mode == "lift":
            fold = shadow.lift(tensors, step=shadow.steps if step is None else step)
        elif mode == "whole" or shadow.relay is None:
            fold = shadow.settle(tensors, chunks)
        else:
            fold = shadow.boundary(tensors)
        if not fold.skipped:
            # CPU time, since on a busy machine the clock also counts the work of others.
            cost = time.thread_time() - used if shadow.relay is None else fold.seconds
            self._count(fold, now, cost, whole=chunks is None or shadow.relay is not None)
        return fold

    def _worth_it(self, now: float) -> list[int] | None:
        """The chunks that should cross now, None for all."""
        if self._shadow.busy or now - self._folded_at < self._fold_spent / self._fold_share:
            return []
        if now - self._whole_at >= self._fold_cost / (IDLE * self._fold_share):
            return None
        return self._shadow.waiting

    def _count(self, fold: Fold, now: float, cost: float, *, whole: bool) -> None:
        self._folded_at = now
        self._fold_spent = cost
        if whole:
            self._whole_at = now
            self._fold_cost = cost if not self._folds else 0.8 * self._fold_cost + 0.2 * cost
        self._folds += 1
        self._fold_seconds += fold.seconds
        self._fold_cpu += cost

    def lockstep_round(
        self, number: int, neighbours: dict[int, float], timeout: float = 60.0
    ) -> None:
        """y <- y + sum_j w_j (y_j - y), all values taken from the start of this round on every
        rank. Blocks. The result is in the shadow: fold it with `cross(params, "whole")`.
        """
        pending = PendingExchange()
        self._do(lambda: self._courier.lockstep(number, neighbours, pending))
        self._wait(
            pending,
            timeout,
            f"lockstep round {number} with ranks {sorted(neighbours)} (all must make as many "
            "steps)",
        )

    # ---- who is there

    def alive(self) -> set[int]:
        return self._courier.members.alive()

    def suspended(self) -> set[int]:
        return self._courier.members.ranks(State.SUSPENDED)

    def dead(self) -> set[int]:
        """Peers that are gone without a word: killed, evicted or quarantined."""
        return self._courier.members.ranks(State.DEAD)

    def lost(self) -> set[int]:
        """Peers whose models are not in the result: dead, or left before they held it."""
        early = {
            peer
            for peer in self.left()
            if not self._courier.members.peers[peer].flags & Flags.HOLDS
        }
        return self.dead() | early

    def left(self) -> set[int]:
        """Peers that have closed their mailbox in order."""
        return self._courier.members.ranks(State.LEFT)

    @property
    def steps(self) -> int:
        """This rank's progress counter: steps made. Set it when a run resumes."""
        return self._shadow.progress

    @steps.setter
    def steps(self, count: int) -> None:
        self._shadow.progress = count

    @property
    def global_steps(self) -> int:
        """Gradients of all ranks, as last heard; those of a dead rank stay."""
        return self._courier.gradients + self._courier.members.progress()

    @property
    def consensus_distance(self) -> float:
        """Estimate of the root mean square distance to the mean, from the differences exchanges
        saw. Who has died or left in the middle of the run no longer counts.
        """
        courier = self._courier
        there = courier.members.ranks(
            State.ALIVE, State.SUSPENDED, *([State.LEFT] if courier.ending.done else [])
        )
        edges = [courier.links[peer].edge for peer in there]
        return spread([edge.square for edge in edges if edge.applied])

    # ---- the average model

    def consensus(self, timeout: float | None = 60.0) -> Array:
        """The flat mean of all live shadows. The peers go on; one that dies or falls silent
        meanwhile is left out.
        """
        out = np.empty(self._shadow.size, dtype=self._shadow.dtype)
        pending = PendingExchange()
        self._shadow.note(pack(Record.CONSENSUS))
        self._do(lambda: self._courier.consensus(out, pending))
        self._wait(pending, timeout, "the consensus")
        self._shadow.note(pack(Record.AGREED))
        return out

    def finish(self, params: Sequence[torch.Tensor], timeout: float | None = None) -> None:
        """Wait until every live rank has finished too, answering meanwhile; then all hold the same
        parameters, the mean of the live shadows.
        """
        self.cross(params, "whole")
        courier = self._courier
        self._do(courier.finish)
        self._wait(courier.ended, timeout, "the end of the run")
        # nobody shares this rank's result
        if courier.evicted_by and self.lost() == courier.links.keys():
            sound = np.isfinite(self._shadow.flat()).all()
            why, advice = (
                ("was silent too long", "raise deadline= if it may pause for so long")
                if sound
                else ("sent NaN or Inf", "lower its learning rate or clip its gradients")
            )
            raise ConnectionError(
                f"rank {self.rank} {why} and was evicted by ranks {sorted(courier.evicted_by)}: "
                f"its model is not part of their result; {advice}"
            )
        assert courier.ending.result is not None
        self._shadow.note(pack(Record.ASSIGN))
        self._shadow.assign(params, courier.ending.result)

    # ---- costs

    @property
    def least_share(self) -> float:
        """The smallest share of the model that can travel."""
        return 1 / self._shadow.chunks

    @property
    def slower(self) -> float:
        """By which share communication makes this rank's steps slower: what others are told."""
        return self._shadow.slower

    @slower.setter
    def slower(self, share: float) -> None:
        self._shadow.slower = share

    def neighbours_slower(self) -> list[float]:
        """The same of the other ranks of this host that are there."""
        members = self._courier.members
        return [members.peers[peer].slower for peer in self._neighbours & members.alive()]

    @property
    def counters(self) -> dict[str, Any]:
        """bytes_sent, exchanges (begun here, completed; in whole models), chunks (landed in
        the shadow), folds, fold_seconds (on the clock), fold_cpu_seconds, cpu_seconds of the communication thread,
        requests repeated, frames that found the queue full and waited, ...
        """
        counted: dict[str, Any] = dict.fromkeys(("bytes_sent", "bytes_received", "chunks"), 0)
        counted.update(dict.fromkeys(("repeated", "queue_full", "bytes_in_memory"), 0))
        counted.update(self._courier.counters, exchanges=round(self._courier.exchanges, 6))
        counted.update(
            folds=self._folds,
            fold_seconds=self._fold_seconds,
            rejected=dict(self._courier.rejected),
        )
        counted.update(
            fold_cpu_seconds=self._fold_cpu,
            cpu_seconds=self._courier.cpu_seconds,
            io_cpu_seconds=io_cpu_seconds(),
        )
        return counted

    def cpu_seconds(self) -> float:
        """Everything gossip has cost this process: communication thread, ZeroMQ's thread and
        folding.
        """
        now = time.monotonic()
        if now - self._io_read > 0.25:  # reading it every step would cost as much as it measures
            self._io_read = now
            self._io_seconds = io_cpu_seconds()
        # a relay's thread has a share of its own
        folding = self._fold_cpu if self._shadow.relay is None else 0.0
        return self._courier.cpu_seconds + self._io_seconds + folding

    def close(self) -> None:
        """Say goodbye and let go of the thread and every socket."""
        if self._thread.is_alive():
            # whether or not it has failed
            self._courier.tell(self._courier.end)
        self._thread.join()
        self._tell(time.monotonic())
        if self._shadow.relay is not None:
            self._shadow.relay.close()
            # they know each other: all memory is free without a collector of garbage
            self._shadow.relay = None
        if self._shadow.room is not None:
            self._shadow.room.close()

    # ---- inside

    def _tell(self, now: float) -> None:
        sent = self._courier.counters["bytes_sent"]
        self._emit("traffic", sent=sent - self._told_bytes, distance=self.consensus_distance)
        self._told = now
        self._told_bytes = sent

    def _do(self, command: Callable[[], None]) -> None:
        self._check()
        self._courier.tell(command)

    def _check(self) -> None:
        if self._courier.failure is not None:
            raise ConnectionError(
                f"the communication of rank {self.rank} has failed: {self._courier.failure}"
            ) from self._courier.failure
        if not self._thread.is_alive():
            raise ConnectionError(f"the mailbox of rank {self.rank} is closed")

    def _wait(self, pending: PendingExchange, timeout: float | None, what: str) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not pending.wait(min(LOOK, max(0.0, end - time.monotonic()))):
            if not self._thread.is_alive() and not pending.done():
                self._check()  # it ended before it took the command, so nobody will ever be done
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"{what} took longer than {timeout:g} s; alive: {sorted(self.alive())}, "
                    f"suspended: {sorted(self.suspended())}, dead: {sorted(self.dead())}"
                )
        if pending.outcome == "dropped":
            self._check()
            raise ConnectionError(f"{what} was interrupted")


def require_key(host: str, key: bytes | None) -> None:
    """Nothing unauthenticated leaves the machine."""
    if key is None and not is_loopback(host):
        raise ValueError(
            f"{host} is not a loopback address, so gossip needs a run key: pass key= or set "
            "LOOSESTEP_KEY to the same secret (at least 16 bytes) on every rank"
        )


def spread(squares: list[float]) -> float:
    """The root mean square distance to the mean that goes with mean square differences to some
    peers: for a random pair, E|y_i - y_j|^2 = 2 n/(n-1) E|y_i - mean|^2.
    """
    n = len(squares) + 1
    return (sum(squares) / len(squares) * (n - 1) / (2 * n)) ** 0.5 if squares else 0.0


def in_flight(model_bytes: int, peers: int) -> tuple[int, int]:
    """(bytes of a chunk, chunks in flight per edge). Per edge at most `window` values pend and
    twice as many are cached; over all edges together that is three quarters of two models, or of
    `LEAST_MEMORY`.
    """
    memory = max(2 * model_bytes, LEAST_MEMORY)
    per_edge = memory // (4 * max(1, peers))
    chunk = max(4096, min(CHUNK_BYTES, per_edge)) // 8 * 8
    return chunk, max(1, min(8, per_edge // chunk))


def io_cpu_seconds() -> float:
    """CPU time of ZeroMQ's own threads in this process (Linux; 0 elsewhere)."""
    total = 0.0
    tasks: list[Path] = []
    with contextlib.suppress(OSError):  # another system, or no descriptor is left for now
        tasks = list(Path("/proc/self/task").iterdir())
    for task in tasks:
        try:
            name = (task / "comm").read_text()
            stat = (task / "stat").read_text()
        except OSError:
            continue  # a thread that has just ended
        if name.startswith("ZMQbg/IO"):
            user, system = stat.rpartition(")")[2].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total
