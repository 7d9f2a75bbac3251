"""One of four ranks is killed: who survives, and how long do the survivors stand still?

    python benchmarks/kill.py [--quick]                                               (make peers before; root is not needed)

Four ranks on the loopback, 20 ms of emulated compute, a model of 1 MB. Rank 3 gets SIGKILL after 3
seconds; the others are watched for 10 more. Our launcher leaves siblings alone; under torchrun all
of them would end with the node, whatever the library does. Three rounds take about 8 minutes.
"""

from __future__ import annotations

import re
from typing import Any

from common import table
from harness import figures
from harness.cluster import Block, Cluster, Outcome
from harness.script import finish, keep, lineup, machine, parser, plot, progress_in_time
from peers import FREE, Peer

WORK = {"kind": "layers", "megabytes": 1, "seconds": 0.02}
VICTIM = 3
AT = 3.0
AFTER = 10.0
ROUNDS = 3
DEADLINE = 5.0
"""Seconds without a heartbeat after which our collective strategies give a rank up."""
QUICK = ("torch DDP", "daso:period=4", "adpsgd:graph=ring")


def main() -> None:
    chosen = parser(__doc__, in_time=True).parse_args()
    where = machine()
    print(where, flush=True)
    peers = [
        p
        for p in lineup(chosen, QUICK if chosen.quick else (), forked_only=True)
        if p.file != "averagers" or p.period == 4
    ]
    after = 7.0 if chosen.quick else AFTER
    rounds = chosen.rounds or (1 if chosen.quick else ROUNDS)
    results: dict[str, list[tuple[float, float, str]]] = {peer.name: [] for peer in peers}
    with Cluster(4, 1, network=False) as cluster:
        plan = [(number, peer) for number in range(rounds) for peer in peers]
        for number, peer in progress_in_time(
            plan, lambda item: item[1].name, lambda item: item[0], chosen.seconds
        ):
            options = {"deadline": DEADLINE} if peer.ours else {}
            block = Block(
                peer.name,
                WORK,
                window=AT + after - 0.3,
                warmup=0.3,
                seed=number,
                options=options,
                deadline=AT + after + 1,
            )
            outcome = cluster.run(block, kill=(VICTIM, AT))
            results[peer.name].append(fate(outcome))
            print(f"      {story(results[peer.name][-1])}", flush=True)
    keep("kill", ({"peer": name, "results": found} for name, found in results.items()), chosen)
    rows = [row(peer, results[peer.name]) for peer in peers]
    text = (
        "## Kill: SIGKILL to one of four ranks\n\n"
        f"{table(['', 'survivors that go on', 'longest gap', 'then, of the pace before', 'what they say'], rows)}\n"
        "\n"
    )
    text += picture(peers, results, chosen)
    text += (
        f"\nThe worst of {number + 1} run(s). Gap: the longest time without a step of a survivor "
        f"after the kill, in the {after:g} s that were watched. Our collective strategies were "
        f"given a deadline of {DEADLINE:g} s (60 by default), after which they end and name the "
        "rank."
    )
    finish("kill", text, chosen, where=where, measured=peers, network=False)


def fate(outcome: Outcome) -> tuple[float, float, str]:
    """(survivors that still step at the end, the longest gap, pace after against before) of one
    run, or why it ended.
    """
    killed = outcome.kill_moment if outcome.kill_moment is not None else AT
    alive = 0
    gaps = []
    shares = []
    for rank, report in outcome.reports.items():
        moments = report["moments"]
        end = report["end"]
        if rank == VICTIM or rank in outcome.failures or not moments or moments[-1] < end - 4.0:
            continue
        alive += 1
        gaps.append(figures.longest_gap(moments, killed, end))
        before = figures.pace(moments, 0.5, killed)
        after = figures.pace(moments, end - 3.0, end)
        shares.append(after / before if before else 0.0)
    if alive:
        return alive, max(gaps), f"{min(shares):.0%}"
    failed = [moment for rank, moment in outcome.failed_at.items() if rank != VICTIM]
    if failed:
        ended = min(failed)
        return 0, ended - killed, f"end after {ended - killed:.1f} s: {short(outcome.failed or '')}"
    return 0, float("inf"), "hang"


def short(error: str) -> str:
    """The innermost message, without torch's source lines."""
    innermost = re.split(r"(?:RuntimeError|running the callback): ", error)[-1]
    return re.sub(r"\[/\S+\] ?", "", innermost)[:80].replace("|", "/")


def story(found: tuple[float, float, str]) -> str:
    alive, gap, text = found
    return f"{alive:.0f} of 3 go on, longest gap {gap:.2f} s, {text}"


def row(peer: Peer, found: list[tuple[float, float, str]]) -> list[str]:
    """The worst of the runs."""
    alive, gap, text = min(found, key=lambda one: (one[0], -one[1]))
    if peer.name == FREE:
        return [peer.label, "3 of 3", f"{gap:.2f} s", text, ""]
    if alive:
        return [peer.label, f"{alive:.0f} of 3", f"{gap:.2f} s", text, ""]
    return [peer.label, "none", "", "", text]


def picture(
    peers: list[Peer], results: dict[str, list[tuple[float, float, str]]], options: Any
) -> str:
    def draw(axes: Any) -> None:
        worst = {
            peer.name: min(results[peer.name], key=lambda one: (one[0], -one[1])) for peer in peers
        }
        names = sorted(
            (name for name, found in worst.items() if found[0]), key=lambda name: -worst[name][1]
        )
        axes.barh(names, [worst[name][1] for name in names])
        axes.set_xlabel("longest gap of a survivor, seconds (those that are not shown end or hang)")

    return plot("kill", draw, options, title="One of four ranks is killed")


if __name__ == "__main__":
    main()
