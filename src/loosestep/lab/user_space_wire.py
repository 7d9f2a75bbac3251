"""A wire in user space: frames go from one TAP interface to the other, late, lost or damaged as
told.

For what the kernel may not offer (many have no netem, or no nftables). The lab holds a `UserSpaceWire`; the
forwarding is done by this same file run as a program, which needs nothing but the standard library.
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
LARGEST_FRAME = 1 << 16
MOST_WAITING = 64 << 20
"""Bytes in flight; beyond it frames are lost, as in a router with a full queue."""

ETHERNET = 14
IPV4 = b"\x08\x00"
TCP = 6


def open_tap(name: str) -> int:
    """A TAP interface in the network of the calling thread; it exists while the descriptor is
    open.
    """
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return handle


class UserSpaceWire:
    """The forwarding process of a lab, and what it is told: `delay` in seconds, `loss` and
    `flip` as probabilities.
    """

    def __init__(self, taps: list[tuple[int, int]], *, mark: str) -> None:
        self._settings = {"delay": 0.0, "loss": 0.0, "flip": 0.0}
        handles = [handle for pair in taps for handle in pair]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, handles)],
            pass_fds=handles,
            stdin=subprocess.PIPE,
            env={**os.environ, "LOOSESTEP_LAB": mark},
            start_new_session=True,  # Ctrl-C is for the lab to act on
        )
        for handle in handles:
            os.close(handle)

    def set(self, **settings: float) -> None:
        self._settings.update(settings)
        assert self._process.stdin is not None
        self._process.stdin.write("{delay!r} {loss!r} {flip!r}\n".format(**self._settings).encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """The program ends when its orders end, and so it does when the lab is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def forward(taps: list[tuple[int, int]]) -> None:
    """Node to switch: with delay, loss and damage. Switch to node: straight on. Until standard
    input ends.
    """
    onward = dict(taps)
    back = {far: near for near, far in taps}
    orders = sys.stdin.fileno()
    delay = loss = flip = 0.0
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    weight = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([orders, *onward, *back], [], [], patience)
        for handle in ready:
            if handle == orders:
                order = os.read(orders, 1 << 12)
                if not order:
                    return
                delay, loss, flip = map(float, order.splitlines()[-1].split())
                continue
            for frame in _frames(handle):
                if handle in back:
                    _put(back[handle], frame)
                elif random.random() >= loss and weight < MOST_WAITING:
                    if random.random() < flip:
                        frame = flip_byte(frame)
                    waiting.append((time.monotonic() + delay, onward[handle], frame))
                    weight += len(frame)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, frame = waiting.popleft()
            weight -= len(frame)
            _put(target, frame)


def _frames(handle: int, most: int = 16) -> list[bytes]:
    """What waits to be read, a few at a time so that no interface starves another."""
    frames: list[bytes] = []
    with contextlib.suppress(OSError):  # nothing more, or the interface is down
        while len(frames) < most:
            frames.append(os.read(handle, LARGEST_FRAME))
    return frames


def _put(handle: int, frame: bytes) -> None:
    # an interface that is down or full loses the frame, as on any wire
    with contextlib.suppress(OSError):
        os.write(handle, frame)


def flip_byte(frame: bytes) -> bytes:
    """One byte of the data of a TCP segment inverted, and the checksum made right again, so that
    TCP delivers it.

    The checksum is the ones' complement of the ones' complement sum of 16-bit words: c' = ~(~c + ~w
    + w') for a word w that becomes w'. Frames that carry no data are left as they are.
    """
    if frame[12:14] != IPV4 or frame[ETHERNET + 9] != TCP:
        return frame
    segment = ETHERNET + 4 * (frame[ETHERNET] & 15)
    data = segment + 4 * (frame[segment + 12] >> 4)
    end = ETHERNET + int.from_bytes(frame[ETHERNET + 2 : ETHERNET + 4], "big")
    if end - data < 64:
        return frame
    damaged = bytearray(frame)
    place = random.randrange(data, end - 1)
    word = segment + (place - segment) // 2 * 2  # words count from the start of the segment
    before = int.from_bytes(damaged[word : word + 2], "big")
    damaged[place] ^= 0xFF
    after = int.from_bytes(damaged[word : word + 2], "big")
    checksum = int.from_bytes(damaged[segment + 16 : segment + 18], "big")
    total = (checksum ^ 0xFFFF) + (before ^ 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    damaged[segment + 16 : segment + 18] = (total ^ 0xFFFF).to_bytes(2, "big")
    return bytes(damaged)


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]]
    forward(list(zip(numbers[::2], numbers[1::2])))  # noqa: B905
