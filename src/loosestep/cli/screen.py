"""What the terminal shows of a run: a bar, a line for each node, or plain lines where there is
no terminal.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from loosestep.launch import Rank

PLAIN_PAUSE = 10.0  # seconds between plain lines
# seconds after which a rank that says nothing, while others do, is no longer counted
SILENCE = 15.0


class Screen:
    """Shows the messages of a run's ranks. Use it as a context manager."""

    def __init__(self, console: Console, title: str, *, transient: bool = False) -> None:
        self._console = console
        self._title = title
        self._transient = transient
        self._live: Live | None = None
        self._spinner = Spinner("dots", f"[bold]{escape(title)}[/]  starting the processes")
        self._ranks: dict[int, dict[str, Any]] = {}
        self._run: dict[str, Any] = {}
        self._quality: float | None = None
        self._began = time.monotonic()
        self._gradients_before = 0
        self._printed = 0.0

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._picture,
                refresh_per_second=4,
                transient=self._transient,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, message: dict[str, Any]) -> None:
        """A message of a rank."""
        kind = message["kind"]
        if kind == "begin":
            self._run = message
            self._began = self._printed = time.monotonic()
            self._gradients_before = message["gradients"]
        elif kind == "progress":
            self._ranks[message["rank"]] = {**message, "at": time.monotonic()}
        elif kind in ("evaluation", "final"):
            self._quality = message["metrics"][self._run["quality"]["name"]]
        elif kind == "warning":
            self._console.print(f"[yellow]loosestep:[/] {escape(message['text'])}", soft_wrap=True)
        now = time.monotonic()
        if (
            self._live is None
            and self.gradients > self._gradients_before
            and self._run
            and (kind == "evaluation" or now - self._printed > PLAIN_PAUSE)
        ):
            self._printed = now
            self._console.print(self._plain(), soft_wrap=True)

    def print_line(self, rank: Rank, line: str) -> None:
        """Something a rank wrote by itself."""
        if line.strip():
            self._console.print(f"[dim]\\[{rank.place.label}][/] {escape(line)}", soft_wrap=True)

    @property
    def gradients(self) -> int:
        return max((m["gradients"] for m in self._ranks.values()), default=self._gradients_before)

    def _left(self) -> str:
        done = self.gradients - self._gradients_before
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._run["total"] - self.gradients)
        return spell_time(max(0.0, seconds)) + " left"

    def _plain(self) -> str:
        nodes = self._nodes()
        loss = _mean([node["loss"] for node in nodes.values()])
        speed = sum(node["speed"] for node in nodes.values())
        waiting = sum(node["waiting"] for node in nodes.values()) / len(nodes)
        parts = [
            f"{escape(self._title)}  {self.gradients}/{self._run['total']} gradients",
            self._spell_quality(),
        ]
        parts += [
            f"loss {loss:.3f}",
            f"{speed:.0f} gradients/s",
            f"waiting {waiting:.0%}",
            self._left(),
        ]
        return "  ".join(part for part in parts if part)

    def _nodes(self) -> dict[int, dict[str, float]]:
        ranks_of = defaultdict(list)
        latest = max((message["at"] for message in self._ranks.values()), default=0.0)
        for message in self._ranks.values():
            if latest - message["at"] < SILENCE:
                ranks_of[message["node"]].append(message)
        return {
            node: {
                "loss": _mean([m["loss"] for m in ranks]),
                "speed": sum(m["speed"] for m in ranks),
                "waiting": sum(m["waiting"] for m in ranks) / len(ranks),
            }
            for node, ranks in sorted(ranks_of.items())
        }

    def _spell_quality(self) -> str:
        if self._quality is None:
            return ""
        return f"{self._run['quality']['name']} {spell_quality(self._quality)}"

    def _picture(self) -> RenderableType:
        if not self._run:
            return self._spinner
        total = self._run["total"]
        head = Table.grid(padding=(0, 2))
        counted = f"{min(self.gradients, total)}/{total} gradients"
        bar = ProgressBar(total=total, completed=min(self.gradients, total), width=20)
        head.add_row(
            f"[bold]{escape(self._title)}[/]",
            bar,
            counted,
            f"[bold]{self._spell_quality()}[/]",
            self._left(),
        )
        lines = Table.grid(padding=(0, 2))
        for node, figures in self._nodes().items():
            waiting = f"waiting {figures['waiting']:4.0%}"
            loss = f"loss {figures['loss']:.3f}"
            lines.add_row(f"  node {node}", loss, f"{figures['speed']:5.1f} gradients/s", waiting)
        return Group(head, lines)


def spell_quality(value: float) -> str:
    """93.1 % for .931; numbers that are no shares as they are."""
    return f"{100 * value:.1f} %" if 0 <= value <= 2 else f"{value:.3g}"


def spell_time(seconds: float) -> str:
    """75 s, 12 min, 3.4 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _mean(losses: list[float]) -> float:
    """Of those that are known: a rank that has just begun has none."""
    known = [loss for loss in losses if math.isfinite(loss)]
    return sum(known) / len(known) if known else math.nan
