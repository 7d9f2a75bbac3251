"""What the demo shows while it runs, and the table at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loosestep.demo.diary import Outcome, short_name

HEADERS = ("time", "gradients/s", "speed-up", "accuracy", "sent/node", "waiting/rank")
PLAIN_LINES = 10  # per strategy, where there is no terminal


class Screen:
    """One line per strategy: bars on a terminal, plain lines elsewhere. Use it as a context manager."""

    def __init__(self, console: Console, strategies: Sequence[str], *, steps: int, ranks: int) -> None:
        self._console, self._steps, self._ranks = console, steps, ranks
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=max(7, min(30, console.width - 72))),
            TextColumn("{task.fields[speed]}", justify="right"),
            TextColumn("{task.fields[quality]}"),
            TextColumn("{task.fields[waiting]}", justify="right"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        blank: dict[str, Any] = {"speed": "", "quality": "", "waiting": ""}
        self._width = max(len(short_name(name)) for name in strategies)
        self._tasks = {
            name: self._progress.add_task(short_name(name), total=steps, start=False, **blank) for name in strategies
        }

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, news: Mapping[str, Any]) -> None:
        """A message of the first rank: a training begins, a step is made, a training ends."""
        task = self._tasks[news["strategy"]]
        if news["kind"] == "begin":
            self._progress.start_task(task)
        elif news["kind"] == "step":
            fields = describe(news, self._ranks)
            self._progress.update(task, completed=news["step"], **fields)
            if not self._console.is_terminal and news["step"] % max(1, self._steps // PLAIN_LINES) == 0:
                left = news["seconds"] / news["step"] * (self._steps - news["step"])
                words = "  ".join(fields.values())
                self._console.print(
                    f"{short_name(news['strategy']):{self._width}}  step {news['step']}/{self._steps}  {words}  {left:.0f} s left",
                    soft_wrap=True,
                )


def describe(news: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Speed, quality and waiting in words."""
    seconds = max(news["seconds"], 1e-9)
    accuracy = "" if news["accuracy"] is None else f" accuracy {news['accuracy']:.1%}"
    return {
        "speed": f"{news['step'] * ranks / seconds:4.0f} gradients/s",
        "quality": f"loss {news['loss']:.3f}{accuracy}",
        "waiting": f"waiting {news['waited'] / seconds:3.0%}",
    }


def closing_table(outcomes: Sequence[Outcome]) -> Table:
    """Speed, accuracy, traffic and waiting, beside DDP's."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", style="bold")
    for name in HEADERS:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.name, *figures(outcome, beside=outcomes[0]))
    return table


def figures(outcome: Outcome, *, beside: Outcome) -> list[str]:
    """One row of the table."""
    return [
        f"{outcome.seconds:.1f} s",
        f"{outcome.speed:.0f}",
        f"{outcome.speed / beside.speed:.1f}x",
        f"{outcome.accuracy:.1%}",
        f"{outcome.megabytes_per_node:.0f} MB",
        f"{outcome.waited:.1f} s, {outcome.waited / outcome.seconds:.0%}",
    ]
