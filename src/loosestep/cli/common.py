"""What train, compare and resume have in common: check everything once, make the folder, run the
ranks, say how it went.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

import loosestep
from loosestep.cli.launch import refuse
from loosestep.cli.options import NOT_SETTINGS
from loosestep.cli.screen import Screen, spell_quality, spell_time
from loosestep.core.world import open_world
from loosestep.recipes import RecipeError, Task, find_recipe
from loosestep.report.outcome import Outcome
from loosestep.report.page import write_report
from loosestep.runfolder.checkpoint import CheckpointError
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder
from loosestep.topology.launchers import Launch, detect_launch
from loosestep.training.loop import budget
from loosestep.training.rank import guarded, own_device
from loosestep.training.watch import RunResult, watch


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Mistakes of the user and problems of files are one line and exit code 2, never a
    traceback.
    """
    try:
        yield
    except (TrainingError, RecipeError, CheckpointError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or 'a file'}: {error.strerror or error}")


def given_ranks() -> Launch | None:
    """What an outer launcher (torchrun, Slurm, Open MPI, loosestep launch or lab) said about
    this process.
    """
    launch = detect_launch()
    return None if launch.launcher == "none" else launch


def prepare(config: Config, console: Console) -> Task[Any]:
    """Build the task once, so that every mistake shows before a rank starts and everything that
    is cached is there.
    """
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what)
                if not console.is_terminal:
                    console.print(f"{what}: {total} ...", markup=False)
            progress.update(bars[what], completed=done, total=total)

        recipe = find_recipe(config.recipe)
        device = own_device(config.device, 0)
        return recipe.build(
            config.options, data=config.data_folder, seed=config.seed, device=device, progress=show
        )


def settle(config: Config, task: Task[Any]) -> Config:
    """The configuration as it is written: budget decided, paths absolute, the environment noted."""
    recipe = config.recipe
    if ":" in recipe:
        file, _, function = recipe.rpartition(":")
        recipe = f"{Path(file).resolve()}:{function}"
    data = None if config.data is None else str(Path(config.data).resolve())
    return config.but(
        recipe=recipe,
        data=data,
        gradients=budget(config, task),
        epochs=None,
        environment=environment(),
        command=config.command or shlex.join(["loosestep", *sys.argv[1:]]),
    )


def environment() -> dict[str, Any]:
    """Where and with what a run was made."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "loosestep": loosestep.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
        "gpus": ", ".join(gpus) or "none",
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def new_folder(path: Path, config: Config) -> RunFolder:
    """Make the folder of a new run; one that is in use is refused."""
    if (path / "config.toml").exists():
        raise TrainingError(
            f"{path} holds a run already; continue it with: loosestep resume {path}, or give "
            "another --name"
        )
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    config.write(folder.config_file)
    return folder


def require_same(folder: RunFolder, config: Config) -> None:
    """A run that is there already is continued only as it was begun."""
    before = folder.config()
    differ = [
        f"{name} is {_given(old)} there and {_given(new)} now"
        for name in (
            field.name for field in dataclasses.fields(Config) if field.name not in NOT_SETTINGS
        )
        if (old := getattr(before, name)) != (new := getattr(config, name))
    ]
    if differ:
        raise TrainingError(
            f"{folder.path} is a run with other settings: {'; '.join(differ)}; give the same, or "
            "another --name"
        )


def _given(value: object) -> object:
    return "not given" if value is None else value


def run_folder(
    folder: RunFolder, console: Console, title: str, *, transient: bool = False, advice: str = ""
) -> RunResult:
    """All ranks of a run, to the end; `transient`: the picture goes when it is over. `advice`:
    how to continue it.
    """
    try:
        with Screen(console, title, transient=transient) as screen:
            return watch(folder, show=screen.show, print_line=screen.print_line)
    except SystemExit:  # Ctrl-C, SIGTERM or a closed terminal
        advice = advice or f"continue with: loosestep resume {folder.path}"
        console.print(f"[yellow]loosestep:[/] interrupted; {escape(advice)}", soft_wrap=True)
        raise


def conclude(folder: RunFolder, ending: RunResult, console: Console) -> None:
    """Write the report and say how the run ended; exit if it did not."""
    if not ending.complete:
        if report_so_far(folder):
            console.print(f"Report: [bold]{escape(str(folder.report_file))}[/]", soft_wrap=True)
        saved = any((folder.path / "checkpoint").glob("generation-*/*"))
        advice = (
            f"; continue it with: loosestep resume {folder.path}"
            if saved and not ending.diverged
            else ""
        )
        Console(stderr=True, highlight=False).print(
            f"[bold red]loosestep:[/] {escape(ending.problem + advice)}", soft_wrap=True
        )
        raise typer.Exit(1)
    if ending.problem:
        console.print(
            f"[yellow]loosestep:[/] {escape(ending.problem)}; the others went on without it",
            soft_wrap=True,
        )
    console.print(summary(report_of(folder)), soft_wrap=True)
    console.print(f"Report: [bold]{escape(str(folder.report_file))}[/]", soft_wrap=True)


def report_of(folder: RunFolder) -> Outcome:
    """What the run came to, and a page about it in its folder."""
    outcome = Outcome.read(folder)
    write_report([outcome], folder.report_file, timeline=folder.timeline_file)
    return outcome


def report_so_far(folder: RunFolder) -> bool:
    """The page about a run that failed; whether there was anything to tell, and a disk to tell
    it on.
    """
    with contextlib.suppress(TrainingError):  # the user hears of what went wrong first
        report_of(folder)
        return True
    return False


def summary(outcome: Outcome) -> str:
    """The result in one line."""
    quality = (
        ""
        if outcome.quality is None
        else f"{outcome.quality_name} [bold]{spell_quality(outcome.quality)}[/]  "
    )
    result = "[bold]diverged[/]  " if outcome.diverged else quality
    return (
        f"{result}{outcome.gradients} gradients in {spell_time(outcome.seconds)}, "
        f"{outcome.speed:.0f} per second, waiting {outcome.waiting:.0%}"
    )


@contextmanager
def met(deadline: float) -> Iterator[dict[str, Any]]:
    """Nodes and ranks as an outer launcher has laid them out, found by meeting the others; what
    begins inside uses the same connections.
    """
    try:
        world = open_world(None, deadline=deadline)
    except (ValueError, RuntimeError, OSError) as error:
        raise TrainingError(str(error)) from error
    try:
        sizes = [str(len(node)) for node in world.topology.nodes]
        same = len(set(sizes)) == 1
        yield {"nodes": len(sizes), "ranks_per_node": sizes[0] if same else ",".join(sizes)}
    finally:
        world.close()


def train_as_given(config: Config, folder: RunFolder, launch: Launch, console: Console) -> None:
    """Under an outer launcher this process is a rank: rank 0 shows plain lines and writes the
    report.

    A run that is there already is continued: so a launcher that restarts its ranks needs to know
    nothing. Settings that it was not begun with are refused.
    """
    if folder.config_file.exists():
        before = folder.config()
        if before.counts() != config.counts():
            raise TrainingError(
                f"{folder.path} was run by {before.counts()} ranks on its nodes, now they are "
                f"{config.counts()}; first run: loosestep resume {folder.path} --nodes "
                f"{config.nodes} --ranks-per-node {config.ranks_per_node} --no-start"
            )
        require_same(folder, config.but(nodes=before.nodes, ranks_per_node=before.ranks_per_node))
        config = before
    elif launch.rank == 0:
        new_folder(folder.path, config)
    folder.path.mkdir(parents=True, exist_ok=True)
    screen = Screen(console, f"{config.recipe}  {config.strategy}")

    def tell(message: dict[str, Any]) -> None:
        if message["kind"] == "error":
            Console(stderr=True).print(
                f"loosestep: rank {launch.rank}: {message['text']}", markup=False, soft_wrap=True
            )
        elif launch.rank == 0:
            screen.show(message)

    code = guarded(folder, config, tell)
    if code == 0 and launch.rank == 0:
        folder.merge_traces()
        conclude(folder, RunResult(complete=True), console)
    elif launch.rank == 0:
        report_so_far(folder)
    raise typer.Exit(code)
