"""Frames: what is written is read, and everything else is refused with its reason."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.core.keys import derive, key_bytes
from loosestep.core.messages.frames import (
    HEADER_BYTES,
    Flags,
    FrameError,
    FrameKind,
    Header,
    ReplayWindow,
    Wire,
    curve_pair,
)

KEY = b"k" * 32


def wire(rank, **changes):
    options = {"run_id": "r", "layout": b"model", "key": None, "largest_body": 4096} | changes
    made = Wire(rank, [0, 1, 2], session=f"s{rank}", **options)
    for peer in {0, 1, 2} - {rank}:
        made.meet(peer, f"s{peer}")
    return made


def sealed(sender, body=b"", **fields):
    frame = bytearray(HEADER_BYTES + len(body))
    frame[HEADER_BYTES:] = body
    sender.seal(
        Header(**({"kind": FrameKind.REQUEST, "source": sender.rank, "dest": 1} | fields)), frame
    )
    return frame


def reason(receiver, frame):
    with pytest.raises(FrameError) as caught:
        receiver.open(memoryview(frame))
    return caught.value.reason


@pytest.mark.parametrize("key", [None, KEY])
def test_a_frame_arrives_as_it_was_sent(key):
    body = np.arange(10, dtype=np.float32).tobytes()
    fields = {
        "chunk": 7,
        "tag": 2**40,
        "una": 5,
        "weight": 1 / 3,
        "progress": 12,
        "flags": Flags.DONE,
        "dtype": 1,
    }
    header, received = wire(1, key=key).open(memoryview(sealed(wire(0, key=key), body, **fields)))
    assert {name: getattr(header, name) for name in fields} == fields
    assert (header.kind, header.source, header.size) == (FrameKind.REQUEST, 0, len(body))
    assert received == body


@pytest.mark.parametrize("key", [None, KEY])
@given(position=st.integers(0, HEADER_BYTES + 39), bit=st.integers(0, 7))
def test_no_flipped_bit_is_accepted(key, position, bit):
    frame = sealed(wire(0, key=key), bytes(40), dtype=1)
    frame[position] ^= 1 << bit
    assert reason(wire(1, key=key), frame)


@given(garbage=st.binary(max_size=400))
def test_garbage_is_refused(garbage):
    assert reason(wire(1), garbage) in {"truncated", "magic"}


def test_http_is_refused():
    assert reason(wire(1), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(200)) == "magic"


@pytest.mark.parametrize(
    ("sender", "expected"),
    [
        ({"run_id": "another"}, "run"),
        ({"layout": b"other model"}, "layout"),
        ({"generation": 3}, "generation"),
        ({"key": KEY}, "checksum"),
    ],
)
def test_a_stranger_is_refused_by_name(sender, expected):
    assert reason(wire(1), sealed(wire(0, **sender))) == expected


@pytest.mark.parametrize("sender", [{}, {"key": b"x" * 32}])
def test_without_the_right_key_nothing_is_accepted(sender):
    assert reason(wire(1, key=KEY), sealed(wire(0, **sender))) == "key"


def test_an_earlier_life_of_the_sender_is_refused():
    receiver = wire(1, key=KEY)
    old = sealed(wire(0, key=KEY))
    receiver.meet(0, "a new session")
    assert reason(receiver, old) == "key"


def test_an_earlier_life_of_the_receiver_is_not_answered_by_a_replay():
    old = sealed(wire(0, key=KEY))
    again = Wire(
        1,
        [0, 1, 2],
        run_id="r",
        layout=b"model",
        key=KEY,
        largest_body=4096,
        session="a new session",
    )
    again.meet(0, "s0")
    assert reason(again, old) == "key"


def test_a_frame_sent_back_to_its_sender_is_refused():
    """Its addresses are changed, as they must be to get there; the key of the other direction
    does not fit.
    """
    frame = sealed(wire(0, key=KEY))
    frame[24:28], frame[28:32] = frame[28:32], frame[24:28]
    assert reason(wire(0, key=KEY), frame) == "key"


def test_the_same_frame_never_has_the_same_check_twice():
    sender = wire(0, key=KEY)
    assert len({bytes(sealed(sender, bytes(8))[:16]) for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("offset", "value", "expected"),
    [
        (20, 9, "version"),
        (21, 99, "kind"),
        (23, 77, "dtype"),
        (24, 9, "source"),
        (28, 2, "source"),
        (88, 1, "size"),
    ],
)
def test_bad_fields_are_named(offset, value, expected):
    frame = sealed(wire(0))
    frame[offset] = value
    assert reason(wire(1), frame) == expected


def test_a_body_over_the_limit_is_refused():
    assert reason(wire(1, largest_body=64), sealed(wire(0), bytes(65))) == "size"


def test_a_body_that_is_not_whole_numbers_is_refused():
    assert reason(wire(1), sealed(wire(0), bytes(41), dtype=2)) == "size"


def test_a_replayed_frame_is_refused_and_a_fresh_one_accepted():
    sender = wire(0, key=KEY)
    receiver = wire(1, key=KEY)
    first = sealed(sender)
    second = sealed(sender)
    receiver.open(memoryview(first))
    assert reason(receiver, first) == "replay"
    receiver.open(memoryview(second))


@given(st.lists(st.integers(1, 3000), max_size=60))
def test_the_replay_window_accepts_each_number_at_most_once(numbers):
    window = ReplayWindow()
    accepted = [n for n in numbers if window.accept(n)]
    assert len(accepted) == len(set(accepted))
    highest = 0
    for n in numbers:  # and refuses no fresh one within the window
        if n > highest:
            assert n in accepted
        highest = max(highest, n)


def test_the_window_takes_late_numbers_once_and_forgets_the_oldest():
    window = ReplayWindow()
    assert [window.accept(n) for n in (5, 3, 3, 2000, 1999, 1999, 5)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]


def test_short_keys_are_refused():
    with pytest.raises(ValueError, match="at least 16 bytes, got 3"):
        key_bytes("abc")
    assert key_bytes("a" * 16) == b"a" * 16


def test_derived_keys_differ_by_every_part():
    assert (
        len(
            {
                derive(KEY, "a", "bc"),
                derive(KEY, "ab", "c"),
                derive(KEY, "a", "bc", ""),
                derive(b"y" * 32, "a", "bc"),
            }
        )
        == 4
    )


def test_curve_keys_follow_from_the_run_key_alone():
    assert curve_pair(KEY, "run", 0) == curve_pair(KEY, "run", 0)
    assert curve_pair(KEY, "run", 0) != curve_pair(KEY, "run", 1)
