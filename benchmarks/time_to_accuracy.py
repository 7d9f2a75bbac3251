"""Seconds until a task is learnt, by peer, on slow links: digits, CIFAR-10 and AN4 at 100 and 500
Mbit/s.

    python benchmarks/time_to_accuracy.py [--task digits|cifar10|an4] [--quick]       (Linux, root; make peers before)

Two nodes of two ranks. Every peer trains for the same time with the same model, first parameters
and batches, at a learning rate of its own: the one with the best mean quality over a run (of a
loss: over its second half) at the last bandwidth and the first seed, found by climbing from a
common one, in shorter runs where whole ones take long. A rank keeps a copy of its model now and
then, by the clock; afterwards the copies of one moment are averaged over the ranks and judged on
the test set. So nobody is stopped, and local models count as what they would be saved as. CIFAR-10
and AN4 are read from ../shared/data and left out where they are not there. Every run is kept in
results/bench/; with `--earlier` those are not made again. Three seeds unless `--rounds` says
otherwise; after the first only those that are not much slower than the fastest.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from common import Spread, table
from harness import tasks
from harness.cluster import QUIET, Block, Cluster
from harness.script import (
    finish,
    keep,
    lineup,
    machine,
    parser,
    partial,
    plot,
    progress,
    raw,
    require_root,
)
from harness.tasks import TITLES
from peers import FREE, Peer, find

BANDWIDTHS = ("100mbit", "500mbit")


SHARE = 0.95
NEAR = 0.95
"""Of the target: nearly there."""
MUCH_LATER = 1.5
"""Times the fastest."""


@dataclass(frozen=True)
class Plan:
    """How long, how often judged; how long a run to find the learning rate is. `seconds` of
    emulated compute are added to every step.
    """

    lasts: float
    every: float
    search: float
    seconds: float
    higher: bool = True
    skipped: float = 0.0
    """The part of a run that does not count for the choice of the learning rate: a loss falls
    from far above all that matters.
    """
    left_out: tuple[str, ...] = ()

    def target(self, curves: Mapping[str, Sequence[list[float]]]) -> float:
        """95 % of what the best peer (none of ours) has at the end, in the median of its seeds;
        for a loss, that divided by 95 %.
        """
        ends = [
            Spread(tuple(curve[-1] for curve in found)).median
            for peer, found in curves.items()
            if not find(peer).ours
            and all(found)
            and not any(math.isnan(curve[-1]) for curve in found)
        ]
        if not ends:
            return math.nan
        return SHARE * max(ends) if self.higher else min(ends) / SHARE

    def value(self, curve: list[float]) -> float:
        """How fast and how well a run learns: its mean quality; more is better, a run that
        failed or diverged the worst.
        """
        if not curve or math.isnan(curve[-1]):
            return -math.inf
        counted = curve[round(self.skipped * len(curve)) :]
        mean = statistics.mean(quality for quality in counted if not math.isnan(quality))
        return mean if self.higher else -mean

    def near(self, curves: Mapping[str, list[float]], target: float) -> set[str]:
        """The peers worth another seed: not much later at (nearly) the target than the fastest."""
        eased = target * NEAR if self.higher else target / NEAR
        times = {peer: self.reached(curve, eased) for peer, curve in curves.items()}
        return {
            peer
            for peer, seconds in times.items()
            if seconds <= MUCH_LATER * min(times.values()) < math.inf
        }

    def reached(self, qualities: list[float], target: float) -> float:
        """Seconds until the target is met for the first time; inf if it is not."""
        for number, quality in enumerate(qualities):
            if quality >= target if self.higher else quality <= target:
                return (number + 1) * self.every
        return math.inf


PLANS = {
    "digits": Plan(lasts=10.0, every=0.25, search=10.0, seconds=0.03),
    "cifar10": Plan(
        lasts=20.0,
        every=0.5,
        search=10.0,
        seconds=0.04,
        left_out=("cpu_share", "PowerSGD", "PostLocalSGD, period 4"),
    ),
    "an4": Plan(
        lasts=24.0,
        every=1.0,
        search=24.0,
        seconds=0.05,
        higher=False,
        skipped=0.5,
        left_out=("PowerSGD", "period 64", "period=64", "hivemind"),
    ),
}
STEP = 2.5  # from one learning rate to the next
FARTHEST = 3  # steps from where the search begins
SEEDS = 3
TRIES = 4  # of a run that others disturb
LEFT_OUT = ("complete", "allreduce", "localsgd:period=4", "daso-paper", "pairs")
QUICK = ("torch DDP", "daso:period=4,delay=1")
Curves = dict[str, dict[str, list[list[float]]]]
"""By bandwidth and peer: a list of qualities a seed, one every `Plan.every` seconds."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--task", choices=list(PLANS), action="append", help="all three unless given"
    )
    options.add_argument(
        "--earlier", action="store_true", help="do not make the runs of earlier calls again"
    )
    options.add_argument("--bandwidth", action="append", help="as in 100mbit; nothing is written")
    chosen = options.parse_args()
    require_root()
    torch.set_num_threads(2)
    for name in chosen.task or (["digits"] if chosen.quick else list(PLANS)):
        if tasks.missing(name):
            print(f"{name}: {tasks.missing(name)}; left out")
            continue
        measure(name, chosen)


@dataclass(frozen=True)
class Effort:
    """What a run has cost beside its time: gradients of all ranks until its end, and how often
    models met.
    """

    gradients: int
    exchanges_per_step: float


class Trials:
    """The runs of one task, each kept as a line of JSON as soon as it is made."""

    def __init__(self, name: str, plan: Plan, cluster: Cluster, options: Any) -> None:
        self._name = name
        self._plan = plan
        self._cluster = cluster
        self._longest = 3.0 if options.quick else math.inf
        self._file = None if partial(options) else raw(f"time-to-accuracy-{name}-trials")
        self._known: dict[tuple[str, str, float, int, float], list[float]] = {}
        self._efforts: dict[tuple[str, str, float, int, float], Effort] = {}
        self.stolen: list[float] = []
        self.earlier = 0
        if self._file is not None and not options.earlier:
            self._file.unlink(missing_ok=True)
        if self._file is not None and self._file.exists():
            for line in map(json.loads, self._file.read_text().splitlines()):
                key = tuple(line[name] for name in ("bandwidth", "peer", "lr", "seed", "lasts"))
                self._known[key] = line["curve"]
                if "gradients" in line:
                    self._efforts[key] = Effort(line["gradients"], line["exchanges_per_step"])
                self.stolen.append(line["stolen"])
        self.earlier = len(self._known)

    def curve(self, peer: Peer, bandwidth: str, lr: float, seed: int, lasts: float) -> list[float]:
        """Qualities, one every `Plan.every` seconds; none where the peer failed."""
        lasts = min(lasts, self._longest)
        key = (bandwidth, peer.name, lr, seed, lasts)
        if key not in self._known:
            self._known[key], stolen, effort = self._train(peer, bandwidth, lr, seed, lasts)
            self._efforts[key] = effort
            self.stolen.append(stolen)
            if self._file is not None:
                line = {
                    "bandwidth": bandwidth,
                    "peer": peer.name,
                    "lr": lr,
                    "seed": seed,
                    "lasts": lasts,
                    "stolen": stolen,
                    "curve": self._known[key],
                    **asdict(effort),
                }
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return self._known[key]

    def effort(
        self, peer: Peer, bandwidth: str, lr: float, seed: int, lasts: float
    ) -> Effort | None:
        """Of the same run; None of one that was made before this was noted."""
        return self._efforts.get((bandwidth, peer.name, lr, seed, min(lasts, self._longest)))

    def _train(
        self, peer: Peer, bandwidth: str, lr: float, seed: int, lasts: float
    ) -> tuple[list[float], float, Effort]:
        plan = self._plan
        work = {"kind": "task", "name": self._name, "seconds": plan.seconds, "lr": lr}
        block = Block(
            peer.name,
            work,
            window=lasts,
            warmup=0.0,
            seed=seed,
            snapshots=plan.every,
            deadline=lasts + 2,
        )
        outcome = self._cluster.run(block, bandwidth=bandwidth)
        found: list[float] = []
        if not outcome.failed:
            found = tasks.judge(
                self._name, seed, self._cluster.snapshots(outcome), count=round(lasts / plan.every)
            )
        said = f"at the end {found[-1]:.3f}" if found else outcome.failed
        print(
            f"      {peer.name}, {bandwidth}, rate {lr:g}: {said} ({outcome.stolen:.1%} stolen)",
            flush=True,
        )
        effort = Effort(outcome.gradients, round(outcome.exchanges_per_step, 4))
        return found, round(outcome.stolen, 4), effort


def climb(value: Callable[[float], float], begin: float) -> float:
    """The best rate: up from where it begins as long as that helps, else down."""
    best = begin
    for factor in (STEP, 1 / STEP):
        for number in range(1, FARTHEST + 1):
            rate = round(begin * factor**number, 6)
            if value(rate) <= value(best):
                break
            best = rate
        if best != begin:
            break
    return best


def measure(name: str, options: Any) -> None:
    """One section."""
    plan = PLANS[name]
    where = machine()
    print(f"\n{TITLES[name]}\n{where}", flush=True)
    peers = [
        p for p in lineup(options, QUICK if options.quick else (), rare=True) if p.name != FREE
    ]
    if not options.peers:
        peers = [
            peer
            for peer in peers
            if not any(word in peer.name for word in LEFT_OUT + plan.left_out)
        ]
    bandwidths = options.bandwidth or (BANDWIDTHS[1:] if options.quick else BANDWIDTHS)
    seeds = options.rounds or (1 if options.quick else SEEDS)
    tasks.build(name, 0)  # decodes into the cache, once instead of on every rank
    curves: Curves = {bandwidth: {} for bandwidth in bandwidths}
    efforts: dict[str, list[Effort | None]] = {}  # by peer, at the last bandwidth
    rates: dict[str, float] = {}
    with Cluster(
        2, 2, preload="harness.tasks,sklearn.datasets,kaldi_native_fbank", tries=TRIES
    ) as cluster:
        trials = Trials(name, plan, cluster, options)
        for peer in progress(peers, lambda peer: f"the learning rate of {peer.name}"):

            def value(lr: float, peer: Peer = peer) -> float:
                return plan.value(trials.curve(peer, bandwidths[-1], lr, 0, plan.search))

            rates[peer.name] = (
                tasks.RATES[name] if options.quick else climb(value, tasks.RATES[name])
            )
        near = {rate: {peer.name for peer in peers} for rate in bandwidths}
        for seed in progress(range(seeds), lambda seed: f"seed {seed}"):
            for rate in bandwidths:
                for peer in (peer for peer in peers if peer.name in near[rate]):
                    curve = trials.curve(peer, rate, rates[peer.name], seed, plan.lasts)
                    curves[rate].setdefault(peer.name, []).append(curve)
                    if rate == bandwidths[-1]:
                        effort = trials.effort(peer, rate, rates[peer.name], seed, plan.lasts)
                        efforts.setdefault(peer.name, []).append(effort)
            targets = {rate: plan.target(found) for rate, found in curves.items()}
            if seed == 0:
                near = {
                    rate: plan.near({p: c[0] for p, c in found.items()}, targets[rate])
                    for rate, found in curves.items()
                }
    lines = (
        {"rate": rate, "peer": peer, "lr": rates[peer], "curves": found, "target": targets[rate]}
        for rate in bandwidths
        for peer, found in curves[rate].items()
    )
    keep(f"time-to-accuracy-{name}", lines, options)
    section = f"time-to-accuracy-{name}"
    goals = " and ".join(
        f"{target:.1%}" if plan.higher else f"{target:.3f}" for target in targets.values()
    )
    goal = f"a test {'accuracy' if plan.higher else 'loss'} of {goals}"
    text = f"## Time to accuracy: {TITLES[name]}\n\n{rows_of(plan, targets, rates, curves, efforts)}\n\n"
    text += picture(section, plan, targets, peers, curves, options)
    text += (
        f"\nSeconds until the average of the ranks' models has {goal} "
        f"({' and '.join(bandwidths)}: 95 % of what the best peer has at the end there), judged "
        f"every {plan.every:g} s, and its quality after {plan.lasts:g} s; median (least-most) of "
        f"{seeds} seed(s), one for those that with it took more than {MUCH_LATER:g} times as long "
        f"to {NEAR:.0%} of the target as the fastest. Two nodes of two ranks; real compute plus "
        f"{1000 * plan.seconds:.0f} ms of sleep a step; constant learning rate, for every peer "
        "the one with the best mean quality over "
        f"{f'the last {plan.search * (1 - plan.skipped):g} of ' if plan.skipped else ''}{plan.search:g} "
        f"s at {bandwidths[-1]} and the first seed (tried up from {tasks.RATES[name]:g} by "
        f"factors of {STEP:g} as long as that helped, else down); batch "
        f"{tasks.OPTIONS[name]['batch']} a rank. A run during which others took more than "
        f"{QUIET:.0%} of this machine was made again, up to {TRIES} times; the quietest counts "
        f"(they took {statistics.median(trials.stolen):.1%} in the median, "
        f"{max(trials.stolen):.1%} at most)."
        + (
            f" {trials.earlier} of {len(trials.stolen)} runs were made by earlier calls."
            if trials.earlier
            else ""
        )
    )
    finish(section, text, options, where=where, measured=peers, rare=True)


def at_gradients(qualities: Sequence[float], made: int, gradients: float) -> float:
    """The quality after so many of the gradients that were made until the end, at a steady pace."""
    if not qualities or not made:
        return math.nan
    place = min(1.0, gradients / made) * len(qualities)
    return qualities[max(0, math.ceil(place) - 1)]


def rows_of(
    plan: Plan,
    targets: Mapping[str, float],
    rates: dict[str, float],
    curves: Curves,
    efforts: Mapping[str, Sequence[Effort | None]],
) -> str:
    """A pair of columns for each bandwidth; at the last one also how often models met, and the
    quality after as many gradients as the slowest has made.
    """
    rows = []
    last = list(targets)[-1]
    made = [each.gradients for found in efforts.values() for each in found if each is not None]
    fewest = min((count for count in made if count), default=0)
    for peer, lr in rates.items():
        row = [find(peer).label, f"{lr:g}"]
        for rate, target in targets.items():
            found = curves[rate][peer]
            ends = tuple(qualities[-1] if qualities else math.nan for qualities in found)
            row.append(
                Spread(
                    tuple(
                        plan.reached(qualities, target) if qualities else math.nan
                        for qualities in found
                    )
                )
                .text(".2f")
                .replace("inf", "never")
            )
            row.append(Spread(ends).text(".3f"))
        known = [
            (qualities, effort)
            for qualities, effort in zip(curves[last][peer], efforts.get(peer, ()), strict=False)
            if effort is not None
        ]
        met = [effort.exchanges_per_step for _, effort in known]
        equal = [at_gradients(found, effort.gradients, fewest) for found, effort in known]
        row += [Spread(tuple(met)).text(".3f") if met else "-"]
        row += [Spread(tuple(equal)).text(".3f") if equal else "-"]
        rows.append(row)
    headers = [text for rate in targets for text in (f"s to target, {rate}", f"at the end, {rate}")]
    headers += ["exchanges a step", f"after {fewest} gradients"]
    return table(["", "learning rate", *headers], rows)


def picture(
    name: str,
    plan: Plan,
    targets: Mapping[str, float],
    peers: list[Peer],
    curves: Curves,
    options: Any,
) -> str:
    rate, target = next(iter(targets.items()))

    def draw(axes: Any) -> None:
        for peer in peers:
            qualities = curves[rate][peer.name][0]
            moments = [plan.every * (number + 1) for number in range(len(qualities))]
            axes.plot(
                moments,
                qualities,
                label=peer.name,
                linestyle="-" if peer.ours else "--",
                linewidth=1,
            )
        axes.axhline(target, color="black", linewidth=0.5)
        axes.set_xlabel(f"seconds, {rate}, first seed")
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))

    return plot(name, draw, options, title=TITLES[name.removeprefix("time-to-accuracy-")])


if __name__ == "__main__":
    main()
