"""Kill -9 a whole run at random moments, resume it each time, and compare with the run that nobody
disturbed.

    python benchmarks/resume.py --kills 20 --gradients 400 --seed 1 > benchmarks/RESUME.md

For each strategy one run is trained in peace. Another one, equal in everything, is killed again and
again: while it starts, trains or writes a checkpoint, wherever it happens to be. A table tells what
each kill cost; at the end the final models must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from loosestep.runfolder import checkpoint
from loosestep.runfolder.folder import RunFolder
from loosestep.training.start import find_start

LOOSESTEP = [sys.executable, "-c", "from loosestep.cli import main; main()"]
STRATEGIES = ("daso:period=4,delay=2", "localsgd:period=8")


@dataclass
class Settings:
    """What every run has in common."""

    gradients: int
    every: int

    def train(self, strategy: str, path: Path) -> list[str]:
        options = [
            "--nodes",
            "2",
            "--strategy",
            strategy,
            "--gradients",
            str(self.gradients),
            "--set",
            "width=0.25",
        ]
        every = [
            "--checkpoint-every",
            str(self.every),
            "--runs",
            str(path.parent),
            "--name",
            path.name,
        ]
        return ["train", "vision", *options, *every]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="in all, shared by the strategies")
    parser.add_argument("--gradients", type=int, default=600)
    parser.add_argument("--every", type=int, default=20, help="gradients between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    settings = Settings(given.gradients, given.every)
    draw = random.Random(given.seed)
    print("# Kill -9 at a random moment, and resume\n")
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )
    print(
        f"vision, 2 nodes, {given.gradients} gradients, a checkpoint every {given.every}, seed "
        f"{given.seed}\n"
    )
    print("| strategy | kill | moment | gradients made | resumed at | lost |")
    print("|---|---|---|---|---|---|")
    equal = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, strategy in enumerate(STRATEGIES):
            kills = given.kills // len(STRATEGIES) + (i < given.kills % len(STRATEGIES))
            equal[strategy] = disturb(strategy, kills, settings, Path(folder) / str(i), draw)
    print(
        "\nLost: gradients since the newest checkpoint that every rank had completed; a kill may "
        "find the next one half written.\n"
    )
    for strategy, same in equal.items():
        print(
            f"{strategy}: the final model is "
            f"{'bit for bit the undisturbed one' if same else 'DIFFERENT'}"
        )
    sys.exit(0 if all(equal.values()) else 1)


def disturb(
    strategy: str, kills: int, settings: Settings, folder: Path, draw: random.Random
) -> bool:
    """Whether `kills` kills leave the result as it is."""
    undisturbed = folder / "undisturbed"
    run(settings.train(strategy, undisturbed))
    reference = final_model(undisturbed)
    done = 0
    same = True
    number = 0
    while done < kills:
        number += 1  # a run that was complete before all kills were made is followed by another
        path = folder / f"killed-{number}"
        command = settings.train(strategy, path)
        while done < kills and (moment := run(command, kill_after=draw)) is not None:
            done += 1
            made, saved = progress(path)
            print(
                f"| {strategy} | {done} | {moment} | {made} | {saved} | {made - saved} |",
                flush=True,
            )
            if (path / "config.toml").exists():
                command = ["resume", str(path)]
        if not (path / "checkpoint" / "final").exists():
            run(command)
        found = final_model(path)
        same &= found.keys() == reference.keys() and all(
            torch.equal(found[k], reference[k]) for k in found
        )
    return same


def run(arguments: list[str], kill_after: random.Random | None = None) -> str | None:
    """Run a command to its end, or kill everything at a random moment; which one that was, None
    if the end came first.
    """
    path = Path(arguments[-1]) if arguments[0] == "resume" else Path(arguments[-3]) / arguments[-1]
    before = last_written(path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*LOOSESTEP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    ) as process:
        if kill_after is None:
            output, _ = process.communicate()
            if process.returncode != 0:
                raise SystemExit(output.decode())
            return None
        starting = kill_after.random() < 0.3
        limit = time.monotonic() + kill_after.uniform(0.5, 5.0)
        while process.poll() is None and (
            time.monotonic() < limit if starting else last_written(path) == before
        ):
            time.sleep(0.01)
        moment = "starting"
        if not starting:
            seconds = kill_after.uniform(0.0, 2.0)
            begun = time.monotonic()
            while process.poll() is None and time.monotonic() - begun < seconds:
                time.sleep(0.001)
            moment = f"training, {seconds:.2f} s"
        ended = process.poll() is not None
        process.send_signal(signal.SIGKILL)  # its ranks die with it
        process.communicate()
        return None if ended else moment


def last_written(path: Path) -> int:
    """Changes when rank 0 begins to train."""
    file = RunFolder(path).trace_of(0)
    return file.stat().st_mtime_ns if file.is_file() else 0


def progress(path: Path) -> tuple[int, int]:
    """Gradients made when the kill came, and those of the newest checkpoints that are whole on
    every rank.
    """
    folder = RunFolder(path)
    made = max((line["gradients"] for line in folder.metrics()), default=0)
    start = find_start(folder, folder.config(), 0, print) if folder.config_file.is_file() else None
    return made, 0 if start is None else start.gradients


def final_model(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(RunFolder(path).final_model)["model"]  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
