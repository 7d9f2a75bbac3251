"""Frames that are damaged so that TCP does not notice."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from loosestep.lab.user_space_wire import flip_byte


def checksum(data: bytes) -> int:
    """The Internet checksum, computed from scratch."""
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def pseudo_header(length: int) -> bytes:
    return bytes([10, 83, 0, 1, 10, 83, 0, 2, 0, 6]) + length.to_bytes(2, "big")


def frame_of(payload: bytes, options: bytes = b"") -> bytes:
    tcp = bytearray(
        struct.pack("!HHIIBBHHH", 1, 2, 3, 4, (20 + len(options)) // 4 << 4, 0x18, 100, 0, 0)
    )
    tcp += options + payload
    tcp[16:18] = checksum(pseudo_header(len(tcp)) + tcp).to_bytes(2, "big")
    header = struct.pack(
        "!BBHHHBBH4s4s",
        0x45,
        0,
        20 + len(tcp),
        0,
        0,
        64,
        6,
        0,
        b"\x0a\x53\x00\x01",
        b"\x0a\x53\x00\x02",
    )
    return b"\2" * 12 + b"\x08\x00" + header + bytes(tcp)


@given(st.binary(min_size=64, max_size=300), st.sampled_from([b"", b"\1" * 4, b"\1" * 12]))
def test_one_byte_of_the_data_changes_and_the_checksum_stays_right(
    payload: bytes, options: bytes
) -> None:
    frame = frame_of(payload, options)
    damaged = flip_byte(frame)
    segment = damaged[34:]
    data = len(frame) - len(payload)
    assert len(damaged) == len(frame)
    assert sum(a != b for a, b in zip(damaged[data:], frame[data:], strict=True)) == 1
    assert damaged[: 34 + 16] == frame[: 34 + 16]
    assert checksum(pseudo_header(len(segment)) + segment) == 0


def test_frames_without_much_data_and_of_other_protocols_are_left_alone() -> None:
    acknowledgement = frame_of(b"")
    arp = b"\2" * 12 + b"\x08\x06" + b"\0" * 60
    udp = bytearray(frame_of(b"x" * 100))
    udp[14 + 9] = 17
    for frame in (acknowledgement, arp, bytes(udp)):
        assert flip_byte(frame) == frame
