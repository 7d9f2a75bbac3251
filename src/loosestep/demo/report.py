"""The demo's report: one HTML file that needs nothing else, with curves and a timeline."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from loosestep.demo.diary import Outcome, Span, spell
from loosestep.demo.screen import HEADERS, figures

COLOURS = ("#c2571a", "#1f6feb")  # one per strategy
ACTIVITIES = {"computes": "#9fb8a3", "waits": "#d1242f", "exchanges in the background": "#1f6feb"}
FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#24292f"}
SHOWN = 25  # steps of DDP in the timeline's first view

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>loosestep demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: 0; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .2rem; }}
p {{ max-width: 46rem; margin: .3rem 0; }} .note {{ color: #57606a; font-size: .9rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .35rem .9rem; text-align: right; border-bottom: 1px solid #d0d7de; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }} th {{ font-weight: 600; }}
</style></head><body>
<h1>{headline}</h1>
<p>Two nodes of two processes with {link}. A ResNet-20 learns handwritten digits, first with torch's
DistributedDataParallel, then with loosestep: the same network, batches and number of gradients.</p>
{table}
<h2>Loss and accuracy</h2>
<p class="note">Loss: mean over the ranks and the last 8 steps. Accuracy: mean of the nodes' own replicas on 360 test images; the
last point is the final model, the same on all ranks.</p>
{curves}
<h2>Who does what when</h2>
<p class="note">One row per rank. DDP waits at the end of every backward pass for the slow link; DASO exchanges
parameters while it computes. Drag to zoom, double-click for everything.</p>
{timeline}
<p class="note">All processes share one machine's cores, and the link is emulated: read the ratios, not the seconds.</p>
</body></html>
"""


def write_report(path: Path, outcomes: Sequence[Outcome], *, link: str) -> None:
    """Write the page; folders are made."""
    first, second = outcomes
    ratio = second.speed / first.speed
    page = PAGE.format(
        headline=f"{html.escape(spell(second.strategy))}: {ratio:.1f} times the speed of torch DDP",
        link=html.escape(link),
        table=summary(outcomes),
        curves=curves(outcomes).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}),
        timeline=timeline(outcomes).to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def summary(outcomes: Sequence[Outcome]) -> str:
    """The closing table as HTML."""
    rows = [[outcome.name, *figures(outcome, beside=outcomes[0])] for outcome in outcomes]
    head = "".join(f"<th>{name}</th>" for name in ("", *HEADERS))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def curves(outcomes: Sequence[Outcome]) -> Any:
    """Loss and accuracy (rows) against time and against gradients (columns)."""
    figure = make_subplots(rows=2, cols=2, shared_yaxes=True, horizontal_spacing=0.04, vertical_spacing=0.13)
    for colour, outcome in zip(COLOURS, outcomes, strict=False):
        for row, curve in enumerate((outcome.loss_curve(), outcome.accuracy_curve()), start=1):
            gradients, seconds, values = zip(*curve, strict=True)
            for column, x in enumerate((seconds, gradients), start=1):
                line = go.Scatter(
                    x=x, y=values, name=outcome.name, legendgroup=outcome.name, showlegend=row == column == 1,
                    mode="lines" if row == 1 else "lines+markers", line={"color": colour, "width": 2},
                )  # fmt: skip
                figure.add_trace(line, row=row, col=column)
    figure.update_yaxes(type="log", dtick=1, row=1)
    figure.update_yaxes(title_text="training loss", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", row=2)
    figure.update_yaxes(title_text="test accuracy", row=2, col=1)
    figure.update_xaxes(title_text="seconds", rangemode="tozero", col=1)
    figure.update_xaxes(title_text="gradients of all ranks", rangemode="tozero", col=2)
    return style(figure, height=620)


def timeline(outcomes: Sequence[Outcome]) -> Any:
    """A row per rank and strategy: compute and waits on the row, exchanges in the background just below it."""
    bars: dict[str, list[tuple[float, Span]]] = {name: [] for name in ACTIVITIES}
    labels: list[str] = []
    for outcome in outcomes:
        for diary in outcome.diaries:
            row = float(len(labels))
            labels.append(f"{outcome.name}, node {diary.node}, rank {diary.rank} ")
            waits = [span for span in merged(diary.waits) if span[1] > 0]
            bars["waits"] += [(row, span) for span in waits]
            bars["computes"] += [(row, span) for span in between(waits, diary.seconds)]
            bars["exchanges in the background"] += [(row + 0.34, span) for span in diary.exchanges]
    figure = go.Figure()
    for name, spans in bars.items():
        background = name.startswith("exchanges")
        bar = go.Bar(
            orientation="h", name=name, marker_color=ACTIVITIES[name], width=0.14 if background else 0.5,
            base=[start for _, (start, _) in spans], x=[end - start for _, (start, end) in spans],
            y=[row for row, _ in spans], marker_line_width=0,
            customdata=[1000 * (end - start) for _, (start, end) in spans], hovertemplate=name + " %{customdata:.0f} ms",
        )  # fmt: skip
        figure.add_trace(bar)
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_yaxes(tickvals=list(range(len(labels))), ticktext=labels, autorange="reversed")
    steps = outcomes[0].diaries[0].steps
    figure.update_xaxes(title_text="seconds", range=[0, steps[min(SHOWN, len(steps)) - 1]])
    return style(figure, height=90 + 44 * len(labels))


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same time, as spans that are sorted and do not overlap."""
    result: list[Span] = []
    for start, end in sorted((s[0], s[1]) for s in spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def between(spans: Sequence[Span], end: float) -> Iterator[Span]:
    """The gaps from 0 to `end`."""
    at = 0.0
    for start, stop in spans:
        if start > at:
            yield at, min(start, end)
        at = max(at, stop)
    if at < end:
        yield at, end


def style(figure: Any, *, height: int) -> Any:
    """Quiet axes, the legend above."""
    figure.update_layout(
        height=height, font=FONT, plot_bgcolor="white", margin={"l": 10, "r": 10, "t": 40, "b": 10},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )  # fmt: skip
    figure.update_xaxes(gridcolor="#eaeef2", zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor="#eaeef2", zeroline=False, automargin=True)
    return figure
