"""The published savings and speed-ups, predicted: DASO's whole schedule, and AD-PSGD up to 128
learners.

    python benchmarks/papers_published.py [--quick]

Timing only (`published_shapes.py` says what is assumed of the machines). DASO's warm-up and
cool-down are in it, its plateau rule by its two ends: never halved, and halved down to every step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import options, table
from loosestep import ADPSGD, DASO, Topology
from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.machine import Machine
from loosestep.sim.predict.timing import predict
from loosestep.strategies import AllReduce, Strategy
from papers.page import plot, section
from published_shapes import GANGS, GPUS, LEARNERS, LSTM, LSTM_STEP, PUBLISHED_GAIN, RESNET, UPLINKS

LINES = Path(__file__).with_name("results") / "papers-published.jsonl"
# of the authors' ImageNet training: 4 of warm-up and 4 of cool-down
EPOCHS = 90
RAMP = 8
UNET = 4 * 31_000_000  # bytes: a segmentation network of U-Net's size
STEPS = {"ResNet-50": (RESNET, 0.08), "U-Net": (UNET, 0.35)}  # seconds of a step
GOSSIP = "adpsgd:graph=random-ring"
FULL: dict[str, Any] = {"slowdown": 1.0}  # what makes gossip exchange as often as its rate says


def seconds(
    strategy: Strategy, nodes: int, uplink: str, *, size: int, step: float, steps: int
) -> float:
    """Of a step, with what the strategy makes of it on nodes of four GPUs."""
    where = Cluster(
        bandwidth=uplink, latency="2us", node_bandwidth="2400gbit", compute=[step], jitter=0.05
    )
    made = predict(
        strategy, Topology.grid(nodes, 4), where, parameters=size, steps=steps, machine=GPUS
    )
    return made.seconds_per_step


def saved(nodes: int, uplink: str, network: str, *, period: int, steps: int) -> float:
    """The share of synchronous training's time that a whole schedule does not need."""
    size, step = STEPS[network]

    def lasts(strategy: Strategy) -> float:
        return seconds(strategy, nodes, uplink, size=size, step=step, steps=steps)

    synchronous = lasts(AllReduce())
    cycling = lasts(DASO(period=period, delay=1))
    return (1 - cycling / synchronous) * (EPOCHS - RAMP) / EPOCHS


def whole_schedule(steps: int) -> tuple[list[dict[str, Any]], str]:
    """Savings by network, uplink and nodes; the rows of the table."""
    found = [
        {"network": network, "uplink": uplink, "nodes": nodes, "period": period,
         "saved": saved(nodes, uplink, network, period=period, steps=steps)}
        for network in STEPS
        for uplink in UPLINKS
        for nodes in GANGS
        for period in (4, 1)
    ]  # fmt: skip
    rows = []
    for network in STEPS:
        for uplink in UPLINKS:
            cells = [f"{network}, {uplink}"]
            for nodes in GANGS:
                pair = [
                    r["saved"]
                    for r in found
                    if (r["network"], r["uplink"], r["nodes"]) == (network, uplink, nodes)
                ]
                mark = "**" if pair[0] >= PUBLISHED_GAIN else ""
                cells.append(f"{mark}{pair[0]:.0%}{mark} ({pair[1]:.0%})")
            rows.append(cells)
    return found, table(["", *(f"{nodes} nodes" for nodes in GANGS)], rows)


def speed_ups(steps: int) -> tuple[list[dict[str, Any]], str]:
    """Gradients a second over one learner's, exchanges a step beside them."""
    kinds = {
        "host memory, as the library is": (Machine(), {}),
        "host memory, an exchange a step": (Machine(), FULL),
        "RDMA": (GPUS, FULL),
    }
    found = []
    for title, (machine, more) in kinds.items():
        for slow in (1, 10):
            for learners in LEARNERS:
                if slow > 1 and learners == 1:
                    continue
                cluster = Cluster(
                    bandwidth="100gbit", latency="5us", node_bandwidth="1200gbit",
                    compute=[LSTM_STEP], jitter=0.1, slow={learners - 1: slow} if slow > 1 else {},
                )  # fmt: skip
                topology = Topology.grid(max(1, learners // 4), min(4, learners))
                strategy = ADPSGD(graph="random-ring", **more)
                made = predict(
                    strategy, topology, cluster, parameters=LSTM, steps=steps, machine=machine
                )
                found.append(
                    {"machine": title, "slow": slow, "learners": learners,
                     "speed_up": made.gradients_per_second * LSTM_STEP,
                     "exchanges": made.exchanges / (steps * learners)}
                )  # fmt: skip
    rows = []
    for title in kinds:
        for slow in (1, 10):
            own = [r for r in found if (r["machine"], r["slow"]) == (title, slow)]
            cells = {r["learners"]: f"{r['speed_up']:.1f}" for r in own}
            rows.append(
                [
                    title + (", one 10x slower" if slow > 1 else ""),
                    *(cells.get(n, "") for n in LEARNERS),
                    f"{own[-1]['exchanges']:.3f}",
                ]
            )
    return found, table(["", *map(str, LEARNERS), "exchanges a step, 128"], rows)


def draw(axes: Any, daso: list[dict[str, Any]], gossip: list[dict[str, Any]]) -> None:
    """Savings against the uplink, speed-ups against learners."""
    for place, network in zip(axes[:2], STEPS, strict=True):
        for nodes, colour in zip(
            GANGS, ("#9ecae1", "#6baed6", "#3182bd", "#08519c", "#08306b"), strict=True
        ):
            own = [r for r in daso if r["network"] == network and r["nodes"] == nodes]
            at = [int(r["uplink"].removesuffix("gbit")) for r in own if r["period"] == 4]
            high = [100 * r["saved"] for r in own if r["period"] == 4]
            place.plot(at, high, "o-", color=colour, ms=3.5, label=f"{nodes} nodes of 4")
        place.axhline(100 * PUBLISHED_GAIN, color="#d95f02", lw=1, label="published: up to 34 %")
        place.set(
            xscale="log", xlabel="uplink of a node, Gbit/s", ylabel="time saved, %", title=network
        )
        place.set_xticks(at, [str(value) for value in at])
        place.minorticks_off()
        place.legend(frameon=False, fontsize=8)
    styles = zip(
        dict.fromkeys(r["machine"] for r in gossip), ("#d95f02", "#7b3fa0", "#1f77b4"), strict=True
    )
    for title, colour in styles:
        for slow, style in ((1, "-"), (10, ":")):
            own = [r for r in gossip if (r["machine"], r["slow"]) == (title, slow)]
            axes[2].plot(
                [r["learners"] for r in own],
                [r["speed_up"] for r in own],
                style,
                color=colour,
                lw=1.5,
                label=f"{title}: {own[-1]['exchanges']:.2f} a step" if slow == 1 else None,
            )
    axes[2].plot(LEARNERS, LEARNERS, color="black", lw=0.6)
    axes[2].set(
        xscale="log",
        yscale="log",
        xlabel="learners",
        ylabel="speed-up",
        title="AD-PSGD, randomized ring",
    )
    axes[2].set_xticks(LEARNERS, [str(n) for n in LEARNERS])
    axes[2].minorticks_off()
    axes[2].legend(frameon=False, fontsize=8)


def main() -> None:
    """Predict, then write the page."""
    chosen = options(__doc__, quick="few steps").parse_args()
    steps = 50 if chosen.quick else 400
    daso, savings = whole_schedule(steps)
    gossip, speeds = speed_ups(steps)
    print(savings, speeds, sep="\n\n")
    if chosen.quick:
        return
    LINES.write_text("".join(json.dumps(line) + "\n" for line in (*daso, *gossip)))
    picture = plot(
        "published",
        lambda axes: draw(axes, daso, gossip),
        alt="Time saved by DASO against the uplink; speed-up of AD-PSGD against learners",
        panels=3,
        size=(14, 4.2),
    )
    where = sorted(
        {
            r["uplink"]
            for r in daso
            if r["saved"] >= PUBLISHED_GAIN and r["period"] == 4 and r["network"] == "ResNet-50"
        },
        key=lambda text: int(text.removesuffix("gbit")),
    )
    unet = max(
        r["saved"]
        for r in daso
        if r["network"] == "U-Net" and r["uplink"] == "100gbit" and r["period"] == 4
    )
    most = {
        uplink: max(
            r["saved"]
            for r in daso
            if r["uplink"] == uplink and r["network"] == "ResNet-50" and r["period"] == 4
        )
        for uplink in ("50gbit", "100gbit", "200gbit")
    }
    last = {r["machine"]: r for r in gossip if r["learners"] == LEARNERS[-1] and r["slow"] == 1}
    ours, full, rdma = last.values()
    section(
        "published",
        f"""## The published machines, with warm-up and cool-down

**Up to 34 % less time: holds where the network is slow.** With 4 of 90 epochs of warm-up and 4 of cool-down in lockstep, DASO saves {PUBLISHED_GAIN:.0%} and more of ResNet-50's training on
uplinks of {", ".join(where)}; on 50 Gbit/s at most {most["50gbit"]:.0%}, on 100 Gbit/s {most["100gbit"]:.0%} and on 200 Gbit/s {most["200gbit"]:.0%}. The U-Net, whose steps are long for its
bytes, gains {unet:.0%} at most on 100 Gbit/s. In brackets: the plateau rule has halved the period down to every step; at 10 Gbit/s half of the gain is gone, from 25 Gbit/s on nothing, for what is saved there
is not the bytes but waiting for the slowest rank. **Linear speed-up to 128 learners: holds, but at which exchange rate?** {rdma["speed_up"]:.1f} of 128 with
RDMA and {rdma["exchanges"]:.2f} exchanges a step; through host memory, as this library is, {ours["speed_up"]:.1f} with {ours["exchanges"]:.3f} exchanges a step; asking for one a step, {full["speed_up"]:.1f}
with {full["exchanges"]:.2f}. Speed-up without its exchange rate says nothing about learning.

{picture}

Share of synchronous training's time saved by the whole schedule (period 4 throughout; in brackets period 1 throughout):

{savings}

Gradients a second over one learner's:

{speeds}

Written by `benchmarks/papers_published.py`: predictions, {steps} steps each, no measurement; assumptions as in [SIMULATED.md](SIMULATED.md) (nodes of 4 GPUs, 80 ms a step of ResNet-50, jitter 5 %; LSTM of
{LSTM / 1e6:.0f} MB, {1000 * LSTM_STEP:.0f} ms a step, jitter 10 %, 100 Gbit/s). U-Net: {UNET / 1e6:.0f} MB, 350 ms a step, assumed. Host memory: `Machine()`, {1e9 * Machine().gossip:.1f} ns of processor a byte of gossip.
""",
    )


if __name__ == "__main__":
    main()
