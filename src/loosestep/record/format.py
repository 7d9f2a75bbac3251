"""The recording of one rank: what its shadow did and what its compute thread asked for, in their
one exact order.

    file     MAGIC, header (a record whose body is JSON), records
    record   length (1 byte; 255: 4 more bytes say it), body, check (4 bytes)
    body     kind (1 byte), fields; the kind's highest bit says that the step boundary under way had not reached the
             chunk yet

`check` is the CRC-32 of all bodies up to here: a changed byte is noticed, and so is a record that
is missing. A record is written in one call, before the message it explains leaves: a rank that is
killed leaves whole records, and a last one that is torn is cut off.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"loosestep recording\n"
FORMAT = 2
BEHIND = 0x80
# how a peer went: holding the result, without a word, or of its own accord before that
FINISHED, DIED, EARLY = range(3)
_LONG = 255


class RecordKind(IntEnum):
    """What happened. Up to HOLD: to the shadow, by the communication thread; from STEP on: marks
    of the compute thread.
    """

    TAKE = 1  # peer, chunk, q: this rank's value of a pair
    FOLD = 2  # peer, chunk, q, weight: the pair was folded
    READ = 3  # chunk, serial: read for somebody who asked
    MEAN = 4  # chunk, (rank, serial)...: averaged for a consensus
    FINAL = 5  # chunk, (rank, serial)...: averaged for the end of the run
    KEEP = 6  # chunk, holder: the agreed average, read from who has it
    HOLD = 7  # this rank has the agreed average
    ROUND = 8  # number, (rank, 0)...: the vector a lockstep round starts from, and who reads it
    MIX = 9  # peer, chunk, number, weight: folded in a lockstep round
    GONE = 10  # peer, how (FINISHED, ...): it is no longer there
    STEP = 32  # an optimizer step was made
    STEPPED = 33  # global steps: its boundary is complete
    CHECKED = 34  # global steps, digest of the parameters: the same
    # (first, last)...: the shadow and the parameters begin to meet in these chunks; without any,
    # in all
    BOUNDARY = 35
    LANDED = 36  # they have met
    CONSENSUS = 37  # the mean model was asked for
    AGREED = 38  # and is here
    ASSIGN = 39  # the parameters became the agreed average
    NUMBER = 40  # a number that depends on time
    VALUE = 41  # JSON: a value that depends on time
    END = 42  # global steps, digest: the run was finished
    ABORT = 43  # text: it ended otherwise


_FIELDS = {
    RecordKind.TAKE: "HII",
    RecordKind.FOLD: "HIId",
    RecordKind.READ: "II",
    RecordKind.MEAN: "I",
    RecordKind.FINAL: "I",
    RecordKind.KEEP: "IH",
    RecordKind.ROUND: "I",
    RecordKind.MIX: "HIId",
    RecordKind.GONE: "HB",
    RecordKind.STEPPED: "Q",
    RecordKind.CHECKED: "QQ",
    RecordKind.NUMBER: "q",
    RecordKind.END: "QQ",
}
_STRUCTS = {kind: struct.Struct("<B" + _FIELDS.get(kind, "")) for kind in RecordKind}
_READING = struct.Struct("<HI")
_RUN = struct.Struct("<II")
WITH_READINGS = (RecordKind.MEAN, RecordKind.FINAL, RecordKind.ROUND)
WITH_TEXT = (RecordKind.VALUE, RecordKind.ABORT)
WITH_REST = (*WITH_READINGS, *WITH_TEXT, RecordKind.BOUNDARY)


class RecordingError(ValueError):
    """A recording that cannot be used; the message says what was seen, what was expected and
    what to do.
    """


class Record(NamedTuple):
    """One record. `behind`: the boundary under way had not reached the chunk yet. `rest`:
    readings, chunks, or a text.
    """

    kind: RecordKind
    fields: tuple[Any, ...] = ()
    rest: Any = None
    behind: bool = False

    @property
    def is_mark(self) -> bool:
        return self.kind >= RecordKind.STEP


def pack(kind: RecordKind, *fields: float, rest: bytes = b"") -> bytes:
    """The body of a record."""
    return _STRUCTS[kind].pack(kind, *fields) + rest


def pack_readings(kind: RecordKind, place: int, readings: dict[int, int]) -> bytes:
    """The body of a mean: whose readings it was made of, beside this rank's own value."""
    return pack(
        kind,
        place,
        rest=b"".join(_READING.pack(rank, serial) for rank, serial in sorted(readings.items())),
    )


def pack_boundary(chunks: list[int]) -> bytes:
    """The body of a boundary of these chunks, in ascending order; of all with an empty list."""
    known = set(chunks)
    first = [chunk for chunk in chunks if chunk - 1 not in known]
    last = [chunk for chunk in chunks if chunk + 1 not in known]
    return pack(RecordKind.BOUNDARY, rest=b"".join(map(_RUN.pack, first, last)))


def unpack(body: bytes) -> Record:
    """The inverse of `pack`; ValueError for what is none."""
    kind = RecordKind(body[0] & ~BEHIND)
    layout = _STRUCTS[kind]
    rest = body[layout.size :]
    if len(body) < layout.size or (rest and kind not in WITH_REST):
        raise ValueError(f"{len(body)} bytes for {kind.name}")
    fields = layout.unpack_from(body)[1:]
    if kind in WITH_READINGS:
        return Record(kind, fields, dict(_READING.iter_unpack(rest)), bool(body[0] & BEHIND))
    if kind is RecordKind.BOUNDARY:
        runs = [range(first, last + 1) for first, last in _RUN.iter_unpack(rest)]
        return Record(kind, fields, [chunk for run in runs for chunk in run] or None)
    return Record(
        kind, fields, rest.decode() if kind in WITH_TEXT else None, bool(body[0] & BEHIND)
    )


def frame(body: bytes, crc: int) -> tuple[bytes, int]:
    """A body as it is written, after records whose checks came to `crc`; and what they come to
    now.
    """
    crc = zlib.crc32(body, crc)
    length = bytes([len(body)]) if len(body) < _LONG else struct.pack("<BI", _LONG, len(body))
    return length + body + crc.to_bytes(4, "little"), crc


@dataclass(frozen=True)
class Recording:
    """What one rank has left."""

    path: Path
    header: dict[str, Any]
    data: bytes
    start: int  # of the first record
    crc: int  # at that place
    steps: int

    @classmethod
    def read(cls, folder: Path, rank: int) -> Recording:
        """The recording of a rank, every record checked; a torn last one is left out."""
        path = rank_file(folder, rank)
        try:
            data = path.read_bytes()
        except OSError as error:
            there = sorted(
                int(found.stem.removeprefix("rank-")) for found in folder.glob("rank-*.rec")
            )
            which = f"there are those of ranks {there}" if there else "there is none"
            raise RecordingError(
                f"the recording of rank {rank} is missing: {path} cannot be read "
                f"({error.strerror}); {which}. A replay needs the files of all ranks, so copy "
                "them into one folder"
            ) from None
        header, start, crc = _read_header(path, data)
        steps = sum(body[0] == RecordKind.STEP for body in _bodies(path, data, start, crc))
        return cls(path, header, data, start, crc, steps)

    def records(self) -> Iterator[Record]:
        """In their order."""
        return (unpack(body) for body in _bodies(self.path, self.data, self.start, self.crc))

    @cached_property
    def ending(self) -> Record | None:
        """The last mark: END, ABORT, or whatever a killed rank did last."""
        last = None
        for record in self.records():
            last = record if record.is_mark else last
        return last


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.rec"


def _read_header(path: Path, data: bytes) -> tuple[dict[str, Any], int, int]:
    if not data.startswith(MAGIC):
        raise RecordingError(
            f"{path} is not a recording, or its beginning is lost ({len(data)} bytes): record the "
            "run again"
        )
    found = _body(data, len(MAGIC), 0)
    if found is None:
        raise RecordingError(
            f"{path} ends inside its header: its rank was ended while it attached; record the run "
            "again"
        )
    body, position, crc = found
    if crc < 0:
        raise RecordingError(f"{path}: the header is damaged; record the run again")
    header = json.loads(body)
    if header.get("format") != FORMAT:
        raise RecordingError(
            f"{path} has format {header.get('format')}, this version of loosestep reads {FORMAT}; "
            f"replay it with loosestep {header.get('loosestep')}, which wrote it"
        )
    return header, position, crc


def _bodies(path: Path, data: bytes, position: int, crc: int) -> Iterator[bytes]:
    """The body of every whole record."""
    while position < len(data):
        found = _body(data, position, crc)
        try:
            if found is None:
                _require_torn(data, position)
                return
            body, after, crc = found
            if crc < 0:
                raise ValueError("its check does not fit")
            unpack(body)
        except (ValueError, IndexError, struct.error) as error:
            raise RecordingError(
                f"{path} is damaged at byte {position} of {len(data)} ({error}): what follows "
                "cannot be trusted; use an undamaged copy"
            ) from None
        yield body
        position = after


def _require_torn(data: bytes, position: int) -> None:
    """What is left could be the beginning of a record, written by a rank that was killed;
    ValueError if it cannot.
    """
    length = data[position]
    begin = position + 1 + 4 * (data[position] == _LONG)
    if begin >= len(data):
        return
    kind = RecordKind(data[begin] & ~BEHIND)
    if kind not in WITH_REST and length != _STRUCTS[kind].size:
        raise ValueError(f"a length of {length} for {kind.name}")


def _body(data: bytes, position: int, crc: int) -> tuple[bytes, int, int] | None:
    """(body, where it ends, the checks so far or -1); None when the file ends before the record
    does.
    """
    length = data[position]
    begin = position + 1
    if length == _LONG:
        if len(data) < begin + 4:
            return None
        length = int.from_bytes(data[begin : begin + 4], "little")
        begin = begin + 4
    end = begin + length
    if len(data) < end + 4:
        return None
    body = data[begin:end]
    crc = zlib.crc32(body, crc)
    return body, end + 4, crc if crc.to_bytes(4, "little") == data[end : end + 4] else -1
