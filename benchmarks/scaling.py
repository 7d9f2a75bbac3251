"""From 2 to 16 ranks: gradients per second per rank, as far as this machine's cores carry it.

    python benchmarks/scaling.py [--quick]                                            (Linux, root; make peers before)

Nodes of two ranks, 500 Mbit/s each, 1 MB of parameters, 300 ms of emulated compute, long so that
the cores keep up with 16 processes. Two rounds take about 9 minutes.
"""

from __future__ import annotations

from typing import Any

from common import Spread, table, with_share
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
from peers import FREE, Peer

WORK = {"kind": "layers", "megabytes": 1, "seconds": 0.3}
NODES = (1, 2, 4, 8)
ROUNDS = 2
NAMES = (
    "torch DDP",
    "PostLocalSGD, period 4",
    "torchft LocalSGD",
    "decent-dp, ring",
    "allreduce",
    "daso:period=4",
    "delay-by-one",
    "adpsgd:graph=ring",
    "adpsgd:graph=pairs",
)
LEFT_OUT = ("bf16", "PowerSGD")
QUICK = ("torch DDP", "daso:period=4", "adpsgd:graph=ring")


def main() -> None:
    chosen = parser(__doc__, in_time=True).parse_args()
    require_root()
    where = machine()
    print(where, flush=True)
    peers = lineup(chosen, QUICK if chosen.quick else NAMES, forked_only=True)
    peers = [peer for peer in peers if not any(word in peer.name for word in LEFT_OUT)]
    rounds = chosen.rounds or (1 if chosen.quick else ROUNDS)
    sizes = (1, 4) if chosen.quick else NODES
    speeds: dict[tuple[int, str], list[float]] = {
        (nodes, peer.name): [] for nodes in sizes for peer in peers
    }
    for nodes in sizes:
        with Cluster(nodes, 2, patience=300.0) as cluster:
            for number, peer in progress_in_time(
                [(n, p) for n in range(rounds) for p in peers],
                lambda item: f"{2 * nodes} ranks  {item[1].name}",  # noqa: B023
                lambda item: item[0],
                chosen.seconds / len(sizes),
            ):
                block = Block(peer.name, WORK, window=2.5, warmup=0.6, seed=number, deadline=30.0)
                outcome = cluster.run(block, bandwidth="500mbit")
                speeds[nodes, peer.name].append(outcome.speed or float("nan"))
                print(f"      {outcome.speed:7.1f} gradients/s {outcome.failed or ''}", flush=True)
    keep("scaling", ({"nodes": n, "peer": p, "speeds": s} for (n, p), s in speeds.items()), chosen)
    text = (
        "## Scaling: 2 to 16 ranks, nodes of two, 500 Mbit/s, 1 MB, 300 ms of emulated compute\n"
        f"\n{rows_of(peers, sizes, speeds)}\n\n"
    )
    text += picture(peers, sizes, speeds, chosen)
    text += (
        "\nGradients per second of all ranks, median (least-most) of "
        f"{max(map(len, speeds.values()))} round(s), and the share of no communication with as "
        "many ranks in the same round. One node has no link to wait for."
    )
    finish("scaling", text, chosen, where=where, measured=peers)


def rows_of(
    peers: list[Peer], sizes: tuple[int, ...], speeds: dict[tuple[int, str], list[float]]
) -> str:
    rows = [
        [
            peer.label,
            *(with_share(speeds[nodes, peer.name], speeds[nodes, FREE], ".1f") for nodes in sizes),
        ]
        for peer in peers
    ]
    return table(["", *(f"{2 * nodes} ranks" for nodes in sizes)], rows)


def picture(
    peers: list[Peer],
    sizes: tuple[int, ...],
    speeds: dict[tuple[int, str], list[float]],
    options: Any,
) -> str:
    def draw(axes: Any) -> None:
        for peer in peers:
            middle = [Spread(tuple(speeds[nodes, peer.name])).median for nodes in sizes]
            axes.plot(
                [2 * nodes for nodes in sizes],
                middle,
                marker=".",
                label=peer.name,
                linestyle="-" if peer.ours else "--",
            )
        axes.set_xlabel("ranks")
        axes.set_ylabel("gradients per second")
        axes.legend(fontsize=7)

    return plot("scaling", draw, options, title="Scaling with emulated compute")


if __name__ == "__main__":
    main()
