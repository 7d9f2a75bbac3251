"""`loosestep demo`: a first look. Speech on two emulated nodes, trained with three strategies
side by side.
"""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loosestep.cli.common import one_line_errors, prepare, settle
from loosestep.cli.compare import ComparedRuns
from loosestep.cli.launch import gentle_end, refuse
from loosestep.cli.screen import spell_quality
from loosestep.lab import Lab, LabError
from loosestep.report.outcome import Outcome
from loosestep.runfolder.config import Config
from loosestep.strategies import STRATEGIES
from loosestep.training.learning_rate_search import split_strategies

NODES = 2
RANKS_PER_NODE = 2
COMPARED = "allreduce,daso,adpsgd:graph=random-ring"
EXAMPLES = 3


def demo(
    bandwidth: Annotated[str, typer.Option(help="Of the link between the nodes.")] = "100mbit",
    network: Annotated[bool, typer.Option(help="Emulate the link (Linux, root), or not.")] = True,
    strategies: Annotated[
        str, typer.Option(help="What to compare, separated by commas.")
    ] = COMPARED,
    utterances: Annotated[
        int, typer.Option(min=8, help="How much speech to synthesise and learn from.")
    ] = 500,
    epochs: Annotated[float, typer.Option(min=0.1, help="How often to go through it.")] = 18.0,
    browser: Annotated[
        bool, typer.Option(help="Open the report where there is a browser, or not.")
    ] = True,
    runs: Annotated[Path, typer.Option(help="Where the runs and the report are put.")] = Path(
        "runs"
    ),
) -> None:
    """A first look: speech recognition on two emulated nodes, three strategies side by side, in
    some minutes.

    Needs no data: the speech is synthesised here. With data, recipes and settings of your own:
    loosestep compare.
    """
    console = Console(highlight=False)
    with one_line_errors(), gentle_end():
        config = Config(
            recipe="acoustic", nodes=NODES, ranks_per_node=str(RANKS_PER_NODE), epochs=epochs,
            bandwidth=link(console, bandwidth) if network else None,
            options={"preset": "tiny", "lr": 0.01, "utterances": utterances, "test_utterances": 60},
        )  # fmt: skip
        chosen = [config.but(strategy=text).strategy for text in split_strategies(strategies)]
        introduce(console, config, chosen)
        task = prepare(config, console)
        path = runs / f"demo-{time.strftime('%m%d-%H%M%S')}"
        comparison = ComparedRuns(settle(config, task), task, path, console, single=True)
        for strategy in chosen:
            comparison.train(strategy, seed=0, lr=None)
        explain(console, [outcome for outcome in comparison.outcomes if not outcome.diverged])
        comparison.conclude(None)
        if browser and open_page(comparison.page):
            console.print("Opened in your browser.", style="dim")


def link(console: Console, bandwidth: str) -> str | None:
    """The rate of the link, if it can be emulated here."""
    try:
        Lab(NODES, RANKS_PER_NODE, bandwidth=bandwidth).close()
    except ValueError as error:
        refuse(error)
    except LabError as error:
        console.print(
            "[yellow]The link is not slowed down here[/], so waiting looks cheaper than on a "
            f"cluster: {escape(str(error))}",
            soft_wrap=True,
        )
        return None
    return bandwidth


def introduce(console: Console, config: Config, strategies: Sequence[str]) -> None:
    """What is about to happen."""
    between = "" if config.bandwidth is None else f", {config.bandwidth} between the nodes"
    console.print(f"[bold]loosestep[/]: two emulated nodes of two processes{between}")
    console.print(
        "A recurrent network learns to write down spelled names, numbers and dates, each time "
        "from scratch:"
    )
    lines = Table.grid(padding=(0, 2))
    for strategy in strategies:
        name = strategy.partition(":")[0]
        lines.add_row(f"  [bold]{escape(name)}[/]", STRATEGIES.entries()[name].summary)
    console.print(lines)


def explain(console: Console, outcomes: Sequence[Outcome]) -> None:
    """How the word errors fell, what was recognised, and how to read the table that follows."""
    if not outcomes:
        return
    console.print("[bold]Word error rate on the way[/], on voices that were not in the training:")
    ways = Table.grid(padding=(0, 2))
    for outcome in outcomes:
        values = [point.value for point in outcome.quality_curve]
        shown = values[:: max(1, len(values) // 5)][:-1] + values[-1:]
        ways.add_row(f"  {name_of(outcome)}", " → ".join(map(spell_quality, shown)))
    console.print(ways)
    console.print("[bold]What the final models heard[/]:")
    heard = Table.grid(padding=(0, 2))
    for texts in examples(outcomes):
        heard.add_row("  [dim]said[/]", f"[dim]{escape(texts[0])}[/]")
        for outcome, text in zip(outcomes, texts[1:], strict=True):
            style = "green" if text == texts[0] else "default"
            heard.add_row(f"  {name_of(outcome)}", f"[{style}]{escape(text)}[/]")
    console.print(heard)
    console.print(
        "Below: word error rate, gradients (batches) per second of all processes, seconds until "
        "the error rate that all reached, share of the time spent waiting. Four processes share "
        "this machine's cores: read the ratios.",
        style="dim",
    )


def examples(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """For a few utterances: what was said, and what each final model wrote."""
    finals: list[list[dict[str, Any]]] = [
        outcome.final["examples"] for outcome in outcomes if outcome.final
    ]
    return [
        [same[0]["expected"], *(one["found"] for one in same)] for same in zip(*finals, strict=True)
    ][:EXAMPLES]


def name_of(outcome: Outcome) -> str:
    return outcome.strategy.partition(":")[0]


def open_page(page: Path) -> bool:
    """Show the page in a browser with a window; a browser in the terminal would take it over."""
    screenless = sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return not screenless and webbrowser.open(page.resolve().as_uri())
