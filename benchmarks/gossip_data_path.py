"""What gossip's data path carries, and what that costs: a mailbox in every process, main threads
that wait, payload counted at the sockets and in shared memory.

    rate    two ranks that average whole models without a pause, on one host (values in shared
            memory) and as between hosts (frames on the loopback), authenticated; gloo's all-reduce
            of the same vector in the same processes beside it
    steps   learners that wait instead of computing, at the pace the budget finds: models sent a
            step, and how much longer their steps are than without communication in the same run

    python benchmarks/gossip_data_path.py [--quick] [--megabytes 76.7] [--seconds 4] [--learners 4]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common import machine, options, publish, table
from loosestep.core.gossip.budget import Budget, Idle
from loosestep.core.gossip.mailbox import Mailbox

KEY = "a key that is only used to measure"
WAIT = 0.1  # seconds that a learner waits in a step, as if it computed on a device
COUNTED = ("bytes_sent", "bytes_received", "queue_full", "repeated")


def processor_seconds() -> float:
    """Of this process and of what it has started and is still there."""
    total = time.process_time()
    for task in os.listdir("/proc"):
        if task.isdigit():
            try:
                with open(f"/proc/{task}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[1]) == os.getpid():
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Learner:
    """One of the processes."""

    def __init__(self, rank: int, world: int, store: Any, numbers: int, name: str, **options: Any):
        self.rank = rank
        self.world = world
        self.params = [torch.randn(numbers, generator=torch.Generator().manual_seed(rank))]
        self.box = Mailbox(
            store,
            rank,
            world=range(world),
            params=self.params,
            layout=b"benchmark",
            run_id=name,
            key=KEY,
            **options,
        )

    def rate(self, seconds: float) -> dict[str, float]:
        """Exchange without a pause."""
        peer = 1 - self.rank
        for _ in range(2):
            self.box.exchange(peer).wait(30)
        before = self.box.counters
        used = processor_seconds()
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            self.box.exchange(peer).wait(30)
        after = self.box.counters
        wall = time.monotonic() - begun
        figures = {name: after[name] - before[name] for name in COUNTED}
        both = (figures["bytes_sent"] + figures["bytes_received"]) / 2
        return {
            "sent": figures["bytes_sent"] / wall / 1e9,
            "received": figures["bytes_received"] / wall / 1e9,
            "cpu": (processor_seconds() - used) / (both / 1e8),
            "queue_full": figures["queue_full"],
            "repeated": figures["repeated"],
        }

    def steps(self, count: int, *, exchange: bool) -> dict[str, float]:
        """Steps that wait, with or without exchanges at the pace the budget finds."""
        cores = len(os.sched_getaffinity(0)) / self.world
        budget = Budget(1.0, cores=cores, least=self.box.least_share, idle=Idle())
        before = self.box.counters
        durations = []
        last = time.monotonic()
        number = 0
        half = before
        for step in range(count):
            time.sleep(WAIT)
            self.params[0][:1000] += 1e-6
            self.box.step()
            if exchange:
                self.box.cross(self.params, "due")
                others = self.box.neighbours_slower()
                share = budget.due(time.monotonic(), self.box.cpu_seconds(), others=others)
                self.box.slower = budget.slower or 0.0
                if share > 0:
                    peer = (self.rank + 1 + number % (self.world - 1)) % self.world
                    number += 1
                    part = min(1.0, share)
                    self.box.cross(self.params, "publish", peer=peer, share=part)
                    self.box.exchange(peer, share=part)
            now = time.monotonic()
            if step >= count // 2:
                durations.append(now - last)
            else:
                half = self.box.counters
            last = now
        after = self.box.counters
        model = self.params[0].nbytes
        return {
            "step": statistics.fmean(durations),
            "models": (after["bytes_sent"] - half["bytes_sent"]) / model / len(durations),
            "exchanges": (after["exchanges"] - half["exchanges"]) / len(durations),
            "queue_full": after["queue_full"] - before["queue_full"],
            "repeated": after["repeated"] - before["repeated"],
            "rate": budget.rate,
            "slower": budget.slower or 0.0,
        }

    def close(self) -> None:
        """Leave together."""
        self.box.finish(self.params, 60)
        self.box.close()


def all_reduce(rank: int, store: Any, numbers: int, seconds: float) -> dict[str, float]:
    """gloo's, of the same vector."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    vector = torch.randn(numbers)
    dist.all_reduce(vector)
    used = time.process_time()
    begun = time.monotonic()
    count = 0
    more = torch.ones(1)
    while more.item():
        dist.all_reduce(vector)
        count += 1
        more = torch.tensor([float(time.monotonic() - begun < seconds)])
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
    wall = time.monotonic() - begun
    cost = time.process_time() - used
    dist.destroy_process_group()
    moved = count * vector.nbytes  # 2 (n - 1) / n of the vector
    return {"sent": moved / wall / 1e9, "received": moved / wall / 1e9, "cpu": cost / (moved / 1e8)}


def work(rank: int, port: int, settings: dict[str, Any], pipe: Any) -> None:
    """A process: answers orders."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timeout=timedelta(seconds=60))
    world = settings["world"]
    numbers = settings["numbers"]
    pipe.send("ready")
    for number, order in enumerate(iter(pipe.recv, None)):
        kind = order.pop("kind")
        if kind == "gloo":
            place = dist.PrefixStore(f"gloo/{number}", store)
            pipe.send(all_reduce(rank, place, numbers, order["seconds"]))
            continue
        learner = Learner(rank, world, store, numbers, f"{kind}/{number}", shared=order["shared"])
        if kind == "rate":
            pipe.send(learner.rate(order["seconds"]))
        else:
            pipe.send(learner.steps(order["steps"], exchange=order["exchange"]))
        learner.close()


class Gang:
    """The processes of one part."""

    def __init__(self, world: int, megabytes: float) -> None:
        context = multiprocessing.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = store.port
        del store
        settings = {"world": world, "numbers": int(megabytes * 250_000)}
        self.pipes = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, port, settings, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
            ours.recv()

    def order(self, **order: Any) -> list[dict[str, float]]:
        """Have all of them do something; what they say."""
        for pipe in self.pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)


def rates(megabytes: float, seconds: float) -> str:
    """The first part."""
    gang = Gang(2, megabytes)
    rows = []
    for name, order in (
        ("one host", {"kind": "rate", "shared": True, "seconds": seconds}),
        ("between hosts", {"kind": "rate", "shared": False, "seconds": seconds}),
        ("gloo's all-reduce", {"kind": "gloo", "seconds": seconds}),
    ):
        for rank, found in enumerate(gang.order(**order)):
            counted = [f"{found[key]:.0f}" if key in found else "" for key in COUNTED[2:]]
            figures = (f"{found['sent']:.2f}", f"{found['received']:.2f}", f"{found['cpu']:.3f}")
            rows.append([name, str(rank), *figures, *counted])
    gang.close()
    head = ("", "rank", "GB/s sent", "received", "CPU-s/100 MB", "queue_full", "repeated")
    return f"{megabytes:g} MB, two ranks\n\n" + table(head, rows)


def steps(learners: int, megabytes: float, count: int) -> str:
    """The second part."""
    gang = Gang(learners, megabytes)
    base = {"kind": "steps", "shared": True, "steps": count // 2}
    alone = [found["step"] for found in gang.order(**base, exchange=False)]
    found = gang.order(**{**base, "steps": count}, exchange=True)
    again = [found["step"] for found in gang.order(**base, exchange=False)]
    gang.close()
    rows = []
    for rank, one in enumerate(found):
        without = (alone[rank] + again[rank]) / 2
        rows.append(
            [
                str(rank),
                f"{without * 1e3:.1f}",
                f"{one['step'] * 1e3:.1f}",
                f"{100 * (one['step'] / without - 1):+.1f} %",
                f"{one['models']:.2f}",
                f"{one['exchanges']:.2f}",
                f"{one['rate']:.2f}",
                f"{100 * one['slower']:.1f} %",
                f"{one['queue_full']:.0f}",
                f"{one['repeated']:.0f}",
            ]
        )
    head = ("rank", "ms alone", "ms", "slower", "models sent a step", "exchanges a step")
    head = (*head, "rate", "as the budget sees it", "queue_full", "repeated")
    title = f"{megabytes:g} MB, {learners} learners that wait {WAIT * 1e3:g} ms a step"
    return f"{title}\n\n" + table(head, rows)


def main() -> None:
    """Run both parts."""
    parser = options(__doc__, quick="short runs")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--megabytes", type=float, default=76.7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    seconds = 1.5 if given.quick else given.seconds
    count = 240 if given.quick else given.steps
    parts = [rates(given.megabytes, seconds), steps(given.learners, 16.0, count)]
    publish("gossip data path", "\n\n".join([machine(), *parts]), quick=given.quick)


if __name__ == "__main__":
    main()
