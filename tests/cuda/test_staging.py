"""Snapshots and folds on a device: in stream order, and nobody waits for them but who must."""

import time

import pytest
import torch
from device import keep_busy, needs_cuda, no_synchronisation
from torch import nn

from loosestep.core.gossip.shadow import Shadow
from loosestep.core.replica.replica import Replica

pytestmark = [needs_cuda, pytest.mark.timeout(60)]


class Mixed(nn.Module):
    """Two dtypes, channels-last and turned weights, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.small = nn.Parameter(torch.randn(300, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(3)


def replica_of(model):
    return Replica(model.cuda(), multiple=4)


def test_a_snapshot_is_of_the_moment_it_was_taken_and_takes_no_time():
    model = nn.Linear(512, 512)
    replica = replica_of(model)
    replica.snapshot()  # memory is made once
    with torch.no_grad():
        before = model.weight.clone()
        start = time.perf_counter()
        keep_busy()
        model.weight.add_(1)
        snapshot = replica.stage()
        model.weight.add_(5)  # the next step does not reach into the snapshot
        took = time.perf_counter() - start
        snapshot.ready()
        waited = time.perf_counter() - start
    assert took < waited / 3, (took, waited)
    torch.testing.assert_close(
        snapshot.vector[0][: 512 * 512], (before + 1).reshape(-1).cpu(), rtol=0, atol=0
    )


def test_a_fold_takes_no_time_and_adds_exactly_once():
    model = nn.Linear(512, 512)
    replica = replica_of(model)
    snapshot = replica.stage()
    snapshot.ready()
    for flat in snapshot.vector:
        flat.fill_(0.5)
    before = model.weight.detach().clone()
    torch.cuda.synchronize()
    start = time.perf_counter()
    keep_busy()
    replica.fold(snapshot.vector)
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    assert took < (time.perf_counter() - start) / 3
    torch.testing.assert_close(model.weight.detach(), before + 0.5, rtol=0, atol=0)


def test_nothing_synchronises():
    model = Mixed()
    replica = replica_of(model)
    replica.snapshot()
    loss = torch.ones((), dtype=torch.float64, device="cuda")
    for _ in range(3):
        with no_synchronisation():
            snapshot = replica.stage((loss, 1))
        snapshot.ready()
        assert float(snapshot.losses[0]) == 1.0
        snapshot.vector[0].zero_()
        with no_synchronisation():
            replica.fold(snapshot.vector)
            replica.assign_buffers(snapshot.buffers)
            replica.blend(snapshot.vector, waited=1, replicas=2)
            replica.assign(snapshot.vector)


def test_every_dtype_and_stride_survives_the_way_to_the_host_and_back():
    model = Mixed()
    replica = replica_of(model)
    before = [p.detach().clone() for p in model.parameters()]
    vector = replica.snapshot()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    replica.assign(vector)
    for p, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, then)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    model.norm.running_var.fill_(7.0)
    snapshot = replica.stage()
    snapshot.ready()
    snapshot.buffers.mul_(2)
    replica.assign_buffers(snapshot.buffers)
    assert (model.norm.running_var == 14).all()


def test_folds_one_after_another_do_not_overtake_each_other():
    model = nn.Linear(2048, 2048)
    replica = replica_of(model)
    before = model.weight.detach().clone()
    for _ in range(20):
        snapshot = replica.stage()
        snapshot.ready()
        snapshot.vector[0].fill_(1.0)
        replica.fold(snapshot.vector)
    torch.testing.assert_close(model.weight.detach(), before + 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gossip_boundaries_lose_nothing_and_do_not_synchronise(dtype):
    params = [
        torch.randn(1000, 300, device="cuda").to(dtype),
        torch.randn(77, device="cuda").to(dtype),
    ]
    shadow = Shadow(params, chunk_bytes=1 << 16)
    start = shadow.flat().astype("float64")
    shadow.boundary(params)
    added = 0
    for step in range(40):
        with no_synchronisation():
            for p in params:
                p.add_(0.25)
            shadow.boundary(params)
        if step % 3 == 0:  # an exchange with somebody who is 2 ahead
            added += 1
            for chunk in range(shadow.chunks):
                value = shadow.read(chunk).value
                shadow.move(chunk, 0.5, mine=value, theirs=value + 2, snapshot=shadow.steps)
    shadow.settle(params)
    shadow.relay.close()
    flat = torch.cat([p.float().reshape(-1) for p in params]).cpu()
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.3}
    )
    torch.testing.assert_close(flat, torch.from_numpy(shadow.flat()), rtol=2**-8, atol=1e-5)
    expected = torch.from_numpy(start).float() + 10 + added
    torch.testing.assert_close(torch.from_numpy(shadow.flat()), expected, **tolerance)
