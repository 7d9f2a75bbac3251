"""The demo's command: start the cluster, show the trainings, write the report."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loosestep.cli.launch import gentle_end, refuse
from loosestep.demo.diary import DDP, Outcome, spell
from loosestep.demo.report import write_report
from loosestep.demo.screen import Screen, closing_table
from loosestep.demo.worker import MARK
from loosestep.lab import Lab, LabError
from loosestep.lab.network import INTERFACE
from loosestep.launch import Rank
from loosestep.strategies import strategy

NODES, RANKS_PER_NODE = 2, 2
PATIENCE = 600.0


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every rank.")] = 140,
    bandwidth: Annotated[str, typer.Option(help="Of the link between the nodes.")] = "50mbit",
    daso: Annotated[str, typer.Option(help="The strategy beside DDP.")] = "daso:period=4,delay=3",
    width: Annotated[float, typer.Option(help="Multiplies the channels of the network.")] = 1.0,
    network: Annotated[bool, typer.Option(help="Emulate the link (Linux, root), or not.")] = True,
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("runs/demo/report.html"),
) -> None:
    """Train handwritten digits on two emulated nodes of two processes, with torch's DDP and with DASO."""
    console = Console(highlight=False)
    try:
        strategy(daso)
    except ValueError as error:
        refuse(error)
    with (
        gentle_end(),
        open_lab(console, bandwidth if network else None) as lab,
        tempfile.TemporaryDirectory() as folder,
    ):
        limited = lab.network is not None
        link = f"a link of {bandwidth} between them" if limited else "no limit between them"
        console.print(f"[bold]loosestep[/]: two nodes of two processes, {link}")
        console.print(f"A ResNet-20 learns handwritten digits with torch DDP, then with {spell(daso)}.")
        console.print("Starting four processes ...", style="dim")
        command = [sys.executable, "-m", "loosestep.demo.worker", folder, "--steps", str(steps), "--daso", daso]
        command += ["--width", str(width), "--interface", INTERFACE if limited else ""]
        watch(lab, command, console, strategies=[DDP, daso], steps=steps)
        outcomes = [Outcome.read(Path(folder), name, NODES * RANKS_PER_NODE) for name in (DDP, daso)]
    console.print(closing_table(outcomes))
    how = "counted on its link" if limited else "computed, for there is no link to count on"
    console.print(
        f"A gradient is one backward pass of one rank. Sent per node: {how}. Evaluations and the final average count, "
        "start-up does not. Four processes share this machine's cores: read the ratios.",
        style="dim",
    )
    write_report(report, outcomes, link=link)
    console.print(f"Report: [bold]{report.resolve()}[/]", soft_wrap=True)


@contextmanager
def open_lab(console: Console, bandwidth: str | None) -> Iterator[Lab]:
    """The emulated cluster, or the same processes without limited links where it cannot be made."""
    try:
        lab = Lab(NODES, RANKS_PER_NODE, bandwidth=bandwidth, network=bandwidth is not None)
    except ValueError as error:
        refuse(error)
    except LabError as error:
        console.print(f"[yellow]Links are not limited here[/], so DDP looks better than on a cluster: {error}")
        lab = Lab(NODES, RANKS_PER_NODE, network=False)
    with lab:
        yield lab


def watch(lab: Lab, command: list[str], console: Console, *, strategies: list[str], steps: int) -> None:
    """Run to the end with live progress; if a rank fails, its last words."""
    with Screen(console, strategies, steps=steps, ranks=NODES * RANKS_PER_NODE) as screen:

        def hear(_: Rank, line: str) -> None:
            if line.startswith(MARK):
                screen.show(json.loads(line.removeprefix(MARK)))

        with lab.start(command, output=hear) as job:
            result = job.wait(PATIENCE)
    if result.first_failure is not None:
        console.print("\n".join(job.ranks[result.first_failure].output[-20:]), markup=False)
        console.print(f"[red]Rank {result.first_failure} failed[/]: {result.returncodes}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
