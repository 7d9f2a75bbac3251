"""Rank 1 sends so many bytes to rank 0 over plain TCP; rank 0 says what arrived, how fast, and how
fast in the best of ten parts (the first, which finds a full bucket, apart). No torch: it starts
quickly.

Usage: stream.py BYTES [forever]
"""

import os
import socket
import sys
import time
from itertools import pairwise

PORT = 5000
amount = int(float(sys.argv[1]))
address = (os.environ["MASTER_ADDR"], PORT)
pattern = bytes(range(256)) * 256
twice = memoryview(2 * pattern)

if os.environ["RANK"] == "0":
    with socket.create_server(address) as listener:
        print("listening", flush=True)
        connection, _ = listener.accept()
    received = wrong = 0
    # when a part was complete, and all that had arrived by then
    parts: list[tuple[float, int]] = []
    begin = time.perf_counter()
    while data := connection.recv(1 << 16):
        wrong += data != twice[received % 256 :][: len(data)]
        received += len(data)
        if received >= (len(parts) + 1) * amount / 10:
            parts.append((time.perf_counter(), received))
        if "forever" in sys.argv:
            print("got", received, flush=True)
    seconds = time.perf_counter() - begin
    best = max((after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(parts))
    print(
        f"mbit {8 * received / seconds / 1e6:.2f} bytes {received} wrong {wrong} best "
        f"{8 * best / 1e6:.2f}",
        flush=True,
    )
elif os.environ["RANK"] == "1":
    deadline = time.monotonic() + 20
    while True:
        try:
            begin = time.perf_counter()
            connection = socket.create_connection(address, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    print(f"connected {1000 * (time.perf_counter() - begin):.2f} ms", flush=True)
    connection.settimeout(60)
    sent = 0
    while sent < amount:
        sent += connection.send(twice[sent % 65536 :][: min(65536, amount - sent)])
    connection.close()
