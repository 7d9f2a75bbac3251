"""Seconds until a task is learnt, by peer, on slow links: digits, CIFAR-10 and AN4 at 100 and 500 Mbit/s.

    python benchmarks/time_to_accuracy.py [--task digits|cifar10|an4] [--quick]       (Linux, root; make peers before)

Two nodes of two ranks. Every peer trains for the same time with the same model, first parameters, batches and learning rate. A rank keeps
a copy of its model now and then, by the clock; afterwards the copies of one moment are averaged over the ranks and judged on the test
set. So nobody is stopped, and local models count as what they would be saved as. CIFAR-10 and AN4 are read from ../shared/data and
left out where they are not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from common import Spread, table
from harness import tasks
from harness.cluster import Block, Cluster
from harness.script import finish, keep, lineup, machine, parser, plot, progress, require_root
from harness.tasks import TITLES
from peers import FREE, Peer, find

BANDWIDTHS = ("100mbit", "500mbit")


SHARE = 0.95


@dataclass(frozen=True)
class Plan:
    """How long, how often judged. `seconds` of emulated compute are added to every step."""

    lasts: float
    every: float
    seconds: float
    higher: bool = True

    def target(self, peers_curves: Iterable[list[float]]) -> float:
        """95 % of the best that any peer (none of ours) has at the end of any run; for a loss, that divided by 95 %."""
        ends = [curve[-1] for curve in peers_curves if curve and not math.isnan(curve[-1])]
        if not ends:
            return math.nan
        return SHARE * max(ends) if self.higher else min(ends) / SHARE

    def reached(self, qualities: list[float], target: float) -> float:
        """Seconds until the target is met for the first time; inf if it is not."""
        for number, quality in enumerate(qualities):
            if quality >= target if self.higher else quality <= target:
                return (number + 1) * self.every
        return math.inf


PLANS = {
    "digits": Plan(lasts=10.0, every=0.25, seconds=0.03),
    "cifar10": Plan(lasts=15.0, every=0.5, seconds=0.04),
    "an4": Plan(lasts=24.0, every=1.0, seconds=0.05, higher=False),
}
LEFT_OUT = ("accelerate", "complete", "allreduce", "adpsgd:topology=pairs", "hivemind", "hierarchical")
QUICK = ("torch DDP", "daso:period=4,delay=1")
Curves = dict[tuple[str, str], list[list[float]]]
"""By bandwidth and peer: a list of qualities a seed, one every `Plan.every` seconds."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--task", choices=list(PLANS), action="append", help="all three unless given")
    options.add_argument("--bandwidth", action="append", help="as in 100mbit; nothing is written")
    chosen = options.parse_args()
    require_root()
    torch.set_num_threads(2)
    for name in chosen.task or (["digits"] if chosen.quick else list(PLANS)):
        if tasks.missing(name):
            print(f"{name}: {tasks.missing(name)}; left out")
            continue
        measure(name, chosen)


def measure(name: str, options: Any) -> None:
    """One section."""
    plan, where = PLANS[name], machine()
    print(f"\n{TITLES[name]}\n{where}", flush=True)
    peers = [p for p in lineup(options, QUICK if options.quick else ()) if p.name != FREE]
    if not options.peers:
        peers = [peer for peer in peers if not any(word in peer.name for word in LEFT_OUT)]
    bandwidths = options.bandwidth or (BANDWIDTHS[1:] if options.quick else BANDWIDTHS)
    seeds = options.rounds or 1
    tasks.build(name, 0)  # decodes into the cache, once instead of on every rank
    curves: Curves = {(rate, peer.name): [] for rate in bandwidths for peer in peers}
    work = {"kind": "task", "name": name, "seconds": plan.seconds}
    lasts = 3.0 if options.quick else plan.lasts
    todo = [(seed, rate, peer) for seed in range(seeds) for rate in bandwidths for peer in peers]
    with Cluster(2, 2, preload="harness.tasks,sklearn.datasets,kaldi_native_fbank") as cluster:
        for seed, rate, peer in progress(todo, lambda item: f"seed {item[0]}  {item[1]}  {item[2].name}"):
            block = Block(
                peer.name, work, window=lasts, warmup=0.0, seed=seed, snapshots=plan.every, deadline=lasts + 2
            )
            outcome = cluster.run(block, bandwidth=rate)
            qualities = (
                []
                if outcome.failed
                else tasks.judge(name, seed, cluster.snapshots(outcome), count=round(lasts / plan.every))
            )
            curves[rate, peer.name].append(qualities)
            print(
                f"      at the end {qualities[-1:]} {outcome.failed or ''}",
                flush=True,
            )
    target = plan.target(curve for (_, p), found in curves.items() if not find(p).ours for curve in found)
    lines = ({"rate": r, "peer": p, "curves": c, "target": target} for (r, p), c in curves.items())
    keep(f"time-to-accuracy-{name}", lines, options)
    section = f"time-to-accuracy-{name}"
    goal = f"{target:.1%} test accuracy" if plan.higher else f"a test loss of {target:.3f}"
    text = f"## Time to accuracy: {TITLES[name]}\n\n{rows_of(plan, target, bandwidths, peers, curves)}\n\n"
    text += picture(section, plan, target, bandwidths[0], peers, curves, options)
    text += (
        f"\nSeconds until the average of the ranks' models has {goal} (95 % of the best that a peer reaches in this time), judged every {plan.every:g} s, and its quality after {lasts:g} s; median "
        f"(least-most) of {seeds} seed(s). Two nodes of two ranks; real compute plus {1000 * plan.seconds:.0f} ms of sleep a step; constant learning rate "
        f"{tasks.RATES[name]:g}, batch {tasks.OPTIONS[name]['batch']} a rank."
    )
    finish(section, text, options, where=where, measured=peers)


def rows_of(plan: Plan, target: float, bandwidths: tuple[str, ...], peers: list[Peer], curves: Curves) -> str:
    """A pair of columns for each bandwidth."""
    rows = []
    for peer in peers:
        row = [peer.label]
        for rate in bandwidths:
            found = curves[rate, peer.name]
            ends = tuple(qualities[-1] for qualities in found if qualities)
            row.append(
                Spread(tuple(plan.reached(qualities, target) for qualities in found))
                .text(".2f")
                .replace("inf", "never")
            )
            row.append(Spread(ends).text(".3f") if ends else "failed")
        rows.append(row)
    headers = [text for rate in bandwidths for text in (f"s to target, {rate}", f"at the end, {rate}")]
    return table(["", *headers], rows)


def picture(name: str, plan: Plan, target: float, rate: str, peers: list[Peer], curves: Curves, options: Any) -> str:
    def draw(axes: Any) -> None:
        for peer in peers:
            qualities = curves[rate, peer.name][0]
            moments = [plan.every * (number + 1) for number in range(len(qualities))]
            axes.plot(moments, qualities, label=peer.name, linestyle="-" if peer.ours else "--", linewidth=1)
        axes.axhline(target, color="black", linewidth=0.5)
        axes.set_xlabel(f"seconds, {rate}, first seed")
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))

    return plot(name, draw, options, title=TITLES[name.removeprefix("time-to-accuracy-")])


if __name__ == "__main__":
    main()
