"""Rank 1 sends so many bytes to rank 0 over plain TCP; rank 0 says what arrived and how fast. No torch: it starts quickly.

Usage: stream.py BYTES [forever]
"""

import os
import socket
import sys
import time

PORT = 5000
amount = int(float(sys.argv[1]))
address = (os.environ["MASTER_ADDR"], PORT)
pattern = bytes(range(256)) * 256

if os.environ["RANK"] == "0":
    with socket.create_server(address) as listener:
        print("listening", flush=True)
        connection, _ = listener.accept()
    received = wrong = 0
    begin = time.perf_counter()
    while data := connection.recv(1 << 16):
        expected = (pattern + pattern)[received % 256 :][: len(data)]
        wrong += data != expected
        received += len(data)
        if "forever" in sys.argv:
            print("got", received, flush=True)
    seconds = time.perf_counter() - begin
    print(f"mbit {8 * received / seconds / 1e6:.2f} bytes {received} wrong {wrong}", flush=True)
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
        sent += connection.send(pattern[sent % 65536 :][: amount - sent])
    connection.close()
