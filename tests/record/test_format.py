"""The format of a recording: what is written is read, what is torn is cut, what is changed is
noticed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.record.format import (
    WITH_READINGS,
    WITH_TEXT,
    Record,
    Recording,
    RecordingError,
    RecordKind,
    pack,
    pack_boundary,
    pack_readings,
    rank_file,
    unpack,
)
from loosestep.record.player import require_same
from loosestep.record.recorder import Recorder, digest_of, make_header

SHORT = st.integers(0, 2**16 - 1)
WORD = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)
WEIGHT = st.floats(0, 0.5)
FIELDS: dict[RecordKind, list[Any]] = {
    RecordKind.TAKE: [SHORT, WORD, WORD],
    RecordKind.FOLD: [SHORT, WORD, WORD, WEIGHT],
    RecordKind.READ: [WORD, WORD],
    RecordKind.MEAN: [WORD],
    RecordKind.FINAL: [WORD],
    RecordKind.KEEP: [WORD, SHORT],
    RecordKind.ROUND: [WORD],
    RecordKind.MIX: [SHORT, WORD, WORD, WEIGHT],
    RecordKind.GONE: [SHORT, st.integers(0, 1)],
    RecordKind.STEPPED: [LONG],
    RecordKind.CHECKED: [LONG, LONG],
    RecordKind.NUMBER: [st.integers(-(2**63), 2**63 - 1)],
    RecordKind.END: [LONG, LONG],
}
HEADER = make_header(
    rank=3, nodes=[[0, 1], [2, 3]], strategy="adpsgd", layout=["weight: (2, 2) float32"]
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = draw(st.sampled_from(list(RecordKind)))
    fields = tuple(draw(st.tuples(*FIELDS.get(kind, []))))
    rest: Any = None
    if kind in WITH_READINGS:
        rest = draw(st.dictionaries(SHORT, WORD, max_size=60))
    elif kind in WITH_TEXT:
        rest = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
    elif kind is RecordKind.BOUNDARY:
        rest = sorted(draw(st.sets(st.integers(0, 40)))) or None
    return Record(kind, fields, rest, behind=kind < RecordKind.STEP and draw(st.booleans()))


def body(record: Record) -> bytes:
    if record.kind in WITH_READINGS:
        return pack_readings(record.kind, *record.fields, record.rest)
    if record.kind is RecordKind.BOUNDARY:
        return pack_boundary(record.rest or [])
    return pack(record.kind, *record.fields, rest=record.rest.encode() if record.rest else b"")


def write(folder: Path, wanted: list[Record]) -> bytes:
    """A recording with these records; its bytes."""
    recorder = Recorder(folder, 3, HEADER)
    for record in wanted:
        recorder.write(body(record), record.behind)
    recorder._close()
    return rank_file(folder, 3).read_bytes()


def read(folder: Path, data: bytes) -> list[Record]:
    rank_file(folder, 3).write_bytes(data)
    return list(Recording.read(folder, 3).records())


@settings(deadline=None)
@given(record=records())
def test_a_record_survives_packing(record: Record) -> None:
    assert unpack(body(record)) == record._replace(behind=False)


@settings(max_examples=50, deadline=None)
@given(wanted=st.lists(records(), max_size=20))
def test_what_is_written_is_read(wanted: list[Record]) -> None:
    with tempfile.TemporaryDirectory() as name:
        data = write(Path(name), wanted)
        assert read(Path(name), data) == wanted
        found = Recording.read(Path(name), 3)
        assert found.header == HEADER
        assert found.steps == sum(record.kind is RecordKind.STEP for record in wanted)


@settings(max_examples=50, deadline=None)
@given(wanted=st.lists(records(), min_size=1, max_size=10), cut=st.integers(1, 10**6))
def test_a_torn_last_record_is_cut_off_and_the_whole_ones_stay(
    wanted: list[Record], cut: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        start = len(write(Path(name), []))
        rank_file(Path(name), 3).unlink()
        data = write(Path(name), wanted)
        kept = read(
            Path(name),
            data[: len(data) - cut % (len(data) - start) - 1] if len(data) > start + 1 else data,
        )
        assert kept == wanted[: len(kept)]
        assert len(kept) < len(wanted)


@settings(max_examples=200, deadline=None)
@given(
    wanted=st.lists(records(), min_size=3, max_size=8),
    place=st.integers(0, 10**6),
    flip=st.integers(1, 255),
)
def test_a_changed_byte_never_gives_other_records(
    wanted: list[Record], place: int, flip: int
) -> None:
    """It is an error, or in the last records a torn end: never a record that was not written."""
    with tempfile.TemporaryDirectory() as name:
        data = bytearray(write(Path(name), wanted))
        data[place % len(data)] ^= flip
        try:
            found = read(Path(name), bytes(data))
        except RecordingError:
            return
        assert found == wanted[: len(found)]
        assert len(found) < len(wanted)


@pytest.mark.parametrize("place", range(-60, -20))
def test_a_change_before_the_last_records_is_an_error_that_says_where(
    place: int, tmp_path: Path
) -> None:
    data = bytearray(write(tmp_path, [Record(RecordKind.FOLD, (1, 2, q, 0.5)) for q in range(20)]))
    data[place] ^= 64
    with pytest.raises(RecordingError, match=r"is damaged at byte \d+ of"):
        read(tmp_path, bytes(data))


def test_a_recording_that_is_none_is_refused_with_advice(tmp_path: Path) -> None:
    data = write(tmp_path, [Record(RecordKind.STEP)])
    with pytest.raises(
        RecordingError, match=r"recording of rank 5 is missing.*there are those of ranks \[3\]"
    ):
        Recording.read(tmp_path, 5)
    with pytest.raises(RecordingError, match="is not a recording"):
        read(tmp_path, b"something else")
    with pytest.raises(RecordingError, match="ends inside its header"):
        read(tmp_path, data[:50])
    with pytest.raises(RecordingError, match="the header is damaged"):
        read(tmp_path, data.replace(b"adpsgd", b"adpsgx"))


def test_a_recording_of_another_format_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    Recorder(tmp_path, 3, {**HEADER, "format": 99, "loosestep": "9.9"})._close()
    with pytest.raises(RecordingError, match=r"has format 99.*replay it with loosestep 9\.9"):
        Recording.read(tmp_path, 3)


def test_a_recording_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    write(tmp_path, [])
    recording = Recording.read(tmp_path, 3)
    same: dict[str, Any] = {
        "nodes": HEADER["nodes"],
        "strategy": "adpsgd",
        "layout": HEADER["layout"],
    }
    require_same(recording, **same)
    with pytest.raises(
        RecordingError, match=r"by the ranks \[\[0, 1\], \[2, 3\]\].*now they are \[\[0\]\]"
    ):
        require_same(recording, **{**same, "nodes": [[0]]})
    with pytest.raises(RecordingError, match="with the strategy adpsgd, this run uses daso"):
        require_same(recording, **{**same, "strategy": "daso"})
    with pytest.raises(
        RecordingError,
        match=r"another model: entry 0 was 'weight: \(2, 2\) float32', now it is 'bias'",
    ):
        require_same(recording, **{**same, "layout": ["bias"]})
    with pytest.raises(RecordingError, match="it had 1 tensors, now there are 2"):
        require_same(recording, **{**same, "layout": [*HEADER["layout"], "bias"]})


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path, [])
    with pytest.raises(FileExistsError):
        Recorder(tmp_path, 3, HEADER)


def test_the_digest_sees_every_bit_of_every_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.ones(3, 5, dtype=dtype)
        before = digest_of([tensor, torch.tensor(1.0)])
        # the numbers, not how they lie
        assert digest_of([tensor.t().contiguous().t(), torch.tensor(1.0)]) == before
        tensor[2, 4] = 1 + torch.finfo(dtype).eps
        assert digest_of([tensor, torch.tensor(1.0)]) != before
