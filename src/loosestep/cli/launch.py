"""`loosestep launch`: one process per rank on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from loosestep.launch import Job, Rank, Result, command_for, describe, start

COLOURS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
)
Script = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT", help="A .py file or an executable, and its arguments."),
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a Python module.")]
Timeout = Annotated[
    float | None, typer.Option(min=0, help="End everything after so many seconds (exit code 124).")
]


def launch(
    script: Script,
    nodes: Annotated[int, typer.Option(help="How many nodes to pretend.")] = 1,
    ranks_per_node: Annotated[
        str, typer.Option(help="Processes a node: 2, or 3,2 for uneven nodes.")
    ] = "1",
    module: IsModule = False,
    timeout: Timeout = None,
) -> None:
    """Run SCRIPT once per rank on this machine, with torchrun's variables.

    Unlike torchrun, a rank that dies takes nobody with it. Options go before SCRIPT; what follows
    it is the script's.
    """
    try:
        command = command_for(script[0], script[1:], module=module)
        counts = parse_ranks(ranks_per_node)
        job = start(command, nodes=nodes, ranks_per_node=counts, output=Printer())
    except (ValueError, OSError) as error:
        refuse(error)
    with gentle_end(), job:
        raise typer.Exit(see_through(job, timeout))


def refuse(error: object) -> NoReturn:
    """One line to the user, exit code 2."""
    Console(stderr=True, highlight=False).print(
        f"[bold red]loosestep:[/] {escape(str(error))}", soft_wrap=True
    )
    raise typer.Exit(2)


def parse_ranks(text: str) -> int | list[int]:
    """`2` or `3,2`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"ranks per node must be a number (2) or one per node (3,2), got {text!r}"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


class Printer:
    """Prints lines behind the name of their rank, each in one write, in a colour of its own on a
    terminal.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)

    def __call__(self, rank: Rank, line: str) -> None:
        prefix = f"[{rank.place.label}]"
        if self._console.is_terminal and not self._console.no_color:
            style = self._console.get_style(COLOURS[rank.number % len(COLOURS)])
            prefix = style.render(prefix, color_system=self._console._color_system)
        sys.stdout.write(f"{prefix} {line}\n")
        sys.stdout.flush()


@contextmanager
def gentle_end() -> Iterator[None]:
    """SIGTERM and a closed terminal end us as Ctrl-C does: through the `with` blocks, which
    leave nothing behind.
    """

    def leave(number: int, _: FrameType | None) -> NoReturn:
        Console(stderr=True, highlight=False).print(
            f"loosestep: {signal.Signals(number).name}, ending the ranks"
        )
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, leave)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def see_through(job: Job, timeout: float | None) -> int:
    """Wait for the job, say how it ended, return the exit code."""
    console = Console(stderr=True, highlight=False)
    try:
        result = job.wait(timeout)
    except TimeoutError as error:
        job.stop()
        console.print(f"loosestep: {error}", markup=False)
        return 124
    console.print(closing_line(job, result), soft_wrap=True)
    return result.exit_code


def closing_line(job: Job, result: Result) -> str:
    """Who failed, and how."""
    count = len(result.returncodes)
    failed = [rank for rank in job.ranks if rank.returncode]
    if not failed:
        return (
            f"[green]loosestep:[/] {count} of {count} ranks ended well after {result.seconds:.1f} s"
        )
    fates = ", ".join(
        f"rank {rank.number} on node {rank.place.node}: {describe(rank.returncode or 0)}"
        for rank in failed
    )
    return (
        f"[bold red]loosestep:[/] {len(failed)} of {count} ranks failed ({fates}) in "
        f"{result.seconds:.1f} s"
    )
