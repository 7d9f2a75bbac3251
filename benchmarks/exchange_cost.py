"""What an exchange costs: CPU-seconds per 100 MB exchanged both ways, mailbox against raw TCP and
gloo in the same run.

Two processes on this machine swap a float32 vector again and again. Counted is the CPU time of all
threads of both, in user and system mode. Raw TCP and gloo only move the bytes; the mailbox also
copies the value, checks it (xxh3, or a keyed hash), looks for NaN and averages it into the shadow
on both ends.

    python benchmarks/exchange_cost.py [--megabytes 32] [--exchanges 12] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import selectors
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
import zmq

from common import Spread, machine, publish, ratios, table
from loosestep.core.gossip.mailbox import Mailbox

KEY = "a key that is only used to measure"
MODES = ("raw TCP", "gloo", "mailbox", "mailbox, authenticated", "mailbox, encrypted")


def swap_tcp(link: socket.socket, mine: memoryview, theirs: memoryview) -> None:
    """Send and receive at the same time, without threads."""
    link.setblocking(False)
    sent = received = 0
    with selectors.DefaultSelector() as ready:
        ready.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while sent < len(mine) or received < len(theirs):
            for _, events in ready.select():
                if events & selectors.EVENT_READ and received < len(theirs):
                    received += link.recv_into(theirs[received : received + (1 << 20)])
                if events & selectors.EVENT_WRITE and sent < len(mine):
                    sent += link.send(mine[sent : sent + (1 << 20)])
                if sent == len(mine):
                    ready.modify(link, selectors.EVENT_READ)
    link.setblocking(True)


class Process:
    """One of the two; `rank` 0 begins the exchanges of the mailbox."""

    def __init__(self, rank: int, store: Any, megabytes: int) -> None:
        self.rank = rank
        self.store = store
        self.count = 0
        self.vector = torch.randn(
            megabytes * 250_000, generator=torch.Generator().manual_seed(rank)
        )
        self.other = torch.empty_like(self.vector)

    def meet(self) -> None:
        """Wait for the other process."""
        self.count += 1
        self.store.set(f"meet/{self.count}/{self.rank}", "here")
        self.store.wait([f"meet/{self.count}/{1 - self.rank}"], timedelta(seconds=120))

    def measure(self, mode: str, exchanges: int) -> float:
        return {"raw TCP": self._tcp, "gloo": self._gloo}.get(
            mode, lambda n: self._mailbox(mode, n)
        )(exchanges)

    def _tcp(self, exchanges: int) -> float:
        if self.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.store.set(f"tcp/{self.count}", str(server.getsockname()[1]))
                link, _ = server.accept()
        else:
            link = socket.create_connection(("127.0.0.1", int(self.store.get(f"tcp/{self.count}"))))
        with link:
            mine, theirs = (memoryview(t.numpy()).cast("B") for t in (self.vector, self.other))
            swap_tcp(link, mine, theirs)
            before = time.process_time()
            for _ in range(exchanges):
                swap_tcp(link, mine, theirs)
            return time.process_time() - before

    def _gloo(self, exchanges: int) -> float:
        before = 0.0
        for k in range(exchanges + 1):
            works = [dist.isend(self.vector, 1 - self.rank), dist.irecv(self.other, 1 - self.rank)]
            for work in works:
                assert work is not None
                work.wait()
            before = time.process_time() if k == 0 else before
        return time.process_time() - before

    def _mailbox(self, mode: str, exchanges: int) -> float:
        mailbox = Mailbox(
            self.store,
            self.rank,
            world=[0, 1],
            params=[self.vector],
            layout=b"benchmark",
            run_id=f"{mode}/{self.count}",
            key=None if mode == "mailbox" else KEY,
            encrypt=mode == "mailbox, encrypted",
        )
        self._exchanges(mailbox, 1)
        self.meet()
        before = time.process_time()
        self._exchanges(mailbox, exchanges)
        self.meet()
        used = time.process_time() - before
        mailbox.close()
        return used

    def _exchanges(self, mailbox: Mailbox, count: int) -> None:
        for _ in range(count if self.rank == 0 else 0):
            pending = mailbox.exchange(1, 0.5)
            if not pending.wait(60) or pending.outcome != "exchanged":
                raise RuntimeError(f"the exchange ended as {pending.outcome!r}")


def work(rank: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)
    process = Process(rank, store, arguments.megabytes)
    for repetition in range(arguments.repetitions):
        for mode in MODES:
            process.meet()
            results.put((repetition, mode, process.measure(mode, arguments.exchanges)))
            process.meet()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--exchanges", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="nothing is written")
    arguments = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=work, args=(rank, store.port, arguments, results)) for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    used: dict[tuple[int, str], float] = {}
    for _ in range(2 * arguments.repetitions * len(MODES)):
        repetition, mode, seconds = results.get(timeout=300)
        used[repetition, mode] = used.get((repetition, mode), 0.0) + seconds
    for worker in workers:
        worker.join()
    report(used, arguments)


def report(used: dict[tuple[int, str], float], arguments: argparse.Namespace) -> None:
    """One row a mode; ratios within a repetition."""
    hundreds = arguments.megabytes * arguments.exchanges / 100
    costs = {
        mode: [used[r, mode] / hundreds for r in range(arguments.repetitions)] for mode in MODES
    }
    rows = [
        [mode, Spread(tuple(values)).text(".3f"), ratios(values, costs["raw TCP"]).text(".1f")]
        for mode, values in costs.items()
    ]
    text = (
        "## What an exchange costs\n\n"
        f"{table(['', 'CPU-seconds per 100 MB both ways', 'times raw TCP'], rows)}\n\nTwo "
        f"processes, all their threads, {arguments.exchanges} exchanges of {arguments.megabytes} "
        f"MB; median and range of {arguments.repetitions} repetitions. Raw TCP and gloo only move "
        f"bytes; the mailbox also checks and averages them. {machine()}, libzmq "
        f"{zmq.zmq_version()}, xxhash {xxhash.VERSION}."
    )
    publish("exchange-cost", text, quick=arguments.quick)


if __name__ == "__main__":
    main()
