"""Frames of the mailbox: a fixed header of 128 bytes, then raw numbers. Never pickle.

A frame is one message: header and body lie in one buffer, so it is copied once, by the socket. The
receiver looks at the header first and refuses what does not belong here (`FrameError.reason`)
before it touches the body; the last check is the 16-byte `check` in front, over everything behind
it:

    without a key   xxh3-128(header, body)                        flipped bytes are noticed
    with a key      AES-GMAC(k_ij, number; header, body)          and nobody without the key can write a frame

`k_ij` is derived from the run key, the run, the generation, both ranks and both sessions, so a
frame of another run, of another direction or of an earlier life of either end fails. The nonce is
the frame's number, which no direction uses twice in a session; a window over it refuses replays.
AES-GMAC costs 4 ms of CPU per 100 MB, HMAC-SHA256 a dozen times that.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import xxhash
import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from loosestep.core.keys import derive

MAGIC = b"LSTP"
VERSION = 2
HEADER_BYTES = 128
_CHECK_BYTES = 16
_NONCE_BYTES = 12
_LAYOUT = struct.Struct("<16s4sBBBBIIIIQQQQQQQdIfi12x")
assert _LAYOUT.size == HEADER_BYTES
KIND = 21  # where a frame says its kind

DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype(np.uint8), 1: np.dtype("<f4"), 2: np.dtype("<f8")}
DTYPE_CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPES.items()}

REPLAY_WINDOW = 1024


class FrameKind(IntEnum):
    """What a frame asks or says."""

    REQUEST = 1  # my value of a chunk: answer with yours, both average
    REPLY = 2  # my value of the pair you began
    ACK = 3  # una: I have nothing unfinished below it
    PING = 4  # tell me your una
    BEAT = 5  # I live; progress, flags
    ASK = 6  # send me a chunk of (topic, tag)
    VALUE = 7  # the chunk you asked for
    BYE = 8  # I leave in order
    EVICTED = 9  # you were silent too long: I dropped you


class Topic(IntEnum):
    """Which vector an ASK reads."""

    NONE = 0
    SHADOW = 1  # the shadow as it is now (consensus)
    FINAL = 2  # the shadow after everybody has drained; tag = view
    RESULT = 3  # the agreed average; tag = view
    ROUND = 4  # the vector a lockstep round started from; tag = round


class Flags(IntFlag):
    """What a rank says about itself, in every header."""

    NONE = 0
    STALLED = 1  # its compute makes no progress
    DEAF = 2  # it does not hear the receiver
    DONE = 4  # it begins no more exchanges
    DRAINED = 8  # and none of its own is unfinished
    HOLDS = 16  # it has the agreed average
    READS = 32  # it reads values in the receiver's memory
    STOP = 64  # all ranks are asked to end their loops


class FrameError(Exception):
    """A frame that is not applied; `reason` is one word, for the counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Header:
    """The fields of a frame. `tag` is the sequence number on the edge, the view or the round;
    `slower` by which share communication makes the sender's steps slower; `slot` where in the sender's
    memory the value is, for a peer of the same host.
    """

    kind: int
    source: int
    dest: int
    topic: int = Topic.NONE
    dtype: int = 0
    generation: int = 0
    chunk: int = 0
    run: int = 0
    layout: int = 0
    tag: int = 0
    una: int = 0
    progress: int = 0
    number: int = 0
    size: int = 0
    weight: float = 0.0
    flags: int = 0
    slower: float = 0.0
    slot: int = -1


def short(text: bytes) -> int:
    """64 bits of a name or digest, for comparison in headers."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def curve_pair(key: bytes, run_id: str, role: object) -> tuple[bytes, bytes]:
    """(public, secret) of CURVE in Z85, derived from the run key: without the key the public
    half is unknown too.
    """
    from zmq.utils import z85

    secret = z85.encode(derive(key, "curve", run_id, role))
    return zmq.curve_public(secret), secret


class ReplayWindow:
    """Accepts every frame number once, out of order within the last 1,024."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0  # bit k: number `highest - k` was accepted

    def accept(self, number: int) -> bool:
        if number > self._highest:
            shift = min(number - self._highest, REPLAY_WINDOW)
            self._seen = ((self._seen << shift) | 1) & ((1 << REPLAY_WINDOW) - 1)
            self._highest = number
            return True
        age = self._highest - number
        if number <= 0 or age >= REPLAY_WINDOW or self._seen >> age & 1:
            return False
        self._seen |= 1 << age
        return True


class Wire:
    """Writes and checks the frames of one rank."""

    def __init__(
        self,
        rank: int,
        world: list[int],
        *,
        run_id: str,
        layout: bytes,
        generation: int = 0,
        largest_body: int = 1 << 20,
        key: bytes | None = None,
        session: str = "",
    ) -> None:
        self.rank = rank
        self.largest_body = largest_body
        self._peers = frozenset(world) - {rank}
        self._run = short(run_id.encode())
        self._layout = short(layout)
        self._generation = generation
        self._run_id = run_id
        self._key = key
        self._session = session
        self._numbers = dict.fromkeys(self._peers, 0)
        self._windows = {peer: ReplayWindow() for peer in self._peers}
        self._outgoing: dict[int, AESGCM | None] = {}
        self._incoming: dict[int, AESGCM | None] = {}

    def meet(self, peer: int, session: str) -> None:
        """Learn the peer's session: from here on frames to it can be written, and those from it
        verified.
        """
        self._outgoing[peer] = self._direction(self.rank, peer, self._session, session)
        self._incoming[peer] = self._direction(peer, self.rank, session, self._session)

    def _direction(self, source: int, dest: int, *sessions: str) -> AESGCM | None:
        if self._key is None:
            return None
        return AESGCM(
            derive(self._key, "frame", self._run_id, self._generation, source, dest, *sessions)
        )

    def seal(self, header: Header, frame: bytearray | memoryview) -> None:
        """Write the header and its check in front of the body that `frame` already holds."""
        self._numbers[header.dest] += 1
        header.source = self.rank
        header.run = self._run
        header.layout = self._layout
        header.generation = self._generation
        header.number = self._numbers[header.dest]
        header.size = len(frame) - HEADER_BYTES
        _LAYOUT.pack_into(frame, 0, bytes(_CHECK_BYTES), MAGIC, VERSION, *_values(header))
        frame[:_CHECK_BYTES] = _check(self._outgoing[header.dest], header.number, memoryview(frame))

    def open(self, frame: memoryview) -> tuple[Header, memoryview]:
        """Check a frame; its header and its body, or `FrameError`."""
        if len(frame) < HEADER_BYTES:
            raise FrameError("truncated", f"{len(frame)} bytes, a header has {HEADER_BYTES}")
        check, magic, version, *values = _LAYOUT.unpack_from(frame)
        if magic != MAGIC:
            raise FrameError("magic", f"holds {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise FrameError("version", f"version {version}, expected {VERSION}")
        header = _header(values)
        self._belongs(header, len(frame) - HEADER_BYTES)
        expected = _check(self._incoming[header.source], header.number, frame)
        if not hmac.compare_digest(check, expected):
            if self._key is None:
                raise FrameError(
                    "checksum",
                    f"kind {header.kind} from rank {header.source}: bytes changed on the way",
                )
            raise FrameError(
                "key",
                f"kind {header.kind} from rank {header.source}: wrong run key, or bytes changed",
            )
        if self._key is not None and not self._windows[header.source].accept(header.number):
            raise FrameError(
                "replay", f"frame {header.number} of rank {header.source} was seen before"
            )
        return header, frame[HEADER_BYTES:]

    def _belongs(self, header: Header, size: int) -> None:
        if header.source not in self._peers or header.dest != self.rank:
            raise FrameError(
                "source", f"from {header.source} to {header.dest}; this is {self.rank}"
            )
        if header.source not in self._incoming:
            raise FrameError("source", f"rank {header.source} has not been met yet")
        if header.run != self._run:
            raise FrameError("run", f"rank {header.source} belongs to another run")
        if header.generation != self._generation:
            raise FrameError(
                "generation", f"generation {header.generation}, expected {self._generation}"
            )
        if header.layout != self._layout:
            raise FrameError("layout", f"rank {header.source} trains another model")
        if header.kind not in FrameKind._value2member_map_:
            raise FrameError("kind", f"kind {header.kind} is unknown")
        if header.dtype not in DTYPES:
            raise FrameError("dtype", f"dtype {header.dtype} is unknown")
        if header.size != size or size > self.largest_body or size % DTYPES[header.dtype].itemsize:
            raise FrameError(
                "size",
                f"header says {header.size} bytes, {size} came, at most {self.largest_body} may",
            )


def claimed_source(frame: memoryview) -> int:
    """Who a refused frame says it is from; -1 when it is too short to say."""
    return int(_LAYOUT.unpack_from(frame)[6]) if len(frame) >= HEADER_BYTES else -1


def _values(header: Header) -> tuple[int | float, ...]:
    h = header
    ints = (h.kind, h.topic, h.dtype, h.source, h.dest, h.generation, h.chunk)
    return (
        *ints,
        h.run,
        h.layout,
        h.tag,
        h.una,
        h.progress,
        h.number,
        h.size,
        h.weight,
        h.flags,
        h.slower,
        h.slot,
    )


def _header(values: list[Any]) -> Header:
    kind, topic, dtype, source, dest, *rest = values
    return Header(kind, source, dest, topic, dtype, *rest)


def _check(key: AESGCM | None, number: int, frame: memoryview) -> bytes:
    signed = frame[_CHECK_BYTES:]
    if key is None:
        return xxhash.xxh3_128(signed).digest()
    return key.encrypt(number.to_bytes(_NONCE_BYTES, "little"), b"", signed)
