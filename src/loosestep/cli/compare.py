"""`loosestep compare`: the same recipe and budget with several strategies and seeds, one table,
one report.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loosestep.cli import completion
from loosestep.cli import options as asked
from loosestep.cli.common import (
    given_ranks,
    new_folder,
    one_line_errors,
    prepare,
    report_of,
    report_so_far,
    require_same,
    run_folder,
    settle,
    summary,
)
from loosestep.cli.launch import gentle_end
from loosestep.cli.screen import spell_quality
from loosestep.recipes import Task
from loosestep.report.outcome import Outcome
from loosestep.report.page import columns, common_target, rows, write_report
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder
from loosestep.training.learning_rate_search import search, split_strategies
from loosestep.training.loop import starting_lr
from loosestep.training.watch import check_lab

# a terminal has 80 columns
SHORTER = {
    "gradients/s": "grad/s",
    "MB/gradient": "MB/grad",
    "exchanges/step": "exch",
    "staleness": "stale",
}
SHORT = 4  # a trial of the learning-rate search has this fraction of the budget


def compare(
    recipe: asked.RecipeName,
    strategies: Annotated[
        str,
        typer.Option(
            help="Of those below, separated by commas. (allreduce, daso, "
            "adpsgd:graph=random-ring, delay-by-one)",
            show_default=False,
            autocompletion=completion.strategies,
        ),
    ] = "allreduce,daso,adpsgd:graph=random-ring,delay-by-one",
    seeds: Annotated[
        int, typer.Option(min=1, metavar="<int>", help="How many seeds, from --seed on.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    lr_search: Annotated[
        bool,
        typer.Option(
            "--lr-search",
            help="First find each strategy's best learning rate, on one seed and a quarter.",
        ),
    ] = False,
    target: Annotated[
        float | None, typer.Option(help="The quality whose time is told (what all runs reached).")
    ] = None,
    nodes: asked.Nodes = None,
    ranks_per_node: asked.RanksPerNode = None,
    data: asked.Data = None,
    gradients: asked.Gradients = None,
    epochs: asked.Epochs = None,
    batch: asked.Batch = None,
    lr: asked.Lr = None,
    device: asked.Device = None,
    bandwidth: asked.Bandwidth = None,
    settings: asked.Settings = None,
    config: asked.ConfigFile = None,
    evaluate_every: asked.EvaluateEvery = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the folder; one that is there is continued (recipe-compare-time)."),
    ] = None,
    runs: asked.Runs = Path("runs"),
    options: asked.ListOptions = False,
) -> None:
    """Train RECIPE with every strategy and seed, at the same budget of gradients; print a table,
    write a report.

    Strategies are trained in turn, seed by seed. Without --lr every strategy gets
    the recipe's learning rate, fitted to it by rule; with --lr-search the best of
    a short search.

    Example: loosestep compare vision --strategies allreduce,daso:period=8,adpsgd
    --seeds 3 --nodes 2 --ranks-per-node 2
    """
    console = Console(highlight=False)
    with one_line_errors(), gentle_end():
        if given_ranks() is not None:
            raise TrainingError(
                "compare starts its own processes; run it outside of torchrun, srun or loosestep "
                "launch"
            )
        given: dict[str, Any] = {
            "recipe": recipe,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "data": None if data is None else str(data),
            "gradients": gradients,
            "epochs": epochs,
            "lr": lr,
            "seed": seed,
            "device": device,
            "bandwidth": bandwidth,
            "evaluate_every": evaluate_every,
        }
        base = asked.gather(given, config, settings or [], batch)
        if options:
            asked.show_options(base, console)
            return
        chosen = [str(base.but(strategy=text).strategy) for text in split_strategies(strategies)]
        if len(set(chosen)) < max(1, len(chosen)) or not chosen:
            raise TrainingError(f"--strategies must name different strategies, got {strategies!r}")
        check_lab(base)  # a run that cannot start here takes no name
        task = prepare(base, console)
        path = runs / (name or f"{asked.short(recipe)}-compare-{time.strftime('%m%d-%H%M%S')}")
        advice = f"the same command with --name {path.name} goes on from there"
        comparison = ComparedRuns(
            settle(base, task), task, path, console, single=seeds == 1, advice=advice
        )
        rates = {text: comparison.find_rate(text) for text in chosen} if lr_search else {}
        for number in range(seeds):
            for text in chosen:
                comparison.train(text, seed=seed + number, lr=rates.get(text, base.lr))
        comparison.conclude(target)


@dataclass
class ComparedRuns:
    """The runs of a comparison, each in a folder of its own under `path`."""

    config: Config
    task: Task[Any]
    path: Path
    console: Console
    single: bool = False
    """One seed only: it need not be named."""
    advice: str = ""
    """How to continue after a failure."""
    outcomes: list[Outcome] = field(default_factory=list)

    def find_rate(self, strategy: str) -> float:
        """The best rate of a short search on the first seed."""
        config = self.config.but(
            strategy=strategy, gradients=max(1, (self.config.gradients or 1) // SHORT)
        )
        higher = self.task.quality.better == "higher"

        def score(lr: float) -> float | None:
            outcome = self.run(
                config.but(lr=lr), f"search/{slug(strategy)}-lr{lr:.3g}", f"{strategy} lr {lr:.3g}"
            )
            value = None if outcome.diverged else outcome.quality
            self.say(
                f"{strategy}  lr {lr:.3g}: "
                + ("diverged" if value is None else spell_quality(value))
            )
            return value

        guess = starting_lr(config, self.task, config.counts())
        best, tried = search(score, guess, higher_is_better=higher)
        self.console.print(f"[bold]{escape(strategy)}[/]: learning rate {best:.3g}", soft_wrap=True)
        lines = {
            "strategy": strategy,
            "best": best,
            "gradients": config.gradients,
            "tried": list(tried.items()),
        }
        with (self.path / "search.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(lines) + "\n")
        return best

    def train(self, strategy: str, *, seed: int, lr: float | None) -> None:
        """One run of the comparison."""
        title = strategy if self.single else f"{strategy}, seed {seed}"
        config = self.config.but(strategy=strategy, seed=seed, lr=lr)
        outcome = self.run(config, f"{slug(strategy)}-seed{seed}", title)
        self.outcomes.append(outcome)
        if outcome.diverged:
            self.say(f"{title}: diverged; a lower --lr or --lr-search may help")
        else:
            self.console.print(f"{escape(title)}: {summary(outcome)}", soft_wrap=True)

    def run(self, config: Config, name: str, title: str) -> Outcome:
        """A run to its end, or what it was if it is there already; one that diverged is not
        tried again.
        """
        path = self.path / name
        folder = RunFolder(path) if (path / "config.toml").is_file() else new_folder(path, config)
        require_same(folder, config)
        if folder.complete or folder.diverged:
            return Outcome.read(folder) if folder.report_file.is_file() else report_of(folder)
        ending = run_folder(folder, self.console, title, transient=True, advice=self.advice)
        if not ending.complete and not ending.diverged:
            report_so_far(folder)
            raise TrainingError("; ".join(filter(None, (f"{path}: {ending.problem}", self.advice))))
        return report_of(folder)

    def conclude(self, target: float | None) -> None:
        """The table and the report."""
        target = common_target(self.outcomes) if target is None else target
        wide = self.console if self.console.is_terminal else Console(width=160, highlight=False)
        wide.print(table(self.outcomes, target))
        write_report(self.outcomes, self.page, target=target)
        self.console.print(f"Report: [bold]{escape(str(self.page))}[/]", soft_wrap=True)
        if all(outcome.diverged for outcome in self.outcomes):
            raise TrainingError("every run diverged; try a lower --lr, or --lr-search")

    @property
    def page(self) -> Path:
        """The report."""
        return self.path / "report.html"

    def say(self, text: str) -> None:
        self.console.print(escape(text), style="dim", soft_wrap=True)


def table(outcomes: Sequence[Outcome], target: float | None) -> Table:
    """One row per strategy."""
    told = [column for column in columns(outcomes, target) if column.brief]
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    drawn.add_column("", style="bold", overflow="fold")
    for column in told:
        drawn.add_column(SHORTER.get(column.title, column.title), justify="right", overflow="fold")
    for name, *cells in rows(outcomes, told):
        drawn.add_row(escape(re.sub(r",(?! )", ", ", name)), *cells)
    return drawn


def slug(strategy: str) -> str:
    """A strategy as the name of a folder."""
    return re.sub(r"[^\w=.-]+", "-", strategy)
