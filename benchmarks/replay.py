"""Record and replay of free-running AD-PSGD: 8 real processes, one of them slow, one killed; and
what recording costs.

    python benchmarks/replay.py [--quick]

Every run is recorded on real processes, then replayed on virtual ranks in one process and, every
third one, on real processes. Identical means: the digest of every parameter and buffer after every
step of every rank, and at the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loosestep
from common import SIMULATED, Spread, machine, publish, table
from loosestep import launch
from loosestep.core.store import host_store
from loosestep.record.format import Recording, RecordKind
from loosestep.record.player import RecordingEnds
from loosestep.record.recorder import Recorder, digest_of

RANKS = 8
SLOW = 3
KILLED = 5
KILL_AT = 15
STEPS = 40
STRATEGY = "adpsgd:graph=random-ring,rate=2,slowdown=1.0"
PAUSE = 0.01
SLOWER = 10
SIZES = {"0.3 MB": (64, 256), "4 MB": (256, 768)}  # (inputs and outputs, width) of three layers

processes = multiprocessing.get_context("forkserver")
Say = Callable[..., None]


def make(inputs: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(inputs, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, inputs))


def train(
    rank: int,
    say: Say,
    *,
    record: Path | None,
    steps: int,
    size: str,
    kill: bool,
    hurry: bool,
    batch: int,
) -> None:
    """Autoencode noise; a line for every step. `hurry`: without the pauses that make ranks
    unequal.
    """
    model = make(*SIZES[size])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank)
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    with loosestep.attach(model, optimizer, STRATEGY, record=record or False):
        for step in range(steps):
            x = torch.randn(batch, SIZES[size][0])
            (model(x) - x).square().mean().backward()
            if kill and rank == KILLED and step == KILL_AT:
                threading.Timer(
                    random.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGKILL)
                ).start()
            if not hurry:
                time.sleep(PAUSE * (SLOWER if rank == SLOW else 1))
            optimizer.step()
            optimizer.zero_grad()
            say("step", digest_of(tensors))
    say("end", digest_of(tensors))


def work(
    variables: dict[str, str], path: Path, replay: Path | None, options: dict[str, Any]
) -> None:
    """One process."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    if replay is not None:
        os.environ["LOOSESTEP_REPLAY"] = str(replay)
    spent = measure_recording()
    with path.open("w", buffering=1) as lines:

        def say(*what: Any) -> None:
            lines.write(json.dumps(what) + "\n")

        began = time.process_time()
        try:
            train(int(variables["RANK"]), say, **options)
        except RecordingEnds:
            say("killed")
        say("cpu", time.process_time() - began, spent[0])


def measure_recording() -> list[float]:
    """From here on the CPU seconds that recording takes are added up."""
    spent = [0.0]
    busy = threading.local()

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if getattr(busy, "inside", False):
                return method(*arguments, **named)
            busy.inside = True
            begin = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                busy.inside = False
                spent[0] += time.thread_time() - begin

        return call

    for name in ("write", "step", "stepped", "number", "ended"):
        setattr(Recorder, name, timed(getattr(Recorder, name)))
    return spent


def run_all(
    folder: Path, kind: str, ranks: int, *, replay: Path | None = None, **options: Any
) -> list[list[Any]]:
    """All ranks as processes; what each wrote."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    store = host_store(listener)
    paths = [folder / f"{kind}-{rank}.jsonl" for rank in range(ranks)]
    started = [
        processes.Process(target=work, args=(variables, path, replay, options), daemon=True)
        for (_, variables), path in zip(
            launch.variables_of_ranks([1] * ranks, address, port), paths, strict=True
        )
    ]
    for process in started:
        process.start()
    for rank, process in enumerate(started):
        process.join(900)
        expected = -signal.SIGKILL if options["kill"] and rank == KILLED else 0
        if process.exitcode != expected:
            raise RuntimeError(f"{kind}: rank {rank} ended with {process.exitcode}")
    del store
    return [read(path) for path in paths]


def read(path: Path) -> list[Any]:
    """Whole lines; a kill may have cut the last one."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def on_virtual_ranks(recording: Path, **options: Any) -> list[list[Any]]:
    """The replay in this process."""
    os.environ["LOOSESTEP_REPLAY"] = str(recording)
    lines: list[list[Any]] = [[] for _ in range(RANKS)]

    def body(rank: int) -> None:
        try:
            train(rank, lambda *what: lines[rank].append(list(what)), **options)
        except RecordingEnds:
            lines[rank].append(["killed"])

    try:
        loosestep.simulate(body, ranks=RANKS)
    finally:
        del os.environ["LOOSESTEP_REPLAY"]
    return lines


def same_steps(original: list[list[Any]], replayed: list[list[Any]]) -> int | None:
    """How many steps of all ranks are the same in both, None if one is not; the killed rank may
    lack the last line.
    """
    compared = 0
    for rank, (first, second) in enumerate(zip(original, replayed, strict=True)):
        ours, theirs = (
            [line for line in lines if line[0] in ("step", "end")] for lines in (first, second)
        )
        if rank == KILLED:
            length = min(len(ours), len(theirs))
            if abs(len(ours) - len(theirs)) > 1 or second[
                -1 if second[-1][0] == "killed" else -2
            ] != ["killed"]:
                return None
            ours = ours[:length]
            theirs = theirs[:length]
        if ours != theirs:
            return None
        compared += sum(line[0] == "step" for line in ours)
    return compared


def replay_runs(count: int) -> str:
    """Record and replay `count` runs; a paragraph."""
    same = {"virtual ranks": [0, 0], "processes": [0, 0]}
    compared = []
    sizes = 0
    folds = 0
    made = 0
    options: dict[str, Any] = {"steps": STEPS, "size": "0.3 MB", "batch": 4}
    for number in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recording = Path(name) / "recording"
            original = run_all(
                folder, "original", RANKS, record=recording, kill=True, hurry=False, **options
            )
            again = {
                "virtual ranks": on_virtual_ranks(
                    recording, record=None, kill=False, hurry=True, **options
                )
            }
            if number % 3 == 0:
                again["processes"] = run_all(
                    folder,
                    "replay",
                    RANKS,
                    replay=recording,
                    record=None,
                    kill=False,
                    hurry=True,
                    **options,
                )
            for kind, lines in again.items():
                steps = same_steps(original, lines)
                same[kind][0] += steps is not None
                same[kind][1] += 1
                compared.append(steps or 0)
                print(
                    f"  run {number + 1}, {kind}: {steps or 'not identical'} steps identical",
                    flush=True,
                )
            for rank in range(RANKS):
                found = Recording.read(recording, rank)
                sizes += len(found.data) - found.start
                made += found.steps
                folds += sum(record.kind is RecordKind.FOLD for record in found.records())
    results = ", ".join(f"{good} of {tried} on {kind}" for kind, (good, tried) in same.items())
    return (
        f"{count} recorded runs of {RANKS} processes ({STRATEGY}, {STEPS} steps each, 0.3 MB "
        f"model, rank {SLOW} {SLOWER} times slower, rank {KILLED} killed with SIGKILL at a random "
        f"moment after step {KILL_AT}). Replays that were bit for bit identical after every step "
        f"of every rank and at the end: **{results}** ({min(compared)} to {max(compared)} steps "
        f"compared in each). A step takes {sizes / made:.0f} bytes of recording, with "
        f"{folds / made:.1f} folds of a chunk in it."
    )


def recording_cost(rounds: int) -> str:
    """The share of CPU time that recording takes; a table."""
    rows = []
    for size in SIZES:
        shares: list[float] = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as name:
                options = {"steps": 100, "size": size, "kill": False, "hurry": True, "batch": 32}
                lines = run_all(Path(name), "cost", 2, record=Path(name) / "recording", **options)
                shares += [100 * line[-1][2] / line[-1][1] for line in lines]
        step = 1000 * sum(line[-1][1] for line in lines) / 200
        rows.append([f"{size}, {step:.1f} ms CPU a step", Spread(tuple(shares)).text(".2f") + " %"])
        print(f"  {rows[-1]}", flush=True)
    return table(["model", "recording, of all CPU time of a rank"], rows)


def main() -> None:
    """`--quick`: fewer runs, nothing written."""
    quick = "--quick" in sys.argv
    where = machine()
    processes.set_forkserver_preload(["replay"])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    forkserver.ensure_running()
    torch.set_num_threads(1)
    costs = recording_cost(1 if quick else 2)
    runs = replay_runs(1 if quick else 10)
    text = f"## Record and replay of asynchronous runs\n\n{runs}\n\n{costs}\n\n{where}."
    publish("replay", text, quick=quick, path=SIMULATED)


if __name__ == "__main__":
    main()
