"""What communication costs a rank: bytes per gradient on the link, CPU, memory, and the time to
prepare.

    python benchmarks/footprint.py [--quick]                                          (Linux, root; make peers before)

Two nodes of two ranks, 500 Mbit/s, 4 MB of parameters, 50 ms of emulated compute. Bytes are those
that the nodes' cables counted; CPU and memory are those of a rank's processes, daemons included,
less those of a rank that does not communicate.
"""

from __future__ import annotations

import math
from typing import Any

from common import Spread, table
from harness.cluster import Block, Cluster, Outcome
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
from peers import FREE, Peer

WORK = {"kind": "layers", "megabytes": 4, "seconds": 0.05}
QUICK = ("torch DDP", "daso:period=4,delay=1", "adpsgd:graph=ring")


def main() -> None:
    chosen = parser(__doc__, in_time=True).parse_args()
    require_root()
    where = machine()
    print(where, flush=True)
    peers = lineup(chosen, QUICK if chosen.quick else ())
    rounds = chosen.rounds or (1 if chosen.quick else 2)
    found: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    with Cluster(2, 2) as cluster:
        plan = [(number, peer) for number in range(rounds) for peer in peers]
        for number, peer in progress_in_time(
            plan, lambda item: item[1].name, lambda item: item[0], chosen.seconds
        ):
            window = 1.5 if chosen.quick else 4.0
            block = Block(
                peer.name, WORK, window=window, warmup=1.0, seed=number, whole=True, deadline=25.0
            )
            outcome = cluster.run(block, bandwidth="500mbit")
            found[peer.name].append(figures_of(outcome))
            print(
                f"      {outcome.bytes_per_gradient / 1e6:.2f} MB per gradient "
                f"{outcome.failed or ''}",
                flush=True,
            )
    keep("footprint", ({"peer": name, "figures": values} for name, values in found.items()), chosen)
    text = (
        "## Footprint: two nodes of two ranks, 500 Mbit/s, a model of 4 MB, 50 ms of emulated "
        f"compute\n\n{rows_of(peers, found)}\n\n"
    )
    text += picture(peers, found, chosen)
    text += (
        f"\nMedian (least-most) of {number + 1} round(s). Bytes: what all nodes sent over their "
        "cables, per gradient of any rank. CPU: milliseconds per gradient above no "
        "communication. Memory: what a rank's processes have come to own since the peer's "
        "modules were imported, above no communication. Preparing: seconds from the plain model "
        "to the first step, connections included, imports not (hivemind's and Heat's among them: "
        "they cannot be imported beforehand)."
    )
    finish("footprint", text, chosen, where=where, measured=peers)


def figures_of(outcome: Outcome) -> dict[str, float]:
    """nan if a rank failed: its peer's cost is not that of the others."""
    if outcome.failed:
        return dict.fromkeys(("bytes", "cpu", "memory", "prepare"), math.nan)
    prepared = [report["prepared"] for report in outcome.reports.values()]
    return {
        "bytes": outcome.bytes_per_gradient,
        "cpu": outcome.cpu_per_gradient,
        "memory": outcome.memory,
        "prepare": max(prepared, default=float("nan")),
    }


def rows_of(peers: list[Peer], found: dict[str, list[dict[str, float]]]) -> str:
    """Differences are taken round by round."""
    rows = []
    for peer in peers:
        pairs = list(zip(found[peer.name], found[FREE], strict=True))
        cpu = Spread(tuple(1000 * (mine["cpu"] - free["cpu"]) for mine, free in pairs))
        memory = Spread(tuple((mine["memory"] - free["memory"]) / 1e6 for mine, free in pairs))
        if peer.name == FREE:
            own, held = (
                Spread(tuple(factor * mine[key] for mine, _ in pairs)).median
                for key, factor in (("cpu", 1e3), ("memory", 1e-6))
            )
            rows.append([FREE, "0", f"({own:.1f} in all)", f"({held:.0f} in all)", ""])
            continue
        rows.append(
            [
                peer.label,
                Spread(tuple(mine["bytes"] / 1e6 for mine, _ in pairs)).text(".2f"),
                cpu.text(".1f"),
                memory.text(".0f"),
                Spread(tuple(mine["prepare"] for mine, _ in pairs)).text(".2f"),
            ]
        )
    return table(
        ["", "MB per gradient", "CPU ms per gradient", "memory MB per rank", "preparing s"], rows
    )


def picture(peers: list[Peer], found: dict[str, list[dict[str, float]]], options: Any) -> str:
    def draw(axes: Any) -> None:
        middle = {
            p.name: Spread(tuple(one["bytes"] / 1e6 for one in found[p.name])).median
            for p in peers
            if p.name != FREE
        }
        names = sorted(middle, key=lambda name: -middle[name])
        axes.barh(names, [middle[name] for name in names])
        axes.set_xlabel("MB on the link per gradient")

    return plot("footprint", draw, options, title="Traffic per gradient, 4 MB of parameters")


if __name__ == "__main__":
    main()
