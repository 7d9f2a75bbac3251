"""`loosestep report`: a page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from loosestep.cli.common import one_line_errors, summary
from loosestep.report.outcome import Outcome
from loosestep.report.page import write_report
from loosestep.runfolder.config import TrainingError
from loosestep.runfolder.folder import RunFolder


def report(
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; several are laid over each other."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write the page (RUN/report.html)."),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="The quality whose time is told (what all runs reached).")
    ] = None,
) -> None:
    """Write one self-contained HTML page about one run, or several side by side; also for runs that
    still go on.

    A single run also gets RUN/timeline.json, for ui.perfetto.dev or chrome://tracing.

    Example: loosestep report runs/first runs/second --output both.html
    """
    console = Console(highlight=False)
    with one_line_errors():
        outcomes = [Outcome.read(RunFolder.open(path)) for path in expand(run)]
        recipes = {outcome.quality_name for outcome in outcomes}
        if len(recipes) > 1:
            raise TrainingError(
                f"these runs are judged by different numbers ({', '.join(sorted(recipes))}); give "
                "runs of one recipe"
            )
        single = outcomes[0].folder if len(outcomes) == 1 else None
        page = output or (single.report_file if single else Path("report.html"))
        write_report(
            outcomes, page, target=target, timeline=single.timeline_file if single else None
        )
        for outcome in outcomes:
            console.print(f"{escape(outcome.name)}: {summary(outcome)}", soft_wrap=True)
        console.print(
            f"Report: [bold]{escape(str(page))}[/] ({page.stat().st_size / 1e6:.1f} MB)",
            soft_wrap=True,
        )


def expand(paths: list[Path]) -> list[Path]:
    """A folder of runs, such as a comparison's, stands for the runs in it."""
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted(child.parent for child in path.glob("*/config.toml")) if path.is_dir() else []
        )
        found += inside if inside and not (path / "config.toml").is_file() else [path]
    return found
