"""One rank of a gossip test, as a process of its own. It leaves RANK.npz and RANK.json in the
folder of the test.
"""

import ctypes
import json
import os
import resource
import signal
import time

import ledger
import numpy as np
import torch
from torch.distributed import FileStore, TCPStore

from loosestep.core.gossip.mailbox import Mailbox
from loosestep.core.gossip.peer import Timing
from loosestep.core.messages.frames import KIND, FrameKind
from loosestep.core.messages.sockets import Letter
from loosestep.topology.graphs import GossipGraph

WITH_VALUE = (FrameKind.REQUEST, FrameKind.REPLY)
EXCHANGING = (*WITH_VALUE, FrameKind.ACK, FrameKind.PING)


class Worker:
    def __init__(self, rank, world, port, folder, options):
        self.rank = rank
        self.world = world
        self.folder = folder
        self.options = options
        self.events = []
        self.report = {}
        self.arrays = {}
        self.params = [start_vector(rank, options["size"], options.get("dtype", "float64"))]
        self.sent = 0
        self.draw = np.random.default_rng(rank)
        store = (
            FileStore(port, world)
            if isinstance(port, str)
            else TCPStore("127.0.0.1", port, None, False)
        )
        self.mailbox = Mailbox(
            store,
            rank,
            world=range(world),
            params=self.params,
            layout=b"test",
            key=options.get("key"),
            encrypt=options.get("encrypt", False),
            deadline=options.get("deadline", 60.0),
            emit=self.emit,
            timing=Timing(**options["timing"]) if "timing" in options else None,
            lose=self.lose if options.get("drops") or options.get("kill_at") else None,
        )
        del store  # from here on nothing may need it
        self.drops = options.get("drops", 0)
        self.late = options.get("late", 0)
        courier = self.mailbox._courier
        if "victim" in options and rank != options["victim"]:
            ledger.keep(folder, courier, options["victim"])
        courier.transport.send = self.hesitant(courier.transport.send)

    def emit(self, kind, **fields):
        self.events.append({"kind": kind, "at": time.monotonic()} | fields)

    def lose(self, header):
        if header.kind not in WITH_VALUE:
            return False
        self.sent += 1
        if (
            self.rank == self.options.get("victim")
            and self.sent >= self.options["kill_at"]
            and header.kind == FrameKind.REPLY
        ):
            ledger.write_will(self.folder, self.mailbox._courier)
            # it has applied the pair, and the answer will never leave
            os.kill(os.getpid(), signal.SIGKILL)
        if self.drops and self.draw.random() < 0.1:
            self.drops -= 1
            return True
        return False

    def hesitant(self, send):
        """Some frames leave late: behind younger ones, and when what they say has been repeated
        already.
        """
        held = []

        def send_or_hold(peer, letter):
            now = time.monotonic()
            for entry in [entry for entry in held if entry[0] <= now]:
                held.remove(entry)
                send(*entry[1:])
            if self.late and letter.frame[KIND] in EXCHANGING and self.draw.random() < 0.1:
                self.late -= 1
                held.append(
                    (now + self.draw.uniform(0.05, 0.2), peer, Letter(bytearray(letter.frame)))
                )
                return True
            return send(peer, letter)

        return send_or_hold

    def free(self):
        """Steps of `step` seconds and one exchange a step, until `exchanges` are done or, with
        none given, `stop` comes.
        """
        options = self.options
        stop = self.folder / "stop"
        gossip = GossipGraph(options.get("topology", "random-ring"), range(self.world), seed=1)
        gaps = []
        completed = 0
        number = 0
        last = time.monotonic()
        while completed < options["exchanges"] if "exchanges" in options else not stop.exists():
            partner = gossip.partner(self.rank, number, self.mailbox.alive())
            number += 1
            if partner is not None:
                pending = self.mailbox.exchange(*partner)
                if "exchanges" in options:
                    pending.wait(20)
                    completed += pending.outcome == "exchanged"
            time.sleep(options.get("step", 0))
            self.mailbox.step()
            self.mailbox.cross(self.params, "due")
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        self.report.update(
            worst_gap=max(gaps), steps=number, late=options.get("late", 0) - self.late
        )
        self.arrays["shadow"] = self.mailbox._shadow.flat()
        self.end()

    def end(self):
        begun = time.monotonic()
        self.mailbox.finish(self.params, 60)
        self.report.update(finish_seconds=time.monotonic() - begun, counters=self.mailbox.counters)
        self.report.update(global_steps=self.mailbox.global_steps, dead=sorted(self.mailbox.dead()))

    def lockstep(self):
        gossip = GossipGraph(self.options["topology"], range(self.world), seed=2)
        others = set(range(self.world)) - {self.rank}
        states = []
        for number in range(self.options["rounds"]):
            if self.options.get("fresh"):
                self.params[0].copy_(
                    start_vector(1000 * number + self.rank, self.options["size"], "float64")
                )
                self.mailbox.step()
                self.mailbox.cross(self.params, "whole")
                states.append(self.params[0].numpy().copy())
            self.mailbox.lockstep_round(number, gossip.round(self.rank, number, others))
            self.mailbox.step()
            self.mailbox.cross(self.params, "whole")
            states.append(self.params[0].numpy().copy())
        self.arrays["states"] = np.stack(states)
        self.end()

    def idle(self):
        """Nothing to do: what does the communication cost?"""
        time.sleep(0.5)
        before = time.process_time()
        wall = time.monotonic()
        time.sleep(self.options["seconds"])
        self.report["idle_share"] = (time.process_time() - before) / (time.monotonic() - wall)
        self.end()

    def memory(self):
        """Peak resident memory beyond the parameters while everybody exchanges with everybody."""
        before = self.options["baseline"]
        for k in range(self.options["exchanges"]):
            self.mailbox.exchange((self.rank + 1 + k % (self.world - 1)) % self.world).wait(30)
            self.mailbox.step()
            self.mailbox.cross(self.params, "whole")
        self.report["training"] = peak() - before
        if self.rank == 0:
            self.mailbox.consensus()
        self.end()
        self.report["in all"] = peak() - before


def start_vector(seed, size, dtype):
    return torch.randn(
        size, dtype=getattr(torch, dtype), generator=torch.Generator().manual_seed(seed)
    )


def enter(namespace):
    """Go into a network namespace; the threads that start later follow."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(namespace, os.O_RDONLY)
    if libc.setns(handle, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(scenario, rank, world, port, folder, options, ready):
    """The process: `ready` is a connection that says when the mailbox is up and when to go."""
    torch.set_num_threads(1)
    if "namespaces" in options:
        enter(options["namespaces"][rank])
        os.environ["MASTER_ADDR"] = options["master"]
    if scenario == "memory":
        # touched, so it counts from the start
        model = start_vector(0, options["size"], options["dtype"])
        options["baseline"] = peak()
        del model
    worker = Worker(rank, world, port, folder, options)
    ready.send("ready")
    ready.recv()
    getattr(worker, scenario)()
    worker.mailbox.close()
    np.savez(worker.folder / f"{rank}.npz", params=worker.params[0].numpy(), **worker.arrays)
    report = worker.report | {"events": worker.events}
    (worker.folder / f"{rank}.json").write_text(json.dumps(report, default=float))
