"""A learner for replay tests, as a process of its own: trains, and writes a line with the digest of
every step.

Forked, see forks.py. `ranks(folder, ...)` records a run, or replays what is in the folder.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import torch
from forks import processes, start_server
from torch import nn

import loosestep
from loosestep import launch
from loosestep.core.errors import LostPeer
from loosestep.core.store import host_store
from loosestep.record.player import RecordingEnds


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(torch.dropout(torch.relu(self.norm(self.first(x))), 0.1, self.training))


def digest(model):
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())
    ).hexdigest()[:16]


def work(variables, folder, options, replay):
    os.environ.update(variables)
    torch.set_num_threads(1)
    rank = int(variables["RANK"])
    if replay:
        os.environ["LOOSESTEP_REPLAY"] = str(folder / "recording")
    with (folder / f"{'replay' if replay else 'original'}-{rank}.jsonl").open(
        "w", buffering=1
    ) as lines:

        def say(*what):
            lines.write(json.dumps(what) + "\n")

        try:
            train(rank, folder, options, replay, say)
        except RecordingEnds as error:
            say("ends", str(error))
        except LostPeer as error:
            say("lost", str(error))


def train(rank, folder, options, replay, say):
    torch.manual_seed(0)
    model = Net(options.get("width", 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.get("lr", 0.05), momentum=0.9)
    torch.manual_seed(rank)
    record = False if replay else folder / "recording"
    with loosestep.attach(
        model, optimizer, options["strategy"], deadline=options.get("deadline", 30), record=record
    ) as run:
        for step in range(options["steps"]):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            if not replay:  # how long a step takes must not matter
                if step == options.get("kill", {}).get(rank):
                    threading.Timer(
                        random.uniform(0, 0.02), lambda: os.kill(os.getpid(), signal.SIGKILL)
                    ).start()
                time.sleep(options.get("pause", 0.004) * options.get("slow", {}).get(rank, 1))
            optimizer.step()
            say("step", digest(model), run.global_steps, run.recorded(time.time))
            if step == 10 and rank == 0 and options.get("look", True):
                with run.consensus():
                    say("mean", digest(model))
    say("end", digest(model), run.stats.get("lost", []))


def ranks(folder: Path, *, replay: bool, nodes: int, ranks_per_node: int = 1, **options):
    """Run all ranks to their end; the lines of each, in rank order."""
    start_server()
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    store = host_store(listener)
    everybody = [
        variables
        for _, variables in launch.variables_of_ranks([ranks_per_node] * nodes, address, port)
    ]
    started = [
        processes.Process(target=work, args=(variables, folder, options, replay), daemon=True)
        for variables in everybody
    ]
    try:
        for process in started:
            process.start()
        for rank, process in enumerate(started):
            process.join(150)
            expected = -signal.SIGKILL if rank in options.get("kill", {}) and not replay else 0
            assert process.exitcode in (0, expected), f"rank {rank} ended with {process.exitcode}"
    finally:
        for process in started:
            process.kill()
            process.join()
        del store
    kind = "replay" if replay else "original"
    return [read(folder / f"{kind}-{rank}.jsonl") for rank in range(len(started))]


def read(path):
    lines = path.read_text().splitlines()
    with contextlib.suppress(ValueError):
        json.loads(lines[-1])
        return [json.loads(line) for line in lines]
    return [json.loads(line) for line in lines[:-1]]  # a kill may have cut the last one
