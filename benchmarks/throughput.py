"""Gradients per second of all peers on an emulated cluster: by bandwidth, model size, number of
nodes, kind of compute.

    python benchmarks/throughput.py [--part main|bandwidth|size|nodes|real] [--quick]        (Linux, root; make peers before)

Two nodes of two ranks with a 500 Mbit/s cable each, a model of 4 MB and 100 ms of emulated compute,
unless the part changes it. In every round every peer runs once, in processes of its own; start-up,
attaching and lazy initialisation are not timed. The clock decides when a window ends; a pace is
taken over whole periods of the peer's own schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from common import Spread, ratios, table
from harness.cluster import Block, Cluster
from harness.script import (
    finish,
    keep,
    lineup,
    machine,
    parser,
    plot,
    progress_in_time,
    require_root,
)
from peers import DDP, FREE, Peer


@dataclass(frozen=True)
class Case:
    """One column of a table."""

    label: str
    nodes: int = 2
    bandwidth: str | None = "500mbit"
    megabytes: float = 4
    seconds: float = 0.1
    batch: int = 4

    def block(self, peer: Peer, seed: int, window: float) -> Block:
        work = {
            "kind": "layers",
            "megabytes": self.megabytes,
            "seconds": self.seconds,
            "batch": self.batch,
        }
        return Block(peer.name, work, window=window, warmup=0.3, seed=seed, deadline=25.0)


BASE = Case("500 Mbit/s")
PARTS: dict[str, list[Case]] = {
    "main": [BASE],
    "bandwidth": [
        *(
            replace(BASE, label=f"{rate} Mbit/s", bandwidth=f"{rate}mbit")
            for rate in (50, 200, 500)
        ),
        replace(BASE, label="unlimited", bandwidth=None),
    ],
    "size": [replace(BASE, label=f"{size} MB", megabytes=size) for size in (1, 4, 16)],
    "nodes": [replace(BASE, label="4 nodes of 2 ranks", nodes=4)],
    "real": [
        replace(BASE, label=f"{size} MB", megabytes=size, seconds=0.0, batch=256)
        for size in (4, 16)
    ],
}
ROUNDS = {"main": 4, "bandwidth": 2, "size": 2, "nodes": 2, "real": 2}
TITLES = {
    "main": "Throughput: two nodes of two ranks, 500 Mbit/s, 4 MB, 100 ms of emulated compute",
    "bandwidth": "Throughput by bandwidth: two nodes of two ranks, 4 MB, 100 ms of emulated compute",
    "size": "Throughput by model size: two nodes of two ranks, 500 Mbit/s, 100 ms of emulated compute",
    "nodes": "Throughput on four nodes of two ranks, 500 Mbit/s, 4 MB, 100 ms of emulated compute",
    "real": "Throughput with real compute: two nodes of two ranks, 500 Mbit/s, 8 linear layers, batch "
    "256, on this machine's cores",
}
Speeds = dict[tuple[str, str], list[float]]
"""By case and peer: one figure a round; nan where the peer failed."""


def main() -> None:
    options = parser(__doc__, in_time=True)
    options.add_argument(
        "--part", choices=list(PARTS), action="append", help="all parts unless given"
    )
    chosen = options.parse_args()
    require_root()
    for part in chosen.part or (["main"] if chosen.quick else list(PARTS)):
        measure(part, chosen)


def measure(part: str, options: Any) -> None:
    """One section."""
    where = machine()
    print(f"\n{TITLES[part]}\n{where}", flush=True)
    peers = lineup(options, QUICK if options.quick else ())
    if part != "main":  # those that take long to start are measured once
        peers = [peer for peer in peers if not peer.full_only]
    rounds = options.rounds or (1 if options.quick else ROUNDS[part])
    window = 0.6 if options.quick else 1.2
    cases = PARTS[part]
    plan = [(number, case, peer) for number in range(rounds) for case in cases for peer in peers]
    speeds: Speeds = {(case.label, peer.name): [] for case in cases for peer in peers}
    meetings: Speeds = {key: [] for key in speeds}
    failures: dict[str, str] = {}
    with Cluster(cases[0].nodes, 2) as cluster:
        for number, case, peer in progress_in_time(
            plan,
            lambda item: f"round {item[0]}  {item[1].label}  {item[2].name}",
            lambda item: item[0],
            options.seconds,
        ):
            outcome = cluster.run(case.block(peer, number, window), bandwidth=case.bandwidth)
            speed = outcome.speed or float("nan")
            speeds[case.label, peer.name].append(speed)
            meetings[case.label, peer.name].append(outcome.exchanges_per_step)
            if outcome.failed:
                failures[peer.name] = outcome.failed
            print(f"      {speed:7.1f} gradients/s {outcome.failed or ''}", flush=True)
    keep(
        f"throughput-{part}",
        (
            {"case": c, "peer": p, "speeds": s, "exchanges_per_step": meetings[c, p]}
            for (c, p), s in speeds.items()
        ),
        options,
    )
    name = f"throughput-{part}"
    text = f"## {TITLES[part]}\n\n{tables(cases, peers, speeds, meetings)}\n\n"
    text += picture(name, cases, peers, speeds, options)
    text += "".join(f"{name} failed: {reason}.\n" for name, reason in failures.items())
    text += (
        f"\nMedian (least-most) of {number + 1} round(s), seed = round; ratios within a round. "
        f"Gradients per second of all ranks, timed for {window:g} s or two periods of the peer's "
        "schedule after a warm-up. In backticks: loosestep's strategies."
    )
    finish(name, text, options, where=where, measured=peers)


QUICK = (
    "torch DDP",
    "PostLocalSGD, period 4",
    "daso:period=4",
    "delay-by-one",
    "adpsgd:graph=ring",
)


def tables(cases: list[Case], peers: list[Peer], speeds: Speeds, meetings: Speeds) -> str:
    """One case: speeds and ratios with their spreads. Several: a column each. Beside them how often
    models meet, without which a speed tells little.
    """
    if len(cases) > 1:
        rows = [
            [
                peer.label,
                *(_ratio(speeds, case, peer) for case in cases),
                _range([rate for case in cases for rate in meetings[case.label, peer.name]]),
            ]
            for peer in peers
            if peer.name != FREE
        ]
        free = [
            FREE,
            *(
                f"{Spread(tuple(speeds[case.label, FREE])).median:.1f} gradients/s"
                for case in cases
            ),
            "0",
        ]
        heads = ["share of no communication", *(case.label for case in cases), "exchanges a step"]
        return table(heads, [free, *rows])
    label = cases[0].label
    rows = []
    for peer in peers:
        values = speeds[label, peer.name]
        ddp = speeds.get((label, DDP))
        against = ratios(values, ddp).text(".2f") if ddp else ""
        base = ratios(values, speeds[label, FREE]).text(".3f")
        often = _range(meetings[label, peer.name])
        rows.append([peer.label, Spread(tuple(values)).text(".1f"), base, against, often])
    return table(["", "gradients/s", "of no communication", "times DDP", "exchanges a step"], rows)


def _range(rates: list[float]) -> str:
    """Of all rounds and cases: the least and the most."""
    known = [rate for rate in rates if not math.isnan(rate)]
    if not known:
        return "-"
    least = f"{min(known):.2g}"
    most = f"{max(known):.2g}"
    return least if least == most else f"{least}-{most}"


def _ratio(speeds: Speeds, case: Case, peer: Peer) -> str:
    return ratios(speeds[case.label, peer.name], speeds[case.label, FREE]).text(".2f")


def picture(name: str, cases: list[Case], peers: list[Peer], speeds: Speeds, options: Any) -> str:
    """Lines over the cases, or bars."""

    def middle(case: Case, peer: Peer) -> float:
        return ratios(speeds[case.label, peer.name], speeds[case.label, FREE]).median

    def draw(axes: Any) -> None:
        shown = [peer for peer in peers if peer.name != FREE]
        if len(cases) == 1:
            shown = sorted(shown, key=lambda peer: middle(cases[0], peer))
            colours = ["tab:blue" if peer.ours else "tab:gray" for peer in shown]
            axes.barh(
                [peer.name for peer in shown],
                [middle(cases[0], peer) for peer in shown],
                color=colours,
            )
            axes.set_xlabel("share of the speed without communication")
            return
        for peer in shown:
            style = {"linewidth": 2} if peer.ours else {"linewidth": 1, "linestyle": "--"}
            axes.plot(
                [c.label for c in cases],
                [middle(c, peer) for c in cases],
                marker=".",
                label=peer.name,
                **style,
            )
        axes.set_ylabel("share of the speed without communication")
        axes.set_ylim(0, 1.05)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))

    return plot(
        name, draw, options, title=TITLES[name.removeprefix("throughput-")].partition(":")[0]
    )


if __name__ == "__main__":
    main()
