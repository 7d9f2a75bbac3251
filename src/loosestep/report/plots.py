"""The figures of a report. Runs of the same strategy share a colour; their seeds are drawn
thinner, side by side.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from loosestep.report.outcome import Outcome, Point
from loosestep.report.spans import Activity, Span, merged

COLOURS = ("#1f6feb", "#c2571a", "#2f8f5b", "#8250df", "#bf3989", "#9a6700", "#57606a", "#0a7ea4")
ACTIVITIES = {
    "computes": "#9fb8a3",
    "waits": "#d1242f",
    "evaluates or saves": "#d4a72c",
    "exchanges": "#1f6feb",
}
FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#24292f"}
STEPS_DRAWN = 240
STEPS_SHOWN = 24


def groups(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Runs that differ only in their seed, under a name: the strategy, and the first folder's
    name where that is not enough.
    """
    alike: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        config = outcome.config.but(
            seed=0, command="", generation=0, environment={}, keep=1, data=None
        )
        alike.setdefault(repr(config), []).append(outcome)
    runs = list(alike.values())
    often = Counter(group[0].strategy for group in runs)
    return {
        first.strategy if often[first.strategy] == 1 else f"{first.strategy}, {first.name}": group
        for group in runs
        for first in group[:1]
    }


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def curves(outcomes: Sequence[Outcome]) -> Any:
    """Loss and quality (rows) against gradients and against time (columns)."""
    figure = make_subplots(
        rows=2, cols=2, shared_yaxes=True, horizontal_spacing=0.04, vertical_spacing=0.12
    )
    quality = outcomes[0].quality_name
    for row, curve_of in enumerate((lambda o: o.loss_curve, lambda o: o.quality_curve), start=1):
        draw(figure, outcomes, curve_of, row=row)
    positive = not any(point.value <= 0 for outcome in outcomes for point in outcome.loss_curve)
    # 0.2; plotly would write 2
    ticks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    spelt = [f"{tick:g}" for tick in ticks]
    figure.update_yaxes(
        **({"type": "log", "tickvals": ticks, "ticktext": spelt} if positive else {}), row=1
    )
    figure.update_yaxes(title_text="training loss", row=1, col=1)
    share = all(0 <= point.value <= 2 for outcome in outcomes for point in outcome.quality_curve)
    figure.update_yaxes(title_text=quality, row=2, col=1)
    figure.update_yaxes(tickformat=".0%" if share else None, row=2)
    figure.update_xaxes(title_text="gradients of all learners", row=2, col=1)
    figure.update_xaxes(title_text="seconds of training", row=2, col=2)
    return style(figure, height=640)


def draw(
    figure: Any,
    outcomes: Sequence[Outcome],
    curve_of: Callable[[Outcome], list[Point]],
    *,
    row: int,
) -> None:
    """One row: a curve of every run, against gradients and against seconds."""
    named = groups(outcomes)
    colour_of = colours(named)
    for name, runs in named.items():
        for i, outcome in enumerate(runs):
            points = [point for point in curve_of(outcome) if math.isfinite(point.value)]
            for column, x in enumerate(
                ([p.gradients for p in points], [round(p.seconds, 3) for p in points]), start=1
            ):
                line = go.Scatter(
                    x=x,
                    y=[p.value for p in points],
                    name=name,
                    legendgroup=name,
                    showlegend=row == column == 1 and i == 0,
                    mode="lines" if len(points) > 30 else "lines+markers",
                    marker={"size": 5},
                    line={"color": colour_of[name], "width": 2 if len(runs) == 1 else 1.3},
                    hovertemplate=f"{name}, seed {outcome.config.seed}: %{{y:.4g}}<extra></extra>",
                )
                figure.add_trace(line, row=row, col=column)


def distances(outcomes: Sequence[Outcome]) -> Any:
    """The consensus distance against gradients and time."""
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04)
    draw(figure, outcomes, lambda outcome: outcome.distance_curve, row=1)
    figure.update_yaxes(title_text="consensus distance", row=1, col=1, rangemode="tozero")
    figure.update_xaxes(title_text="gradients of all learners", row=1, col=1)
    figure.update_xaxes(title_text="seconds of training", row=1, col=2)
    return style(figure, height=320)


def bars(outcomes: Sequence[Outcome]) -> Any:
    """Where the time of each rank went, and how much of the exchanges was hidden behind compute;
    the first seeds.
    """
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05,
        subplot_titles=("share of the ranks' time", "seconds of exchanges per rank"),
    )  # fmt: skip
    rows = [
        (f"{name}, rank {a.rank}", a)
        for name, runs in groups(outcomes).items()
        for a in runs[0].activities
    ]
    labels = [label for label, _ in rows]
    shares = {
        "computes": [1 - _share(activity) for _, activity in rows],
        "waits": [_share(activity) for _, activity in rows],
    }
    exchanged = {
        "hidden behind compute": ("#9fb8a3", [activity.hidden for _, activity in rows]),
        "waited for": (
            "#d1242f",
            [sum(e - s for s, e in merged(a.exchanges)) - a.hidden for _, a in rows],
        ),
    }
    for name, values in shares.items():
        bar = go.Bar(orientation="h", y=labels, x=values, name=name, marker_color=ACTIVITIES[name])
        figure.add_trace(bar, row=1, col=1)
    for name, (colour, values) in exchanged.items():
        bar = go.Bar(orientation="h", y=labels, x=values, name=name, marker_color=colour)
        figure.add_trace(bar, row=1, col=2)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(tickformat=".0%", range=[0, 1], row=1, col=1)
    figure.update_yaxes(autorange="reversed")
    styled = style(figure, height=140 + 24 * len(rows))
    return styled.update_layout(
        legend={"yref": "container", "y": 0.99, "yanchor": "top"}, margin={"t": 70}
    )


def timeline(outcome: Outcome) -> Any:
    """A row per rank, from the middle of the run: what it does on the row, exchanges in the
    background just below it.
    """
    spans: dict[str, list[tuple[float, Span]]] = {name: [] for name in ACTIVITIES}
    window = _window(outcome.activities)
    for row, activity in enumerate(outcome.activities):
        kinds = {
            "computes": list(activity.computes()),
            "waits": merged(activity.waits),
            "evaluates or saves": activity.pauses,
            "exchanges": activity.exchanges,
        }
        for name, found in kinds.items():
            place = row + 0.34 if name == "exchanges" else float(row)
            spans[name] += [
                (place, _clip(span, window))
                for span in found
                if span[0] < window[1] and span[1] > window[0]
            ]
    figure = go.Figure()
    for name, found_spans in spans.items():
        bar = go.Bar(
            orientation="h",
            name=name,
            marker_color=ACTIVITIES[name],
            width=0.14 if name == "exchanges" else 0.5,
            base=[round(start - window[0], 5) for _, (start, _) in found_spans],
            x=[round(end - start, 5) for _, (start, end) in found_spans],
            y=[place for place, _ in found_spans],
            marker_line_width=0,
            customdata=[round(1000 * (end - start), 1) for _, (start, end) in found_spans],
            hovertemplate=name + " %{customdata:.1f} ms<extra></extra>",
        )
        figure.add_trace(bar)
    node_of = {rank: node for node, ranks in enumerate(outcome.begin["nodes"]) for rank in ranks}
    labels = [f"node {node_of.get(a.rank, 0)}, rank {a.rank} " for a in outcome.activities]
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_yaxes(tickvals=list(range(len(labels))), ticktext=labels, autorange="reversed")
    drawn = sum(
        window[0] <= step <= window[1]
        for step in max((a.steps for a in outcome.activities), key=len)
    )
    shown = (window[1] - window[0]) * min(1.0, STEPS_SHOWN / max(1, drawn))
    figure.update_xaxes(title_text="seconds", range=[0, shown])
    return style(figure, height=110 + 46 * len(labels))


def staleness(outcomes: Sequence[Outcome]) -> Any:
    """How many steps old what was folded was: the share of the folds."""
    figure = go.Figure()
    named = groups(outcomes)
    colour_of = colours(named)
    for name, runs in named.items():
        counts = Counter(round(value) for outcome in runs for value in outcome.staleness)
        if counts:
            x = sorted(counts)
            y = [counts[value] / counts.total() for value in x]
            figure.add_trace(go.Bar(x=x, y=y, name=name, marker_color=colour_of[name]))
    figure.update_yaxes(title_text="share of the folds", tickformat=".0%")
    figure.update_xaxes(
        title_text="staleness: steps from snapshot to fold", dtick=1 if _few(outcomes) else None
    )
    return style(figure, height=320)


def traffic(outcomes: Sequence[Outcome]) -> Any:
    """Megabytes per gradient, inside and between nodes; the mean of the seeds."""
    named = groups(outcomes)
    between, total = (
        [
            statistics.mean(outcome.per_gradient(kind) for outcome in runs) / 1e6
            for runs in named.values()
        ]
        for kind in ("bytes_between_nodes", "bytes_sent")
    )
    inside = [max(0.0, t - b) for t, b in zip(total, between, strict=True)]
    figure = go.Figure()
    for kind, values, colour in (
        ("between nodes", between, "#c2571a"),
        ("inside nodes", inside, "#9fb8a3"),
    ):
        figure.add_trace(
            go.Bar(orientation="h", y=list(named), x=values, name=kind, marker_color=colour)
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="megabytes sent per gradient")
    figure.update_yaxes(autorange="reversed")
    return style(figure, height=130 + 28 * len(named))


def style(figure: Any, *, height: int) -> Any:
    """Quiet axes, the legend above."""
    figure.update_layout(
        height=height, font=FONT, plot_bgcolor="white", margin={"l": 10, "r": 10, "t": 50, "b": 10},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, showlegend=True,
    )  # fmt: skip
    figure.update_xaxes(gridcolor="#eaeef2", zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor="#eaeef2", zeroline=False, automargin=True)
    return figure


def _share(activity: Activity) -> float:
    return min(1.0, activity.waiting / activity.seconds) if activity.seconds > 0 else 0.0


def _few(outcomes: Sequence[Outcome]) -> bool:
    return max((value for outcome in outcomes for value in outcome.staleness), default=0) < 20


def _window(activities: Sequence[Activity]) -> Span:
    """The time of a few hundred steps in the middle of the run, where everybody is busy."""
    steps = max((activity.steps for activity in activities), key=len, default=[])
    if len(steps) < 2:
        return activities[0].span if activities else (0.0, 1.0)
    first = max(0, len(steps) // 2 - STEPS_DRAWN // 2)
    return steps[first], steps[min(first + STEPS_DRAWN, len(steps) - 1)]


def _clip(span: Span, window: Span) -> Span:
    return max(span[0], window[0]), min(span[1], window[1])
