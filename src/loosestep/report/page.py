"""The report: one HTML page that needs nothing else, about one run or several side by side."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loosestep.report import plots
from loosestep.report.outcome import Outcome
from loosestep.report.timeline import write_timeline
from loosestep.runfolder.config import write_whole

MOST_TIMELINES = 4

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .2rem; }}
h3 {{ font-size: 1rem; margin: 1rem 0 0; font-weight: 600; }}
p {{ max-width: 50rem; margin: .3rem 0; }} .note {{ color: #57606a; font-size: .9rem; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; margin: .8rem 0; font-size: .9rem; }}
th, td {{ padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #d0d7de; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }} th {{ font-weight: 600; white-space: normal; vertical-align: bottom; }}
table.words td, table.words th {{ text-align: left; white-space: normal; }} .wrong {{ color: #b3261e; }}
code {{ background: #f6f8fa; padding: .15rem .35rem; border-radius: 4px; font-size: .85rem; overflow-wrap: anywhere; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(
    outcomes: Sequence[Outcome],
    path: Path,
    *,
    target: float | None = None,
    timeline: Path | None = None,
) -> None:
    """Write the page, and for a single run the timeline for Perfetto; folders are made."""
    several = len(outcomes) > 1
    recipe = outcomes[0].begin["recipe"]
    title = f"{recipe}: {len(outcomes)} runs" if several else f"{recipe}, {outcomes[0].strategy}"
    sections = [
        _results(outcomes, target),
        _section(
            "Loss and quality",
            "Loss: mean over the ranks. Quality: of the mean of all replicas, on the test data; "
            "the last point is the final model.",
            plots.curves(outcomes),
            library=True,
        ),
        _section(
            "Waiting and overlap",
            "Left: the part of the training time each rank computed and waited (evaluations left "
            "out). Right: how long exchanges were under way, and how much of that was hidden "
            "behind compute.",
            plots.bars(outcomes),
        ),
        *_timelines(outcomes),
        _section(
            "Staleness",
            "How old was what arrived, in steps of the learner it arrived at.",
            plots.staleness(outcomes),
        )
        if any(outcome.staleness for outcome in outcomes)
        else "",
        _section(
            "Consensus distance",
            "Root mean square distance of the replicas to their mean.",
            plots.distances(outcomes),
        ),
        _section("Bytes", "Sent by all ranks, per gradient.", plots.traffic(outcomes)),
        _examples(outcomes),
        _environment(outcomes),
    ]
    write_whole(path, [PAGE.format(title=html.escape(title), body="\n".join(sections))])
    if timeline is not None:
        node_of = {
            rank: node for node, ranks in enumerate(outcomes[0].begin["nodes"]) for rank in ranks
        }
        write_timeline(timeline, outcomes[0].activities, node_of)


# --------------------------------------------------------------------------------------------------
# table of results


def common_target(outcomes: Sequence[Outcome]) -> float | None:
    """The quality that every run reached at some time; those that diverged do not count."""
    reached = (outcome.best() for outcome in outcomes if not outcome.diverged)
    best = [value for value in reached if value is not None]
    if not best:
        return None
    return min(best) if outcomes[0].higher_is_better else max(best)


@dataclass(frozen=True)
class Column:
    """A column of the table of results: a number of every run, spelt as a mean; `spread` beside
    it where it matters.
    """

    title: str
    value: Callable[[Outcome], float | None]
    spell: Callable[[float], str]
    spread: bool = False
    brief: bool = True
    """Also in the table on the terminal, which has less room."""

    def cell(self, runs: Sequence[Outcome]) -> str:
        """Of the seeds of a strategy."""
        values = [value for value in map(self.value, runs) if value is not None]
        if len(values) < len(runs):
            return f"{len(values)} of {len(runs)} runs"
        return spread(values, self.spell) if self.spread else self.spell(statistics.mean(values))


def columns(outcomes: Sequence[Outcome], target: float | None) -> list[Column]:
    """What the table of these runs tells."""
    at = "target" if target is None else _percent(target)
    return [
        Column(outcomes[0].quality_name, lambda run: run.quality, _percent, spread=True),
        Column("gradients/s", lambda run: run.speed, "{:.0f}".format, spread=True),
        Column("seconds", lambda run: run.seconds, "{:.1f}".format, brief=False),
        Column(
            f"s to {at}",
            lambda run: None if target is None else run.seconds_to(target),
            "{:.1f}".format,
            spread=True,
        ),
        Column("waiting", lambda run: run.waiting, "{:.0%}".format),
        Column("MB/gradient", lambda run: run.per_gradient("bytes_sent") / 1e6, "{:.2g}".format),
        Column(
            "between nodes",
            lambda run: run.per_gradient("bytes_between_nodes") / 1e6,
            "{:.3g}".format,
            brief=False,
        ),
        Column("exchanges/step", lambda run: run.exchanges_per_step, "{:.2g}".format),
        Column("staleness", lambda run: run.staleness_mean, "{:.1f}".format),
        Column("steps apart", lambda run: run.distance_in_steps, _known, brief=False),
        Column("distance", lambda run: run.distance, "{:.2g}".format),
        Column(
            "lr",
            lambda run: float(run.begin["lr"]),
            "{:.2g}".format,
            brief=len({run.begin["lr"] for run in outcomes}) > 1,
        ),
    ]


def rows(outcomes: Sequence[Outcome], told: Sequence[Column]) -> Iterator[list[str]]:
    """A name and its cells per strategy: of the seeds that did not diverge, and how many did
    beside the name.
    """
    for name, runs in plots.groups(outcomes).items():
        kept = [run for run in runs if not run.diverged]
        if not kept:
            yield [f"{name}: diverged", *("-" for _ in told)]
        else:
            lost = len(runs) - len(kept)
            mark = f" ({lost} of {len(runs)} runs diverged)" if lost else ""
            yield [name + mark, *(column.cell(kept) for column in told)]


def spread(values: Sequence[float], spell: Callable[[float], str]) -> str:
    """`mean`, or `mean ± standard deviation` of several."""
    if not values:
        return "-"
    mean = spell(statistics.mean(values))
    return (
        mean
        if len(values) == 1
        else f"{mean.removesuffix(' %')} ± {spell(statistics.stdev(values))}"
    )


def _known(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if 0 <= value <= 2 else f"{value:.3g}"


def _results(outcomes: Sequence[Outcome], target: float | None) -> str:
    target = common_target(outcomes) if target is None else target
    told = columns(outcomes, target)
    lines = list(rows(outcomes, told))
    note = "± is the standard deviation over seeds. " if len(outcomes) > len(lines) else ""
    note += (
        "MB/gradient: sent by all ranks. Distance: root mean square distance of the replicas to "
        "their mean, at the end."
    )
    incomplete = [
        outcome.name for outcome in outcomes if outcome.final is None and not outcome.diverged
    ]
    if incomplete:
        note = f"Not complete: {', '.join(incomplete)}. {note}"
    return (
        f"{_table(('', *(column.title for column in told)), lines)}<p "
        f'class="note">{html.escape(note)}</p>'
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]], kind: str = "") -> str:
    top = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


# --------------------------------------------------------------------------------------------------
# sections


def _section(title: str, note: str, figure: Any, *, library: bool = False) -> str:
    """A heading, a line, a figure; plotly's library comes with the first one, once."""
    return (
        f"<h2>{html.escape(title)}</h2><p "
        f'class="note">{html.escape(note)}</p>{_draw(figure, library=library)}'
    )


def _draw(figure: Any, *, library: bool = False) -> str:
    config = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=library, config=config))


def _timelines(outcomes: Sequence[Outcome]) -> list[str]:
    """The first run of each strategy."""
    shown = [
        (name, runs[0]) for name, runs in plots.groups(outcomes).items() if runs[0].activities
    ][:MOST_TIMELINES]
    note = (
        "From the middle of the run, one row per rank: what it does, and below it the exchanges "
        "in the background. Drag to zoom, double-click for everything."
    )
    if len(outcomes) == 1:
        note += " The whole run is in timeline.json, for ui.perfetto.dev."
    head = f'<h2>Who does what when</h2><p class="note">{note}</p>' if shown else ""
    return [
        head,
        *(
            f"<h3>{html.escape(name)}</h3>{_draw(plots.timeline(outcome))}"
            for name, outcome in shown
        ),
    ]


def _examples(outcomes: Sequence[Outcome]) -> str:
    """What the first run of each strategy made of the same test examples."""
    shown = {
        name: {example["name"]: example for example in runs[0].final["examples"]}
        for name, runs in plots.groups(outcomes).items()
        if runs[0].final is not None and runs[0].final["examples"]
    }
    if not shown:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in ("example", "expected", *shown))
    first = next(iter(shown.values()))
    rows = [
        _example_row(example, [answers.get(name) for answers in shown.values()])
        for name, example in first.items()
    ]
    return (
        "<h2>What was recognised</h2>"
        f'<div class="scroll"><table class="words"><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _example_row(example: Mapping[str, str], answers: Iterable[Mapping[str, str] | None]) -> str:
    cells = [f"<td>{html.escape(example['name'])}</td><td>{html.escape(example['expected'])}</td>"]
    for answer in answers:
        if answer is None:
            cells.append("<td></td>")
        else:
            wrong = "" if answer["expected"] == answer["found"] else ' class="wrong"'
            cells.append(f"<td{wrong}>{html.escape(answer['found']) or '(nothing)'}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _environment(outcomes: Sequence[Outcome]) -> str:
    first = outcomes[0]
    nodes = first.begin["nodes"]
    facts = {
        **first.begin["task"],
        "optimizer": f"{first.begin['optimizer']}, schedule {first.begin['schedule']}",
        "options": ", ".join(f"{k}={v}" for k, v in first.config.options.items()) or "the recipe's",
        "nodes": f"{len(nodes)}, ranks {[len(node) for node in nodes]}",
        "link": first.config.bandwidth or "no limit",
        "device": first.config.device,
        **first.config.environment,
    }
    commands = "".join(
        f"<p><code>{html.escape(c)}</code></p>"
        for c in dict.fromkeys(o.config.command for o in outcomes)
    )
    table = _table(("", ""), facts.items(), "words")
    return f"<h2>How it was made</h2>{commands}{table}"
