"""Gradients per second when ranks are not equally fast: one 2, 5 and 10 times slower, and all of
them unsteady.

    python benchmarks/stragglers.py [--quick]                                         (make peers before; root is not needed)

Four ranks, one a node, on the loopback; 20 ms of emulated compute, a model of 1 MB. The window of a
peer that exchanges every so many steps is so long that the slow rank exchanges twice in it. Beside
the speed the table says whether the others wait: how close their pace is to the slow rank's own (0
%) or to the pace they have without communication (100 %).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from common import Spread, ratios, table, with_share
from harness import figures
from harness.cluster import Block, Cluster
from harness.script import finish, keep, lineup, machine, parser, plot, progress_in_time
from peers import FREE, Peer

SLOW_RANK = 3
WORK: dict[str, Any] = {"kind": "layers", "megabytes": 1, "seconds": 0.02}
QUICK = ("torch DDP", "decent-dp, ring", "daso:period=4", "adpsgd:graph=ring")


@dataclass(frozen=True)
class Case:
    label: str
    slow: dict[int, float] = field(default_factory=dict)
    jitter: float = 0.0


CASES = [
    Case("equal"),
    *(Case(f"one {factor}x slower", {SLOW_RANK: float(factor)}) for factor in (2, 5, 10)),
    Case("jitter", jitter=0.5),
]


def main() -> None:
    chosen = parser(__doc__, in_time=True).parse_args()
    where = machine()
    print(where, flush=True)
    peers = lineup(chosen, QUICK if chosen.quick else (), forked_only=True)
    rounds = chosen.rounds or (1 if chosen.quick else 2)
    cases = [CASES[0], CASES[3]] if chosen.quick else CASES
    plan = [(number, case, peer) for number in range(rounds) for case in cases for peer in peers]
    paces: dict[tuple[str, str], list[list[float]]] = {}
    with Cluster(4, 1, network=False) as cluster:
        for number, case, peer in progress_in_time(
            plan,
            lambda item: f"round {item[0]}  {item[1].label}  {item[2].name}",
            lambda item: item[0],
            chosen.seconds,
        ):
            window = max(
                1.5, 2.4 * peer.period * WORK["seconds"] * max(case.slow.values(), default=1.0)
            )
            block = Block(
                peer.name,
                WORK,
                window=window,
                warmup=0.3,
                seed=number,
                slow=case.slow,
                jitter=case.jitter,
                deadline=30.0,
            )
            outcome = cluster.run(block)
            paces.setdefault((case.label, peer.name), []).append(outcome.paces)
            print(f"      {outcome.speed:7.1f} gradients/s {outcome.failed or ''}", flush=True)
    keep("stragglers", ({"case": c, "peer": p, "paces": v} for (c, p), v in paces.items()), chosen)
    text = (
        f"## Stragglers: four ranks, 20 ms of emulated compute\n\n{rows_of(cases, peers, paces)}\n"
        "\n"
    )
    text += picture(cases, peers, paces, chosen)
    text += (
        f"\nGradients per second of all ranks, median (least-most) of {number + 1} round(s), seed "
        "= round; the share is that of no communication in the same round and case. Jitter: "
        "every step takes 1 + e times as long, e exponential with mean 0.5. The last column: "
        "with one rank 10 times slower, whether the others wait for it, and their freedom (0 %: "
        "they run at its pace, 100 %: at their own)."
    )
    finish("stragglers", text, chosen, where=where, measured=peers, network=False)


def rows_of(
    cases: list[Case], peers: list[Peer], paces: dict[tuple[str, str], list[list[float]]]
) -> str:
    """One row a peer."""
    rows = []
    for peer in peers:
        row = [peer.label]
        for case in cases:
            speeds = [sum(figure) for figure in paces[case.label, peer.name]]
            base = [sum(figure) for figure in paces[case.label, FREE]]
            row.append(with_share(speeds, base, ".0f"))
        rows.append([*row, freedom_of(peer, paces)])
    return table(["", *(case.label for case in cases), "the others, one 10x slower"], rows)


def freedom_of(peer: Peer, paces: dict[tuple[str, str], list[list[float]]]) -> str:
    """In words, with the share."""
    label = CASES[3].label
    pairs = zip(paces[label, peer.name], paces[label, FREE], strict=True)
    share = Spread(tuple(figures.freedom(mine, alone, SLOW_RANK) for mine, alone in pairs)).median
    return (
        "" if peer.name == FREE or math.isnan(share) else f"{figures.verdict(share)} ({share:.0%})"
    )


def picture(
    cases: list[Case],
    peers: list[Peer],
    paces: dict[tuple[str, str], list[list[float]]],
    options: Any,
) -> str:
    label = CASES[3].label

    def middle(peer: Peer) -> float:
        speeds, base = (
            [sum(figure) for figure in paces[label, name]] for name in (peer.name, FREE)
        )
        return ratios(speeds, base).median

    def draw(axes: Any) -> None:
        shown = sorted((peer for peer in peers if peer.name != FREE), key=middle)
        colours = ["tab:blue" if peer.ours else "tab:gray" for peer in shown]
        axes.barh([peer.name for peer in shown], [middle(peer) for peer in shown], color=colours)
        axes.set_xlabel("share of the speed without communication")

    return plot("stragglers", draw, options, title="One rank of four is ten times slower")


if __name__ == "__main__":
    main()
