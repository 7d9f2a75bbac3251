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
    """The best mean of the rates that were tried."""
    return max(own, key=lambda group: worth(task, group.spread.mean))


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
    bottom, top = axes.get_ylim()
    late = [value for line in axes.get_lines() for value in line.get_ydata()[len(at) // 6 :]]
    axes.set_ylim(bottom, min(top, 1.4 * max(late)))
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


def means(found: Sequence[Group], batch: int, rate: float) -> dict[str, float]:
    """The mean quality of each strategy."""
    return {
        group.strategy: group.spread.mean
        for group in found
        if group.batch == batch and abs(group.rate / rate - 1) < 1e-6
    }


def apart(results: Sequence[Result], task: str, batch: int, rate: float) -> dict[str, float]:
    """The consensus distance half way through, of each strategy's first seed."""
    return {
        result["strategy"]: result["distance"][len(result["distance"]) // 2]
        for result in results
        if (result["task"], result["batch"], result["seed"]) == (task, batch, 0)
        and abs(result["rate"] / rate - 1) < 1e-6
    }


def listed(values: dict[str, float], form: str = ".1f") -> str:
    """`synchronous 33.9, fixed ring 44.4, ...`"""
    return ", ".join(
        f"{RULES[strategy].title.partition(',')[0]} {values[strategy]:{form}}"
        for strategy in RULES
        if strategy in values
    )


def process_table(said: Sequence[Result]) -> str:
    """The cells that were trained on real processes."""
    rows = [
        [
            f"{RULES[s['strategy']].title}, batch {s['batch']}",
            f"{s['rate']:g}",
            f"{100 * s['wer']:.1f}",
            f"{s['loss']:.3f}",
            f"{s['exchanges_a_step']:.2f}",
        ]
        for s in sorted(said, key=lambda s: (s["batch"], s["strategy"] != "synchronous"))
    ]
    return table(["four processes", "rate", "word error rate %", "loss", "exchanges a step"], rows)


def text(results: Sequence[Result], epochs: dict[str, float], processes: Sequence[Result]) -> str:
    """The section."""
    found = {task: groups(results, task) for task in QUALITY}
    pictured = pictures(results, epochs)
    an4 = found["an4"]
    cifar = found["cifar10"]
    reached = {
        (task, batch): {
            strategy: best(of(found[task], strategy, batch), task).spread.mean for strategy in RULES
        }
        for task in QUALITY
        for batch in batches(found[task])
    }
    far = apart(results, "cifar10", 64, 0.4)
    tables = "\n\n".join(
        f"{LABEL[task]}, every strategy at its best rate, mean (least-most) of the seeds:\n\n{quality_table(found[task], task)}\n\n"
        f"{reach_table(found[task], task)}"
        for task in QUALITY
    )
    edges = "\n\n".join(
        f"{LABEL[task]}\n\n{rate_table(found[task], task, batch)}"
        for task in QUALITY
        for batch in batches(found[task])[2:]
    )

    def against(values: dict[str, float], *others: str) -> str:
        """`17.6 to 20.1 against 21.3`: others, and synchronous training."""
        own = [values[strategy] for strategy in others]
        return f"{min(own):.1f} to {max(own):.1f} against {values['synchronous']:.1f}"

    def pair(task: str, batch: int) -> str:
        """Delay-by-one, and the better of the rings of sixteen."""
        values = reached[task, batch]
        rings = values["ring"], values["random-ring"]
        other = min(rings) if task == "an4" else max(rings)
        return f"{values['delay-by-one']:.1f} against {other:.1f}"

    free = ("ring", "random-ring", "delay-by-one", "daso")
    seeds = best(of(an4, "synchronous", 128), "an4").spread.values
    lone = min(seeds), max(seeds)
    real = f"""**On four real processes** (`benchmarks/papers_processes.py`: AN4, 2 layers of 64 cells, 20 epochs, two nodes of two ranks on the loopback of a busy machine of two cores, one seed): a small batch, and the largest one of {batches(an4)[1]} that
processors here train in minutes, {20 * 948 // batches(an4)[1]} steps.

{process_table(processes)}
"""
    if len({(said["batch"], said["strategy"]) for said in processes}) < 4:
        real = ""  # half of it would compare nothing
    return f"""## Large batches

**Rings, delay-by-one and DASO beat synchronous training with large batches: holds for the acoustic model, and where the rate grows with the batch; not where every strategy finds its rate on CIFAR-10.** AN4, each at its
own best rate, % word errors: batch 128, {against(reached["an4", 128], *free)}, whose seeds spread from {lone[0]:.1f} to {lone[1]:.1f}; 256, where 148 steps are too few for anybody, {against(reached["an4", 256], *free)}. CIFAR-10, % accuracy: batch 1024 at the rate in proportion (1.6),
{against(means(cifar, 1024, 1.6), *free)}, but each at its own best, {against(reached["cifar10", 1024], *free)}; 4096, {against(reached["cifar10", 4096], *free)}. **At the edge of the rate** the distance is largest: AN4, batch 128 at rate 4.5,
{against(means(an4, 128, 4.5), *free)}; CIFAR-10, batch 1024 at rate 3.2, {against(means(cifar, 1024, 3.2), *free)}. So the claim is one about the rates that are borne, and rules that scale the rate with the batch ask for such rates. **A larger batch than
synchronous training bears: does not hold here.** Nobody keeps within a point of the smallest batch at four times that batch. **With small batches it is the other way round** on CIFAR-10 (batch
64: {against(reached["cifar10", 64], *free)}); AN4 shows no difference there.
**Delay-by-one is the fastest where learners are equal: holds on CIFAR-10**, at every batch against both rings of sixteen (batch 64 {pair("cifar10", 64)}, 256 {pair("cifar10", 256)}, 1024 {pair("cifar10", 1024)}), and on AN4
within the spread of seeds ({", ".join(f"{batch} {pair('an4', batch)}" for batch in batches(an4))}). **The randomized ring is better than the fixed one: holds** on CIFAR-10 at every batch, by the disagreement that it leaves (below).

**The cause, tested: disagreement.** Half way through CIFAR-10 with batch 64 at rate .4 the root mean square distance of learners to their mean is, {listed(far, ".2f")}: in the order of what is lost there. A
ring of four nodes, which averages gradients inside nodes first, disagrees least; it loses nothing with small batches ({reached["cifar10", 64]["node-ring"]:.1f}) and fails at the edge like synchronous training ({means(cifar, 1024, 3.2)["node-ring"]:.1f} at batch 1024 and rate 3.2). What
costs a little where steps are noisy keeps a training together where they are too long. So `ADPSGD` stays `replica="rank"`, for large batches at high rates; where a learner sees few examples a step, `replica="node"`
is worth {reached["cifar10", 64]["node-ring"] - reached["cifar10", 64]["random-ring"]:.1f} points over the randomized and {reached["cifar10", 64]["node-ring"] - reached["cifar10", 64]["ring"]:.1f} over the fixed ring of sixteen.

{pictured["batch"]}

{pictured["rate"]}

{pictured["loss"]}

{tables}

{edges}

{real}


Written by `benchmarks/papers_large_batches.py`. Sixteen virtual learners, one exchange a step that lands a step later (DASO: period 4, delay 1), many trainings side by side on one NVIDIA H200: the library's mathematics step
for step (`tests/benchmarks/test_papers_learners.py` compares it with `loosestep.simulate`, to 1e-9 in float64), computed in float32 with TF32 products, models mixed in full precision. {len(results)} trainings.
AN4: the acoustic recipe with 2 bidirectional layers of 128 cells and CTC, SGD with momentum .9, gradients clipped at 5, {epochs["an4"]:g} epochs; the rate climbs from a sixteenth for ten sixteenths of the training, then falls by 1/sqrt(2)
every sixteenth, as the paper's schedule in its 16 epochs. CIFAR-10: 20,000 images brought to 16x16, ResNet-8 with GroupNorm, momentum .9, {epochs["cifar10"]:g} epochs, five of warm-up, cosine to zero. Batches of all seeds of AN4 are
alike in length. Edge tables: one seed where no range is given. Left out for time: further seeds at the smallest batches; rates below .8 at CIFAR-10's two largest batches and at AN4's 128; the paper's network and corpus.
"""
