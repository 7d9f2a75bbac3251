"""`loosestep lab`: a script on an emulated cluster."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from loosestep.cli.launch import (
    IsModule,
    Printer,
    Timeout,
    closing_line,
    gentle_end,
    parse_ranks,
    refuse,
)
from loosestep.lab import Fault, Lab, LabError, clean, grammar
from loosestep.launch import command_for

CLEAN = ["clean"]
Many = list[str] | None


def lab(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT",
            help="A .py file or an executable, and its arguments; or clean: remove leftovers.",
        ),
    ],
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    ranks_per_node: Annotated[
        str, typer.Option(help="Processes a node: 2, or 3,2 for uneven nodes.")
    ] = "1",
    bandwidth: Annotated[
        str | None, typer.Option(help="Of each node's link, both ways: 500mbit.")
    ] = None,
    link: Annotated[
        Many, typer.Option(help="Limit of a pair of nodes: 2-3=50mbit. Repeatable.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One way between two nodes: 20ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="Share of the packets that vanish: 1%.")] = None,
    flip: Annotated[
        str | None, typer.Option(help="Share of the packets damaged unseen by TCP: 0.1%.")
    ] = None,
    slow: Annotated[
        Many, typer.Option(help="A rank and how much slower it runs: 5:10x. Repeatable.")
    ] = None,
    kill: Annotated[Many, typer.Option(help="SIGKILL a rank: 3@20s. Repeatable.")] = None,
    stop: Annotated[
        Many, typer.Option(help="Stop a rank for a while: 2@10s:5s. Repeatable.")
    ] = None,
    partition: Annotated[
        Many, typer.Option(help="Cut nodes off for a while: 0,1/2,3@15s:10s. Repeatable.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="loosestep, or torchrun (ends a node when a rank dies).")
    ] = "loosestep",
    network: Annotated[
        bool, typer.Option(help="With network namespaces (needs Linux and root) or without.")
    ] = True,
    module: IsModule = False,
    timeout: Timeout = None,
    start_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="End everything if after so many seconds only some ranks are at the rendezvous.",
        ),
    ] = 600.0,
) -> None:
    """Run SCRIPT on an emulated cluster: nodes with links of limited rate, slow ranks, faults.

    Any torch.distributed script will do. Everything is removed at the end.

    Example: loosestep lab --nodes 4 --ranks-per-node 2 --bandwidth 500mbit --slow 5:10x -- train.py
    --epochs 3
    """
    if script == CLEAN:
        remove_leftovers()
        return
    with gentle_end():
        try:
            command = command_for(script[0], script[1:], module=module)
            faults: list[Fault] = [*map(grammar.kill, kill or []), *map(grammar.stop, stop or [])]
            faults += map(grammar.partition, partition or [])
            emulated = Lab(
                nodes,
                parse_ranks(ranks_per_node),
                bandwidth=bandwidth,
                links=grammar.links(link or []),
                delay=delay,
                loss=loss,
                flip=flip,
                slow=grammar.slow_ranks(slow or []),
                faults=faults,
                network=network,
                launcher=launcher,
            )
        except (ValueError, OSError, LabError) as error:
            refuse(error)
        with emulated:
            raise typer.Exit(watch(emulated, command, timeout, start_timeout))


def watch(emulated: Lab, command: list[str], timeout: float | None, start_timeout: float) -> int:
    """Run to the end, in good time or not, with the closing table; the exit code."""
    from loosestep.lab.report import closing_table

    console = Console(stderr=True, highlight=False)

    def announce(what: str) -> None:
        console.print(f"[bold yellow]\\[lab][/] {what}")

    with emulated.start(command, output=Printer(), announce=announce) as job:
        begun = time.monotonic()
        late = False
        try:
            emulated.wait_for_start(
                start_timeout if timeout is None else min(timeout, start_timeout)
            )
            job.wait(None if timeout is None else max(0.0, begun + timeout - time.monotonic()))
        except TimeoutError as error:
            console.print(f"loosestep: {error}", markup=False)
            late = True
            job.stop()
        result = job.wait()
        console.print(closing_table(emulated, result))
        console.print(closing_line(job, result), soft_wrap=True)
        return 124 if late else result.exit_code


def remove_leftovers() -> None:
    """`loosestep lab clean`."""
    console = Console(highlight=False)
    leftovers = clean()
    for leftover in leftovers:
        console.print(
            f"ended process {leftover.pid} of lab {leftover.owner}: {leftover.command}",
            markup=False,
        )
    console.print(f"{len(leftovers)} leftovers removed" if leftovers else "nothing left of any lab")
