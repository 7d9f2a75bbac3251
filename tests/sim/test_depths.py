"""The two depths of the simulator agree: clocks without tensors against the real code on virtual
ranks.
"""

from functools import partial

import pytest
import torch
from torch import nn

import loosestep
from loosestep import Cluster, Topology, simulate
from loosestep.sim.predict.machine import Machine
from loosestep.sim.predict.timing import predict

IDEAL = Machine(copy=1e18, operation=0, message=0, meeting=0, payload=1, step=0, gossip=0)
LAYERS = 8
WIDTH = 128
WARMUP = 9
TIMED = 16


def train(rank: int, *, text: str) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
    with loosestep.attach(model, optimizer, text):
        for _ in range(WARMUP + TIMED):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def depths(text: str, topology: Topology, cluster: Cluster) -> tuple[float, float]:
    """Gradients per second: with tensors, and without."""
    events = simulate(
        partial(train, text=text), ranks=topology.world, topology=topology, cluster=cluster
    ).events
    times = {
        (event.rank, event.fields["step"]): event.time for event in events if event.kind == "step"
    }
    speeds = [
        TIMED / (times[rank, WARMUP + TIMED] - times[rank, WARMUP])
        for rank in range(topology.world)
    ]
    sizes = [WIDTH * WIDTH * 4] * LAYERS
    prediction = predict(text, topology, cluster, parameters=sizes, steps=1000, machine=IDEAL)
    return sum(speeds), prediction.gradients_per_second


@pytest.mark.parametrize("bandwidth", ["10mbit", "60mbit"])
@pytest.mark.parametrize("slow", [{}, {3: 3.0}], ids=["equal", "straggler"])
@pytest.mark.parametrize(
    "text",
    [
        "allreduce",
        "localsgd:period=4,replica=rank",
        "daso:period=4,delay=1",
        "daso-paper:period=4",
        "delay-by-one:replica=node",
        "adpsgd:graph=random-ring",
    ],
)
def test_a_step_takes_as_long_with_tensors_as_without(
    text: str, slow: dict[int, float], bandwidth: str
) -> None:
    topology = Topology.grid(2, 2)
    cluster = Cluster(bandwidth=bandwidth, latency="1ms", compute="100ms", slow=slow)
    with_tensors, without = depths(text, topology, cluster)
    assert without == pytest.approx(with_tensors, rel=0.01)


@pytest.mark.parametrize(
    "topology", [Topology.grid(2, 2), Topology.grid(3, 1), Topology([[0, 1, 2], [3, 4]])]
)
@pytest.mark.parametrize("text", ["allreduce", "localsgd:period=1,replica=rank"])
def test_so_does_what_ranks_tell_each_other_when_nothing_else_takes_time(
    text: str, topology: Topology
) -> None:
    cluster = Cluster(bandwidth="1000gbit", latency="20ms", node_latency="1ms", compute="1ms")
    with_tensors, without = depths(text, topology, cluster)
    assert without == pytest.approx(with_tensors, rel=0.01)
