"""The section on large batches: tables and plots out of the lines of `papers_large_batches.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from common import Spread, table
from papers.learners import RULES
from papers.page import COLOURS, plot

Result = dict[str, Any]
QUALITY = {"an4": "wer", "cifar10": "accuracy"}
LABEL = {"an4": "word error rate %, AN4", "cifar10": "accuracy %, CIFAR-10"}
FAILED = {"an4": 95.0, "cifar10": 15.0}  # a model that says nothing, or always the same


class Group(NamedTuple):
    """Trainings that differ in their seed only."""

    strategy: str
    batch: int
    rate: float
    spread: Spread


def groups(results: Sequence[Result], task: str) -> list[Group]:
    """Qualities in percent, by strategy, batch and rate."""
    found: dict[tuple[str, int, float], list[float]] = {}
    for result in results:
        if result["task"] == task:
            key = (result["strategy"], result["batch"], result["rate"])
            found.setdefault(key, []).append(100 * result[QUALITY[task]])
    return [Group(*key, Spread(tuple(values))) for key, values in sorted(found.items())]


def worth(task: str, quality: float) -> float:
    """The larger the better."""
    return -quality if task == "an4" else quality


def best(own: Sequence[Group], task: str) -> Group:
    """The best mean among the rates with most seeds."""
    most = max(len(group.spread.values) for group in own)
    return max(
        (group for group in own if len(group.spread.values) == most),
        key=lambda group: worth(task, group.spread.mean),
    )


def of(found: Sequence[Group], strategy: str, batch: int) -> list[Group]:
    """All rates of a strategy at a batch."""
    return [group for group in found if (group.strategy, group.batch) == (strategy, batch)]


def batches(found: Sequence[Group]) -> list[int]:
    return sorted({group.batch for group in found})


def quality_table(found: Sequence[Group], task: str) -> str:
    """Every strategy at its own best rate."""
    rows = []
    for strategy, rule in RULES.items():
        cells = [rule.title]
        for batch in batches(found):
            top = best(of(found, strategy, batch), task)
            cells.append(f"{top.spread.text('.1f', centre='mean')} at {top.rate:g}")
        rows.append(cells)
    return table(["", *(f"batch {batch}" for batch in batches(found))], rows)


def rate_table(found: Sequence[Group], task: str, batch: int) -> str:
    """Every rate that was tried at a batch."""
    rates = sorted({group.rate for group in found if group.batch == batch})
    rows = []
    for strategy, rule in RULES.items():
        cells = [rule.title]
        for rate in rates:
            own = [group for group in of(found, strategy, batch) if group.rate == rate]
            cells.append(own[0].spread.text(".1f", centre="mean") if own else "")
        rows.append(cells)
    return table([f"batch {batch}, at rate", *(f"{rate:g}" for rate in rates)], rows)


def reach_table(found: Sequence[Group], task: str) -> str:
    """The largest batch within a point of the smallest one's quality; the highest rate that loses no
    more than a point against the best of all, at each of the larger batches."""
    rows = []
    larger = batches(found)[1:]
    for strategy, rule in RULES.items():
        small = best(of(found, strategy, batches(found)[0]), task).spread.mean
        held = [
            batch
            for batch in batches(found)
            if worth(task, best(of(found, strategy, batch), task).spread.mean)
            >= worth(task, small) - 1
        ]
        cells = [rule.title, str(max(held))]
        for batch in larger:
            top = max(worth(task, group.spread.mean) for group in found if group.batch == batch)
            near = [
                group.rate
                for group in of(found, strategy, batch)
                if worth(task, group.spread.mean) >= top - 1
            ]
            alive = [
                group.rate
                for group in of(found, strategy, batch)
                if worth(task, group.spread.mean) > worth(task, FAILED[task])
            ]
            cells.append(f"{max(near):g}" if near else "none")
            cells.append(f"{max(alive):g}" if alive else "none")
        rows.append(cells)
    header = ["", "largest batch within a point of the smallest"]
    for batch in larger:
        header += [f"batch {batch}: highest rate within a point of the best", "that learns at all"]
    return table(header, rows)


def draw_batches(axes: Any, found: Sequence[Group], task: str) -> None:
    """Quality at the best rate against the batch."""
    for number, (strategy, rule) in enumerate(RULES.items()):
        tops = [best(of(found, strategy, batch), task) for batch in batches(found)]
        at = [top.batch * (1 + 0.03 * (number - 2.5)) for top in tops]
        middle = [top.spread.mean for top in tops]
        spread = [
            [top.spread.mean - min(top.spread.values) for top in tops],
            [max(top.spread.values) - top.spread.mean for top in tops],
        ]
        axes.errorbar(
            at, middle, spread, fmt="o-", ms=4, lw=1.4, capsize=2,
            color=COLOURS[strategy], label=rule.title,
        )  # fmt: skip
    axes.set(xscale="log", xlabel="total batch", ylabel=LABEL[task])
    axes.set_xticks(batches(found), [str(batch) for batch in batches(found)])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


def draw_rates(axes: Any, found: Sequence[Group], task: str, batch: int) -> None:
    """Quality against the rate at one batch: where trainings begin to fail."""
    for number, (strategy, rule) in enumerate(RULES.items()):
        own = of(found, strategy, batch)
        at = [group.rate * (1 + 0.02 * (number - 2.5)) for group in own]
        middle = [group.spread.mean for group in own]
        spread = [
            [group.spread.mean - min(group.spread.values) for group in own],
            [max(group.spread.values) - group.spread.mean for group in own],
        ]
        axes.errorbar(
            at, middle, spread, fmt="o-", ms=3.5, lw=1.3, capsize=2,
            color=COLOURS[strategy], label=rule.title,
        )  # fmt: skip
    rates = sorted({group.rate for group in found if group.batch == batch})
    axes.set(xscale="log", xlabel="rate", ylabel=LABEL[task], title=f"batch {batch}")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()


def draw_losses(axes: Any, results: Sequence[Result], task: str, batch: int, epochs: float) -> None:
    """Training loss against epochs at the best rate of each strategy."""
    found = groups(results, task)
    for strategy, rule in RULES.items():
        rate = best(of(found, strategy, batch), task).rate
        curves = [
            [math.nan if value is None else value for value in result["curve"]]
            for result in results
            if (result["task"], result["strategy"], result["batch"], result["rate"])
            == (task, strategy, batch, rate)
        ]
        points = range(1, 1 + len(curves[0]))
        at = [epochs * point / len(curves[0]) for point in points]
        middle = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        axes.plot(at, middle, color=COLOURS[strategy], lw=1.4, label=f"{rule.title}, {rate:g}")
        low = [min(values) for values in zip(*curves, strict=True)]
        high = [max(values) for values in zip(*curves, strict=True)]
        axes.fill_between(at, low, high, color=COLOURS[strategy], alpha=0.12, lw=0)
    name = "AN4" if task == "an4" else "CIFAR-10"
    axes.set(xlabel="epochs", ylabel="training loss", title=f"{name}, batch {batch}")
    axes.legend(frameon=False, fontsize=8)


def pictures(results: Sequence[Result], epochs: dict[str, float]) -> dict[str, str]:
    """The three plots."""
    found = {task: groups(results, task) for task in QUALITY}

    def by_batch(axes: Any) -> None:
        for place, task in zip(axes, QUALITY, strict=True):
            draw_batches(place, found[task], task)

    def by_rate(axes: Any) -> None:
        places = iter(axes)
        for task in QUALITY:
            for batch in batches(found[task])[2:]:
                draw_rates(next(places), found[task], task, batch)
        axes[0].legend(frameon=False, fontsize=7)

    def by_epoch(axes: Any) -> None:
        for place, task in zip(axes, QUALITY, strict=True):
            draw_losses(place, results, task, batches(found[task])[-1], epochs[task])

    return {
        "batch": plot("large-batches", by_batch, alt="Quality against total batch, a line a strategy"),
        "rate": plot(
            "large-batches-rates", by_rate, panels=4, size=(16, 4),
            alt="Quality against rate at the two largest batches",
        ),
        "loss": plot("large-batches-loss", by_epoch, alt="Training loss at the largest batch"),
    }  # fmt: skip
