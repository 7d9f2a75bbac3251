"""The mailbox of a replay: it does to the shadow what the recording says, in that order, with the
values of the peers' replays.

TAKE   y is read and left for the peer         BOUNDARY .. LANDED   chunks are crossed between the
same events FOLD   the peer's value is waited for, y moves  FINAL, KEEP, HOLD    the end: the same
average from the same readings
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loosestep.codecs import Codec
from loosestep.core.gossip.contract import Mode
from loosestep.core.gossip.ending import average
from loosestep.core.gossip.mailbox import spread
from loosestep.core.gossip.memory import Fold
from loosestep.core.gossip.peer import PendingExchange
from loosestep.core.gossip.shadow import Shadow
from loosestep.record.format import DIED, FINISHED, Record, RecordKind
from loosestep.record.player import Player

Array = NDArray[Any]


class ReplayedMailbox:
    """What `Mailbox` is in the original: the same methods, no sockets."""

    def __init__(
        self,
        player: Player,
        members: Sequence[int],
        *,
        params: Sequence[torch.Tensor],
        gradients: Mapping[int, int] | None = None,
        codec: Codec | None = None,
        **_: Any,
    ) -> None:
        self.rank = player.rank
        self.world = tuple(members)
        self._weights = gradients or dict.fromkeys(members, 1)
        self.steps = 0
        self.global_steps = 0
        self._player = player
        self._values = player.values
        chunk_bytes = player.number(0)
        self._shadow = Shadow(params, chunk_bytes=chunk_bytes, relayed=False, codec=codec)
        self._mine: dict[tuple[int, int, int], tuple[Array, int]] = {}
        self._squares: dict[int, float] = {}
        self._mean: Array | None = None
        self._result: Array | None = None
        self._round: Array | None = None
        self._gone: set[int] = set()
        self._lost: set[int] = set()
        self._folds = self._chunks = 0
        player.play(self._act)

    # ---- training

    def exchange(self, peer: int, weight: float = 0.5, share: float = 1.0) -> PendingExchange:
        """The recording knows when and with whom."""
        pending = PendingExchange()
        pending.finish("exchanged")
        return pending

    def step(self) -> None:
        """A step was made."""
        self.steps += 1
        self._shadow.steps += 1

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
        """y += u; x <- y, each chunk between the same events; skipped where it was."""
        ahead = self._player.ahead()
        crossing = ahead is not None and ahead.kind is RecordKind.BOUNDARY
        if mode != "whole" and not crossing:
            return Fold(skipped=True)
        chunks = ahead.rest if ahead is not None and crossing else None
        self._player.mark(
            RecordKind.BOUNDARY, do=lambda: self._shadow.open_boundary(tensors, chunks)
        )
        folds: list[Fold] = []
        self._player.mark(
            RecordKind.LANDED, do=lambda: folds.append(self._shadow.close_boundary(tensors))
        )
        self._folds += 1
        return folds[0]

    def lockstep_round(
        self, number: int, neighbours: dict[int, float], timeout: float = 60.0
    ) -> None:
        """The events of the round are played before the boundary that follows."""

    def consensus(self, timeout: float | None = 60.0) -> Array:
        """The same mean of the same readings."""
        self._mean = np.empty(self._shadow.size, dtype=self._shadow.dtype)
        self._player.mark(RecordKind.CONSENSUS)
        self._player.mark(RecordKind.AGREED)
        return self._mean

    def finish(self, params: Sequence[torch.Tensor], timeout: float | None = None) -> None:
        """The same end."""
        self._result = np.empty(self._shadow.size, dtype=self._shadow.dtype)
        self.cross(params, "whole")
        self._player.mark(RecordKind.ASSIGN)
        self._shadow.assign(params, self._result)

    # ---- what the recording says

    def _act(self, record: Record) -> None:
        kind = record.kind
        fields = record.fields
        if kind in (RecordKind.TAKE, RecordKind.FOLD, RecordKind.MIX):
            self._reach(fields[1], record)
        elif kind in (RecordKind.READ, RecordKind.MEAN, RecordKind.FINAL):
            self._reach(fields[0], record)
        if kind is RecordKind.TAKE:
            self._take(*fields)
        elif kind is RecordKind.FOLD:
            self._fold(*fields)
        elif kind is RecordKind.READ:
            chunk, serial = fields
            self._values.put(f"read/{self.rank}/{serial}", self._shadow.read(chunk).value)
        elif kind is RecordKind.MEAN:
            self._average(fields[0], record.rest, self._mean)
        elif kind is RecordKind.FINAL:
            self._average(fields[0], record.rest, self._result)
        elif kind is RecordKind.KEEP:
            self._keep(*fields)
        elif kind is RecordKind.HOLD:
            self._share_result()
        elif kind is RecordKind.ROUND:
            self._open_round(fields[0], record.rest)
        elif kind is RecordKind.MIX:
            self._mix(*fields)
        elif kind is RecordKind.GONE:
            self._lose(*fields)

    def _reach(self, chunk: int, record: Record) -> None:
        """A boundary that is under way has passed this chunk by now, unless the record says
        otherwise.
        """
        if not record.behind:
            self._shadow.cross(chunk)

    def _take(self, peer: int, chunk: int, q: int) -> None:
        value = self._shadow.offer(chunk).value.copy()
        self._mine[peer, chunk, q] = value, self._shadow.published_at(chunk)
        self._values.put(f"pair/{self.rank}/{peer}/{chunk}/{q}", value)

    def _fold(self, peer: int, chunk: int, q: int, weight: float) -> None:
        mine, snapshot = self._mine.pop((peer, chunk, q))
        theirs = self._values.take(
            f"pair/{peer}/{self.rank}/{chunk}/{q}", peer, self._shadow.offer_dtype
        )
        moved = self._shadow.meet(chunk, weight, mine=mine, theirs=theirs, snapshot=snapshot)
        before = self._squares.get(peer, moved.square)
        self._squares[peer] = before + 0.1 * (moved.square - before)
        self._chunks += 1

    def _average(self, chunk: int, readings: dict[int, int], out: Array | None) -> None:
        assert out is not None, "a mean is only made for somebody who waits for it"
        values = {
            rank: self._values.take(f"read/{rank}/{serial}", rank, self._shadow.dtype)
            for rank, serial in readings.items()
        }
        average(
            self._shadow,
            chunk,
            {**values, self.rank: self._shadow.read(chunk).value},
            out,
            self._weights,
        )

    def _keep(self, chunk: int, holder: int) -> None:
        assert self._result is not None
        value = self._values.read_shared(f"result/{holder}/{chunk}", holder, self._shadow.dtype)
        self._shadow.store(chunk, value, self._result)

    def _share_result(self) -> None:
        assert self._result is not None
        for chunk in range(self._shadow.chunks):
            self._values.put_shared(
                f"result/{self.rank}/{chunk}", self._shadow.slice(chunk, self._result)
            )

    def _open_round(self, number: int, neighbours: Iterable[int]) -> None:
        self._round = self._shadow.flat()
        for peer in neighbours:
            for chunk in range(self._shadow.chunks):
                name = f"round/{self.rank}/{peer}/{number}/{chunk}"
                self._values.put(name, self._shadow.slice(chunk, self._round))

    def _mix(self, peer: int, chunk: int, number: int, weight: float) -> None:
        theirs = self._values.take(
            f"round/{peer}/{self.rank}/{number}/{chunk}", peer, self._shadow.dtype
        )
        assert self._round is not None
        mine = self._shadow.slice(chunk, self._round)
        self._shadow.move(chunk, weight, mine=mine, theirs=theirs, snapshot=self._shadow.steps)

    def _lose(self, peer: int, how: int) -> None:
        self._gone.add(peer)
        if how != FINISHED:
            self._lost.add(peer)
        if how == DIED:
            self._squares.pop(peer, None)
        self._mine = {pair: value for pair, value in self._mine.items() if pair[0] != peer}

    # ---- who is there, and what it costs

    def alive(self) -> set[int]:
        return set(self.world) - {self.rank} - self._gone

    def lost(self) -> set[int]:
        return set(self._lost)

    @property
    def consensus_distance(self) -> float:
        """As `Mailbox` estimates it."""
        return spread(list(self._squares.values()))

    @property
    def counters(self) -> dict[str, Any]:
        """A replay sends nothing."""
        return {
            "exchanges": 0,
            "bytes_sent": 0,
            "chunks": self._chunks,
            "folds": self._folds,
            "fold_seconds": 0.0,
            "fold_cpu_seconds": 0.0,
            "rejected": {},
            "cpu_seconds": 0.0,
        }

    slower = 0.0

    @property
    def least_share(self) -> float:
        return 1 / self._shadow.chunks

    def neighbours_slower(self) -> list[float]:
        return []

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        """Play what others may wait for, then end the thread."""
        self._player.close()
