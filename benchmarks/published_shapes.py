"""The shapes of published results, predicted: DASO against synchronous training, AD-PSGD's
speed-up; and how long 4,096 ranks take.

    python benchmarks/published_shapes.py [--quick]

Timing only: no gradient is computed, so this says nothing about accuracy. What is assumed stands in
the tables' notes; it describes the papers' kind of machines (GPUs, RDMA), not this library's
present transport through host memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from common import SIMULATED, machine, options, publish, table
from loosestep import ADPSGD, DASO, DelayByOne, Topology
from loosestep.sim.cluster import Cluster
from loosestep.sim.predict.machine import Machine
from loosestep.sim.predict.timing import Prediction, predict
from loosestep.strategies import AllReduce, Strategy

# A GPU that packs its own gradients and a network card that fetches them: no processor touches the
# bytes of a collective.
GPUS = Machine(
    copy=500e9,
    operation=20e-6,
    message=5e-6,
    meeting=10e-6,
    payload=0.9,
    step=100e-6,
    gossip=0.15e-9,
)
RESNET = 4 * 25_557_032  # bytes
LSTM = 4 * 42_600_000
GANGS = [4, 8, 16, 32, 64]
LSTM_STEP = 0.2  # seconds
UPLINKS = ["10gbit", "25gbit", "50gbit", "100gbit", "200gbit"]
PUBLISHED_GAIN = 0.34
LEARNERS = [1, 2, 4, 8, 16, 32, 64, 128]


# DASO ---------------------------------------------------------------------------------------------


def saved(nodes: int, bandwidth: str, *, steps: int, jitter: float = 0.05) -> float:
    """The share of synchronous training's time that DASO does not need."""
    where = Cluster(
        bandwidth=bandwidth, latency="2us", node_bandwidth="2400gbit", compute="80ms", jitter=jitter
    )
    loose, synchronous = (
        predict(
            strategy, Topology.grid(nodes, 4), where, parameters=RESNET, steps=steps, machine=GPUS
        ).seconds_per_step
        for strategy in (DASO(period=4, delay=1), AllReduce())
    )
    return 1 - loose / synchronous


def bandwidth_for(gain: float, nodes: int, *, steps: int) -> float:
    """The uplink, in Gbit/s, at which so much is saved, by bisection: a faster one saves less."""
    low = 10.0
    high = 200.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high)
            if saved(nodes, f"{middle:.3f}gbit", steps=steps) > gain
            else (low, middle)
        )
    return low


def daso(steps: int) -> str:
    """Less time than synchronous training, by nodes and uplink."""
    shares = {uplink: [saved(nodes, uplink, steps=steps) for nodes in GANGS] for uplink in UPLINKS}
    shares["100gbit, no jitter"] = [
        saved(nodes, "100gbit", steps=steps, jitter=0.0) for nodes in GANGS
    ]
    rows = [[uplink, *(f"{share:.1%}" for share in line)] for uplink, line in shares.items()]
    lines = {uplink: [100 * share for share in shares[uplink]] for uplink in UPLINKS}
    fits = {
        nodes: bandwidth_for(PUBLISHED_GAIN, nodes, steps=steps) for nodes in (GANGS[0], GANGS[-1])
    }
    return (
        "## DASO against synchronous training, 4 to 64 nodes of 4 GPUs\n\nTime saved by "
        "`daso:period=4,delay=1` over `allreduce` at the same number of steps, by what a node's "
        "uplink really carries:\n\n"
        f"{table(['uplink of a node', *(f'{nodes} nodes' for nodes in GANGS)], rows)}\n\n"
        f"{chart('time saved, percent; uplinks from the top: ' + ', '.join(UPLINKS), 'nodes', GANGS, lines)}\n"
        f"\nPublished: up to {PUBLISHED_GAIN:.0%} less training time than Horovod on nodes of 4 "
        "GPUs (Coquelin et al., J. Big Data 9:14). The paper does not say what its baseline got "
        "out of the network, so no row is *its* row: here "
        + " and ".join(f"{rate:.0f} Gbit/s a node at {nodes} nodes" for nodes, rate in fits.items())
        + f" would save {PUBLISHED_GAIN:.0%}. Two things make the gain: bytes that do not fit "
        "behind backward, and waiting for the slowest of all ranks on every step instead of "
        f"every fourth.\n\nAssumed: ResNet-50, {RESNET / 1e6:.0f} MB of float32; 80 ms a "
        "step, a third of it forward; step times vary by 5 % (log-normal, independent); 2 us "
        "latency, 90 % payload, 300 GB/s between the GPUs of a node; gradients in the "
        "buckets of `gradients.py`, sent during backward. Warm-up and cool-down are left "
        "out: they are synchronous and lower the gain of a whole training."
    )


# AD-PSGD ------------------------------------------------------------------------------------------


def speed(
    strategy: Strategy, learners: int, *, steps: int, slow: bool, where: Machine
) -> Prediction:
    """Of so many GPUs, four to a node, the last one ten times slower or not."""
    cluster = Cluster(
        bandwidth="100gbit",
        latency="5us",
        node_bandwidth="1200gbit",
        compute=[LSTM_STEP],
        jitter=0.1,
        slow={learners - 1: 10.0} if slow else {},
    )
    topology = Topology.grid(max(1, learners // 4), min(4, learners))
    return predict(strategy, topology, cluster, parameters=LSTM, steps=steps, machine=where)


def adpsgd(steps: int) -> str:
    """Speed-up over one learner, equal learners and with a slow one."""
    ring = "adpsgd:graph=random-ring"
    variants: dict[str, tuple[Strategy, Machine]] = {
        ring: (ADPSGD(graph="random-ring", slowdown=1.0), GPUS),
        "delay-by-one:replica=node": (DelayByOne(replica="node"), GPUS),
        "allreduce": (AllReduce(), GPUS),
        f"{ring}, through host memory": (ADPSGD(graph="random-ring"), Machine()),
    }
    rows = []
    lines = {}
    rates = {}
    for name, (strategy, where) in variants.items():
        for slow in (False, True):
            results = [
                None if slow and n == 1 else speed(strategy, n, steps=steps, slow=slow, where=where)
                for n in LEARNERS
            ]
            speedups = [
                0.0 if result is None else result.gradients_per_second * LSTM_STEP
                for result in results
            ]
            rows.append(
                [
                    name + (", one 10x slower" if slow else ""),
                    *(f"{s:.1f}" if s else "" for s in speedups),
                ]
            )
            if not slow:
                lines[name] = speedups
                rates[name] = (results[-1].exchanges if results[-1] else 0) / (steps * LEARNERS[-1])
    shown = {name: values for name, values in lines.items() if "host memory" not in name}
    return (
        f"## AD-PSGD: speed-up to {LEARNERS[-1]} learners\n\nGradients per second over those of "
        f"one learner alone:\n\n{table(['strategy', *map(str, LEARNERS)], rows)}\n\n"
        f"{chart('speed-up; from the top: ' + ', '.join(shown), 'learners', LEARNERS, shown)}\n\n"
        "Published, for 2,000 hours of Switchboard: 11.5 hours on 32 V100, 5.2 on 64 with 100 "
        "Gbit/s Ethernet, under 2 on 128 with delay-by-one (Zhang et al., 2019; Cui et al., "
        "2110.11199): near-linear, and rings hardly moved by a slow learner.\n\nAssumed: an LSTM "
        "acoustic model (6 bidirectional layers of 512 cells each way, bottleneck 256, 32,000 "
        f"outputs) of {LSTM / 1e6:.0f} MB; {1000 * LSTM_STEP:.0f} ms a step, varying by 10 % "
        "(log-normal, independent); nodes of 4 GPUs with one uplink of 100 Gbit/s, 5 us latency; "
        "a communication thread with a processor of its own (`cpu_share=1`) that takes 0.15 ns a "
        f"byte, as with RDMA: {rates[ring]:.2f} exchanges per step and learner. Through host "
        "memory, as this library does it today (`Machine()`: 1.2 ns a byte, a tenth of a "
        f"processor), exchanges become rarer, {rates[f'{ring}, through host memory']:.3f} per "
        "step and learner, and steps hardly slower."
    )


# Thousands of ranks -------------------------------------------------------------------------------


def scale(ranks: int, steps: int) -> str:
    """Seconds of one core."""
    rows = []
    where = Cluster(bandwidth="100gbit", latency="5us", compute="150ms", jitter=0.1, slow={5: 3.0})
    for text in (
        "daso:period=4,delay=1",
        "adpsgd:graph=random-ring",
        "adpsgd:replica=node,graph=random-ring",
        "allreduce",
    ):
        wall = time.monotonic()
        cpu = time.process_time()
        result = predict(
            text, Topology.grid(ranks // 4, 4), where, parameters=RESNET, steps=steps, machine=GPUS
        )
        wall = time.monotonic() - wall
        cpu = time.process_time() - cpu
        rows.append(
            [
                f"`{text}`",
                f"{cpu:.1f}",
                f"{wall:.1f}",
                f"{result.gradients_per_second:,.0f}",
                f"{result.efficiency:.2f}",
            ]
        )
    head = [
        "strategy",
        "CPU seconds",
        "wall seconds",
        "predicted gradients/s",
        "of no communication",
    ]
    return (
        f"## How long {ranks:,} ranks take to predict\n\n{table(head, rows)}\n\n{ranks // 4:,} "
        f"nodes of 4 ranks, {steps:,} steps, one core, jitter 10 %, one rank 3x slower."
    )


def chart(title: str, axis: str, ticks: Sequence[int], lines: Mapping[str, Sequence[float]]) -> str:
    """A line chart that Markdown viewers with Mermaid draw, and others show as numbers."""
    top = max(max(values) for values in lines.values())
    drawn = "\n".join(
        f"    line [{', '.join(f'{value:.1f}' for value in values)}]" for values in lines.values()
    )
    return (
        f'```mermaid\nxychart-beta\n    title "{title}"\n    x-axis "{axis}" [{", ".join(map(str, ticks))}]\n'
        f"    y-axis 0 --> {top * 1.05:.0f}\n{drawn}\n```"
    )


def main() -> None:
    """Predict and publish."""
    quick = options(__doc__, quick="fewer steps and ranks").parse_args().quick
    parts = [
        daso(40 if quick else 400),
        adpsgd(40 if quick else 200),
        scale(*((256, 100) if quick else (4096, 1000))),
    ]
    publish("published-shapes", "\n\n".join([*parts, machine() + "."]), quick=quick, path=SIMULATED)


if __name__ == "__main__":
    main()
