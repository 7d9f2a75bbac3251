"""The rate of AD-PSGD: squared gradient of the mean model against gradients, for 1 to 64 learners and delays of 0 to 8.

    python benchmarks/papers_rate.py [--quick]

All learners make a step together and their models are mixed meanwhile, the papers' form with everybody's updates in it:

    X_{k+1} = T_k X_k - alpha G(X_{k-tau})

with the step of the theorem, alpha = n / (10 L + sigma sqrt(K)) for K gradients of all learners, so a point of a curve is
a training of its own. Two problems: a quadratic with noise, whose L and sigma are known, and a small network.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from common import table
from papers.page import plot, section

LINES = Path(__file__).with_name("results") / "papers-rate.jsonl"
REPEATS = 8
Array = NDArray[np.float64]
Result = dict[str, Any]


class Problem(Protocol):
    """What is minimised. Its constants: L, the variance of a gradient, f(x_0) - f*."""

    smoothness: float
    variance: float
    height: float
    size: int

    def start(self) -> Array: ...

    def gradients(self, models: Array, draw: np.random.Generator) -> Array:
        """Noisy ones, of models [repeats, learners, size]."""

    def squared(self, means: Array) -> Array:
        """The squared norm of the true gradient at [repeats, size]."""


class Quadratic:
    """f(x) = x'Hx / 2 with eigenvalues from 1/50 to 1, gradients with noise of variance 1."""

    smoothness = 1.0
    variance = 1.0

    def __init__(self, size: int = 16) -> None:
        self.size = size
        self._curvature = np.geomspace(1 / 50, 1, size)
        self._start = np.sqrt(
            2 / self._curvature / size
        )  # every direction has as much to lose, 1 in all
        self.height = 1.0

    def start(self) -> Array:
        return self._start

    def gradients(self, models: Array, draw: np.random.Generator) -> Array:
        return models * self._curvature + draw.standard_normal(models.shape) * math.sqrt(
            self.variance / self.size
        )

    def squared(self, means: Array) -> Array:
        return np.asarray(np.square(means * self._curvature).sum(-1))


class Network:
    """Six tanh units learn what four others say about 128 points, one point a gradient: not convex.

    L is the largest curvature met along the gradient on the way down, the variance that at the start.
    """

    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        self._points = draw.standard_normal((128, 4))
        self._answers = np.tanh(
            self._points @ draw.standard_normal((4, 4)) * 1.5
        ) @ draw.standard_normal(4)
        self._units = 6
        self.size = 5 * self._units
        self._start = draw.standard_normal(self.size) * 0.5
        self.smoothness, self.variance, self.height = self._constants()

    def start(self) -> Array:
        return self._start

    def gradients(self, models: Array, draw: np.random.Generator) -> Array:
        which = draw.integers(len(self._points), size=models.shape[:-1])
        return self._slopes(
            models[..., None, :], self._points[which][..., None, :], self._answers[which][..., None]
        )

    def squared(self, means: Array) -> Array:
        return np.asarray(np.square(self._full(means)).sum(-1))

    def _full(self, models: Array) -> Array:
        return self._slopes(models[..., None, :], self._points, self._answers)

    def _slopes(self, models: Array, points: Array, answers: Array) -> Array:
        """Gradients of half the squared error, averaged over the last axis of points."""
        inner = models[..., : 4 * self._units].reshape(*models.shape[:-1], 4, self._units)
        outer = models[..., 4 * self._units :]
        hidden = np.tanh((points[..., None] * inner).sum(-2))
        error = (hidden * outer).sum(-1) - answers
        back = error[..., None] * outer * (1 - hidden**2)
        into = (points[..., None] * back[..., None, :]).reshape(*back.shape[:-1], -1)
        return np.concatenate([into, error[..., None] * hidden], axis=-1).mean(-2)

    def _loss(self, model: Array) -> float:
        inner = model[: 4 * self._units].reshape(4, self._units)
        outer = model[4 * self._units :]
        return float(np.square(np.tanh(self._points @ inner) @ outer - self._answers).mean() / 2)

    def _constants(self) -> tuple[float, float, float]:
        model = self._start.copy()
        steepest = 0.0
        least = self._loss(model)
        every = self._slopes(
            np.broadcast_to(model, (128, 1, self.size)),
            self._points[:, None],
            self._answers[:, None],
        )
        variance = float(np.square(every - every.mean(0)).sum(-1).mean())
        for _ in range(4000):
            slope = self._full(model)
            ahead = model - 1e-4 * slope / np.linalg.norm(slope)
            steepest = max(steepest, float(np.linalg.norm(self._full(ahead) - slope) / 1e-4))
            model -= 0.1 * slope
            least = min(least, self._loss(model))
        return steepest, variance, self._loss(self._start) - least


class Cell(NamedTuple):
    """A training: `total` gradients of all learners together."""

    problem: str
    graph: str
    learners: int
    delay: int
    total: int


def step_size(problem: Problem, learners: int, total: int) -> float:
    """Of the theorem, with one sample a gradient and the same data for all."""
    return learners / (10 * problem.smoothness + math.sqrt(problem.variance * total))


def bound(problem: Problem, total: float) -> float:
    """What the theorem promises of the mean squared gradient."""
    noise = math.sqrt(problem.variance)
    return 20 * problem.height * problem.smoothness / total + 2 * (
        problem.height + problem.smoothness
    ) * noise / math.sqrt(total)


def transient(problem: Problem, learners: int, delay: int, graph: str) -> float:
    """From how many gradients on it promises that: the terms in the delay and in the graph; staleness counts gradients."""
    n = learners
    late = delay * learners
    if n == 1:
        spread = 0.0
    else:
        rho = (
            ring_contraction(n) if graph == "ring" else 1 / 3 - (2 / 3) / (n - 1) if n > 3 else 0.0
        )
        root = math.sqrt(max(rho, 0.0))
        spread = (n - 1) / n * (1 / (1 - rho) + 2 * root / (1 - root) ** 2)
    worst = max(192 * (late * (n - 1) / n + spread), 64 * late**4 / n**2, 1024 * n**2 * spread**2)
    return problem.smoothness**2 * n**2 / problem.variance * worst


def ring_contraction(n: int) -> float:
    return max(((1 + 2 * math.cos(2 * math.pi * k / n)) / 3) ** 2 for k in range(1, n))


def descend(problem: Problem, cell: Cell, seed: int = 0) -> float:
    """The squared gradient at the mean model, averaged over the steps and the repeats; infinite if it grows without end."""
    draw = np.random.default_rng(seed)
    n = cell.learners
    steps = cell.total // n
    alpha = step_size(problem, n, cell.total)
    models = np.broadcast_to(problem.start(), (REPEATS, n, problem.size)).copy()
    past = [models] * (cell.delay + 1)
    total = 0.0
    left = np.roll(np.arange(n), 1)
    right = np.roll(np.arange(n), -1)
    every = 1 if isinstance(problem, Quadratic) else max(1, steps // 256)
    with np.errstate(all="ignore"):
        for step in range(steps):
            if step % every == 0:
                total += float(problem.squared(models.mean(1)).mean())
                if not total < 1e12:
                    return math.inf
            updates = problem.gradients(past[0], draw)
            if n > 3:
                order = draw.permutation(n) if cell.graph == "random-ring" else np.arange(n)
                back = np.argsort(order)
                placed = models[:, order]
                mixed = ((placed + placed[:, left] + placed[:, right]) / 3)[:, back]
            else:
                mixed = np.broadcast_to(models.mean(1, keepdims=True), models.shape)
            models = mixed - alpha * updates
            past = [*past[1:], models]
    return total / -(-steps // every)


def grid(quick: bool) -> list[Cell]:
    """What is trained. The mean of a quadratic's gradients is the gradient at the mean: there the graph changes nothing."""
    learners = (1, 4, 16) if quick else (1, 4, 16, 64)
    delays = (0, 8) if quick else (0, 1, 2, 4, 8)
    totals = [2**power for power in (range(8, 13) if quick else range(8, 18))]
    network = [total for total in totals if quick or total <= 2**16]
    return [
        Cell(name, graph, n, delay, total)
        for name, sizes in (("quadratic", totals), ("network", network))
        for graph in ("random-ring", "ring")
        for n in learners
        for delay in delays
        for total in sizes
        if total >= 4 * n and (graph == "random-ring" or (name == "network" and n > 4))
    ]


def run(quick: bool) -> list[Result]:
    """All cells; those known already are not trained again."""
    problems: dict[str, Problem] = {"quadratic": Quadratic(), "network": Network()}
    known = (
        {}
        if quick or not LINES.exists()
        else {Cell(*r["cell"]): r for r in map(json.loads, LINES.read_text().splitlines())}
    )
    results = []
    for cell in grid(quick):
        found = known.get(cell)
        if found is None:
            problem = problems[cell.problem]
            value = descend(problem, cell)
            found = {
                "cell": list(cell),
                "squared": value if math.isfinite(value) else None,
                "alpha": step_size(problem, cell.learners, cell.total),
                "bound": bound(problem, cell.total),
                "bound_from": transient(problem, cell.learners, cell.delay, cell.graph),
            }
            print(cell, found["squared"], flush=True)
            if not quick:
                with LINES.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        results.append(found)
    return results


# The page --------------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """Mean squared gradients by the number of gradients; None: it grew without end."""

    totals: list[int]
    squared: list[float]


def curve(results: Sequence[Result], problem: str, graph: str, learners: int, delay: int) -> Curve:
    """All trainings that differ only in their length."""
    found = sorted(
        (r["cell"][4], math.inf if r["squared"] is None else r["squared"])
        for r in results
        if r["cell"][:4] == [problem, graph, learners, delay]
    )
    return Curve([total for total, _ in found], [value for _, value in found])


def slope(own: Curve) -> float:
    """Of the last four points, in logarithms."""
    line = np.polyfit(np.log(own.totals[-4:]), np.log(own.squared[-4:]), 1)
    return float(line[0])


def settled(own: Curve, alone: Curve) -> int | None:
    """The fewest gradients from which on a training is within a quarter of one learner's with as many."""
    beside = dict(zip(alone.totals, alone.squared, strict=True))
    far = [total for total, value in zip(*own, strict=True) if value > 1.25 * beside[total]]
    later = [total for total in own.totals if not far or total > max(far)]
    return later[0] if later else None


def draw_curves(axes: Any, results: Sequence[Result], problem: str) -> None:
    """Squared gradients against gradients, a colour a number of learners, a line style a delay."""
    colours = {1: "#444444", 4: "#1f77b4", 16: "#d95f02", 64: "#c2185b"}
    styles = {0: "-", 2: "--", 8: ":"}
    for learners, colour in colours.items():
        for delay, style in styles.items():
            own = curve(results, problem, "random-ring", learners, delay)
            label = f"{learners} learner{'s' * (learners > 1)}" if delay == 0 else None
            values = [value if value < 20 else math.nan for value in own.squared]
            axes.plot(own.totals, values, style, color=colour, label=label, lw=1.4)
    known = [
        r for r in results if r["cell"][0] == problem and r["cell"][2] == 1 and r["cell"][3] == 0
    ]
    known.sort(key=lambda r: r["cell"][4])
    axes.plot(
        [r["cell"][4] for r in known],
        [r["bound"] for r in known],
        color="black",
        lw=0.8,
        label="the theorem's bound",
    )
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(2e-3, 20),
        xlabel="gradients of all learners, K",
        title=problem,
    )
    axes.set_ylabel("mean squared gradient of the mean model")
    axes.legend(frameon=False, fontsize=8)
    axes.text(
        0.03,
        0.04,
        "solid: no delay, dashed: 2 steps, dotted: 8",
        transform=axes.transAxes,
        fontsize=8,
    )


def draw_transients(axes: Any, results: Sequence[Result]) -> None:
    """Where trainings have settled, beside what the theorem asks for."""
    for learners, colour in {4: "#1f77b4", 16: "#d95f02", 64: "#c2185b"}.items():
        delays = []
        measured = []
        promised = []
        for delay in (0, 1, 2, 4, 8):
            alone = curve(results, "quadratic", "random-ring", 1, 0)
            start = settled(curve(results, "quadratic", "random-ring", learners, delay), alone)
            delays.append(delay)
            measured.append(math.nan if start is None else start)
            promised.append(transient(Quadratic(), learners, delay, "random-ring"))
        axes.plot(
            delays, measured, "o-", color=colour, label=f"{learners} learners, measured", lw=1.4
        )
        axes.plot(
            delays, promised, "^:", color=colour, label=f"{learners} learners, theorem", lw=1, ms=4
        )
    axes.set(yscale="log", ylim=(100, 1e18), xlabel="delay of a gradient, steps")
    axes.set(
        title="length of the transient (quadratic)", ylabel="gradients until one learner's curve"
    )
    axes.legend(frameon=False, fontsize=8, ncol=2, loc="upper center")


def rows(results: Sequence[Result]) -> list[list[str]]:
    """A row a number of learners and delay."""
    found = []
    alone = {name: curve(results, name, "random-ring", 1, 0) for name in ("quadratic", "network")}
    for learners in (1, 4, 16, 64):
        for delay in (0, 1, 2, 4, 8):
            cells = [f"{learners}", f"{delay}"]
            for name in ("quadratic", "network"):
                own = curve(results, name, "random-ring", learners, delay)
                start = settled(own, alone[name])
                cells.append("not by the end" if start is None else f"{start:,}")
                done = start is not None and len([t for t in own.totals if t >= start]) >= 4
                cells.append(f"{slope(own):.2f}" if done else "")
                cells.append(
                    f"{own.squared[-1] / alone[name].squared[-1]:.2f}"
                    if own.squared[-1] < 1
                    else "grows"
                )
            cells.append(f"{transient(Quadratic(), learners, delay, 'random-ring'):.1e}")
            found.append(cells)
    return found


def write(results: Sequence[Result]) -> None:
    """The section."""
    network = Network()
    picture = plot(
        "rate",
        lambda axes: (
            draw_curves(axes[0], results, "quadratic"),
            draw_curves(axes[1], results, "network"),
            draw_transients(axes[2], results),
        ),
        alt="Squared gradients against gradients for 1 to 64 learners; length of the transient against the delay",
        panels=3,
        size=(14, 4.4),
    )
    header = [
        "learners", "delay", "quadratic: settled from K", "slope", "at the end, of one learner's",
        "network: settled from K", "slope", "at the end, of one learner's", "theorem: from K (quadratic)",
    ]  # fmt: skip
    ends = [curve(results, "quadratic", "random-ring", n, 0).squared[-1] for n in (1, 4, 16, 64)]
    rings = [
        (
            curve(results, "network", "ring", 64, d).squared[-1],
            curve(results, "network", "random-ring", 64, d).squared[-1],
        )
        for d in (0, 1, 2)
    ]
    section(
        "rate",
        f"""## The rate

**The rate: holds.** Once settled, the mean squared gradient of the mean model falls as K to the power of -.5 on the quadratic (slopes below; the
small network's is a little flatter at its end), for every number of learners and every delay that settles, under the bound. **Linear speed-up: holds.** K
counts everybody's gradients, and with as many of them 64 learners reach {ends[3] / ends[0]:.2f} times what one reaches (16: {ends[2] / ends[0]:.2f}, 4: {ends[1] / ends[0]:.2f}), in a 64th
of the steps each. **The transient: its order holds, its length is far shorter than promised.** What is measured grows with learners and with the delay, as
the theorem says, but settles {shorter(results)} earlier than the theorem asks for. Before that, trainings with the theorem's step do not converge slowly: they
grow, for the step, n/(10 L + sigma sqrt K), is too large for a delayed gradient while K is small. **The graph: holds where it can be seen.** On a quadratic the mean of the
gradients is the gradient at the mean, whatever the graph; on the network the fixed ring of 64 ends at {", ".join(f"{a / b:.2f}" for a, b in rings)} times the randomized ring's
squared gradient (delays 0, 1, 2): after the transient the graph costs nothing.

{picture}

{table(header, rows(results))}

Written by `benchmarks/papers_rate.py`. Every point is a training of its own, X_{{k+1}} = T_k X_k - alpha G(X_{{k-tau}}), {REPEATS} repeats averaged, with the step that the theorem
prescribes for its K; randomized ring (the mean of all up to 3 learners). Settled: from there on within a quarter of one learner without
delay and with as many gradients; K is tried in powers of two, 256 to 131,072 (network: 65,536). Quadratic: 16 dimensions, eigenvalues 1/50 to 1, noise of variance 1, f(x_0) = 1.
Network: six tanh units and four inputs, 128 points; L = {network.smoothness:.1f} is the largest curvature met along gradient descent, variance {network.variance:.1f} that of
single points' gradients at the start, f(x_0) - f* = {network.height:.2f}. A delay of 8 steps of 64 learners is a staleness of 512 gradients.
""",
    )


def shorter(results: Sequence[Result]) -> str:
    """How much shorter measured transients are than the theorem's, least and most, where both are."""
    factors = []
    alone = curve(results, "quadratic", "random-ring", 1, 0)
    for learners in (4, 16, 64):
        for delay in (0, 1, 2, 4, 8):
            start = settled(curve(results, "quadratic", "random-ring", learners, delay), alone)
            if start is not None and start > 256:
                factors.append(transient(Quadratic(), learners, delay, "random-ring") / start)
    return f"{min(factors):.0e} to {max(factors):.0e} times"


def main() -> None:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer gradients, nothing written")
    chosen = parser.parse_args()
    results = run(chosen.quick)
    if not chosen.quick:
        write(results)


if __name__ == "__main__":
    main()
