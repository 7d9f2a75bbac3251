"""What stays on the devices: really over NCCL in a world of one, and between two ranks of one
GPU with gloo standing in.
"""

import os
import threading
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from device import keep_busy, needs_cuda, no_synchronisation
from pool import errors, ranks
from stand_in import near
from test_ranks import train
from torch import nn

import loosestep
from loosestep import Topology
from loosestep.core.collectives.collective import Collective
from loosestep.core.collectives.nccl import NearChannel, find_gpu
from loosestep.core.engines.gradients import GradientAverager
from loosestep.core.messages.sealed_store import lonely_store
from loosestep.core.world import open_world
from loosestep.events import Trace

pytestmark = [
    needs_cuda,
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
    pytest.mark.timeout(120),
]


@pytest.fixture
def channel():
    """One rank's group of NCCL."""
    made = NearChannel(
        [0],
        0,
        name="test",
        store=lonely_store(),
        pulse=None,
        nodes=[0],
        device=torch.device("cuda", 0),
    )
    yield made
    made.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("loosestep")] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_operation_of_a_channel_exists_in_nccl(channel, dtype):
    values = torch.arange(40_000, device="cuda").to(dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(channel.mean(values, None, 1), values)
        assert torch.equal(channel.gather(values)[0], values)
        assert torch.equal(channel.swap(values.view(1, -1))[0], values)
        same = values.clone()
        channel.sum(same)
        channel.broadcast(same, root=0)
        channel.total(same, 1)
        assert torch.equal(same, values)


def test_a_sum_is_queued_and_nobody_waits_for_it(channel):
    values = torch.ones(1 << 20, device="cuda")
    channel.total(values, 1)
    with no_synchronisation():
        start = time.perf_counter()
        keep_busy()
        channel.total(values, 1)
        took = time.perf_counter() - start
    torch.cuda.synchronize()
    assert took < (time.perf_counter() - start) / 3


def test_a_group_that_was_cut_off_fails_at_once_and_the_process_lives_on():
    channel = NearChannel(
        [0],
        0,
        name="cut",
        store=lonely_store(),
        pulse=None,
        nodes=[0],
        device=torch.device("cuda", 0),
    )
    values = torch.ones(8, device="cuda")
    channel.total(values, 1)
    torch.cuda.synchronize()
    channel._cut()
    with pytest.raises(RuntimeError):
        channel.total(values, 1)
    channel.abandon()
    assert float(values.sum()) == 8


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_gradients_over_nccl_are_complete_for_the_compute_stream_while_the_host_runs_ahead(channel):
    torch.manual_seed(0)
    model = Branches().cuda()
    x = torch.randn(64, 512, device="cuda")
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.used.parameters()]
    world = open_world(None, deadline=10)
    comm = Collective(world, Topology([[0]]), trace=Trace(), averages_gradients=True)
    assert comm._g is not None
    comm._g.near_node = channel
    averager = GradientAverager(
        list(model.parameters()),
        comm,
        multiple=1,
        scope=lambda: "node",
        waited=lambda seconds: None,
        worked=lambda share: None,
    )
    channel._last = None
    for _ in range(4):  # the first rounds read a checksum
        model.zero_grad()
        model(x).square().mean().backward()
    assert channel._last is not None  # it went over NCCL
    model.zero_grad()
    with no_synchronisation():
        start = time.perf_counter()
        keep_busy()
        model(x).square().mean().backward()
        took = time.perf_counter() - start
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.cuda.synchronize()
    assert took < (time.perf_counter() - start) / 3
    for parameter, gradient in zip(model.used.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all(p.grad is None for p in model.unused.parameters())
    averager.remove()
    comm.close()
    world.close()


def test_lanes_that_stay_on_the_device_fold_and_are_saved(monkeypatch):
    """A world of one: nobody to talk to, but its snapshot stays where it is."""

    def learn(steps: int, spec: str | None):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run = loosestep.attach(model, optimizer, spec) if spec else None
        for step in range(steps):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if run is not None and step == steps - 1:
                flight = run.state_dict()["flight"]
                assert all(flat.device.type == "cpu" for flat in flight["vector"])
                # its own mean, less itself
                assert all(flat.eq(0).all() for flat in flight["vector"])
        if run is not None:
            assert run.stats["folds"] > 0
            run.finish()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    expected = learn(14, None)
    monkeypatch.setenv("LOOSESTEP_LANES", "nccl")
    torch.testing.assert_close(learn(14, "daso:period=2,delay=1"), expected, rtol=0, atol=0)


def test_what_is_kept_of_an_outer_step_when_the_run_has_ended_is_on_the_host(monkeypatch):
    monkeypatch.setenv("LOOSESTEP_LANES", "nccl")
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loosestep.attach(model, optimizer, "diloco:period=2,delay=1,replica=rank") as run:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 64, device="cuda")).square().mean().backward()
            optimizer.step()
        assert {flat.device.type for flat in run.state["outer"]["theta"]} == {"cuda"}
    kept = run.state_dict()["state"]["outer"]
    assert {flat.device.type for name in ("theta", "momentum") for flat in kept[name]} == {"cpu"}


def stay(rank: int, ways: dict[str, str] | None = None, **arguments):
    with near(rank, **ways or {}) as traffic:
        return train(rank, **arguments), traffic


@pytest.mark.parametrize("uneven", [False, True])
def test_gradients_that_stay_on_a_device_are_those_over_the_host(uneven):
    arguments = {"spec": "allreduce", "nodes": [[0, 1]], "uneven": uneven}
    ours = ranks(2, stay, **arguments)
    theirs = ranks(2, train, **arguments)
    assert torch.equal(ours[0][0]["end"], ours[1][0]["end"])
    torch.testing.assert_close(ours[0][0]["end"], theirs[0]["end"], rtol=1e-4, atol=1e-6)
    for result, traffic in ours:
        assert all(result["unused"])
        assert traffic["inside"] > 0


@pytest.mark.parametrize(
    "spec",
    [
        "daso:period=2,delay=1",
        "localsgd:period=2,delay=2,replica=rank",
        "diloco:period=2,delay=1,replica=rank",
        "delay-by-one:replica=rank",
    ],
)
def test_lanes_that_stay_on_a_device_are_those_over_the_host(spec):
    arguments = {"spec": spec, "nodes": [[0], [1]], "uneven": True}
    ours = ranks(2, stay, ways={"LOOSESTEP_LANES": "nccl"}, **arguments)
    theirs = ranks(2, train, **arguments)
    assert torch.equal(ours[0][0]["end"], ours[1][0]["end"])
    torch.testing.assert_close(ours[0][0]["end"], theirs[0]["end"], rtol=1e-4, atol=1e-6)
    assert ours[0][1]["between"] > 0


def share(rank: int):
    """Nothing stands in: two ranks really see one GPU."""
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(
        model, optimizer, "allreduce", topology=Topology([[0, 1]]), deadline=20
    ) as run:
        model(torch.full((2, 4), 1.0 + rank, device="cuda")).sum().backward()
        return (
            run._engine._comm.stays("world"),
            find_gpu(torch.device("cuda", 0)),
            model.weight.grad.cpu(),
        )


def test_two_ranks_that_share_a_gpu_average_over_the_host_by_themselves():
    (stays, gpu, gradient), (other, same, _) = ranks(2, share)
    assert gpu is not None
    assert gpu == same
    assert not stays
    assert not other
    assert torch.equal(gradient, torch.full((4, 4), 3.0))


def refused(rank: int):
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patch.dict(os.environ, LOOSESTEP_LANES="nccl"):
        loosestep.attach(model, optimizer, "daso", topology=Topology([[0], [1]]), deadline=20)


def test_nccl_lanes_between_two_ranks_of_one_gpu_are_refused():
    for message in errors(2, refused):
        assert "LOOSESTEP_LANES=nccl needs a GPU of its own for each of the ranks 0, 1" in message
