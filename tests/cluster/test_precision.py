"""Mixed precision: bfloat16 parameters, autocast over float32 ones, a GradScaler that meets an
Inf on one node only.
"""

import pytest
import torch
from composed import GRID, batch, build, whole
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology


def low(rank: int, inside: str, form: str, topology: Topology = GRID, device: str = "cpu"):
    model = build(inside, topology=topology, device=device)
    if form == "bfloat16":
        model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with loosestep.attach(model, optimizer, "daso:period=2", topology=topology, deadline=20):
        for step in range(20):
            x = batch(rank, step, inside, device)
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=form == "autocast"):
                loss = (
                    (model(x.to(torch.bfloat16 if form == "bfloat16" else torch.float32)) - 1)
                    .square()
                    .mean()
                )
            assert form != "master weights" or loss.dtype == torch.bfloat16
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, whole(model)


@pytest.mark.parametrize(
    ("inside", "form"),
    [
        ("plain", "bfloat16"),
        ("plain", "autocast"),
        ("fsdp", "bfloat16"),
        ("fsdp", "autocast"),
        ("fsdp, computing in bfloat16", "master weights"),
    ],
)
def test_low_precision_learns_and_ends_identical(inside, form):
    results = ranks(4, low, inside=inside, form=form)
    for losses, end in results:
        assert end.dtype == (torch.bfloat16 if form == "bfloat16" else torch.float32)
        assert torch.equal(end, results[0][1])
        assert sum(losses[-4:]) < sum(losses[:4])


def scaled(
    rank: int,
    inside: str,
    spec: str,
    unlucky: int = 2,
    topology: Topology = GRID,
    device: str = "cpu",
):
    """A rank of the second node meets an Inf at step 3: its node skips that step, the other goes
    on.
    """
    model = build(inside, topology=topology, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=1000)
    with loosestep.attach(model, optimizer, spec, topology=topology, deadline=20) as run:
        for step in range(9):
            x = batch(rank, step, inside, device)
            if rank == unlucky and step == 3:
                x = x * float("inf")
            optimizer.zero_grad()
            scaler.scale((model(x) - 1).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        steps = run.stats["steps"]
    return steps, scaler.get_scale(), whole(model)


@pytest.mark.parametrize(
    ("inside", "spec", "skipping"),
    [
        ("plain", "daso:period=2", (2, 3)),
        ("ddp", "daso:period=2", (2, 3)),
        ("fsdp", "daso:period=2", (2, 3)),
        ("plain", "allreduce", (0, 1, 2, 3)),
        ("plain", "adpsgd", (2,)),
        ("plain", "adpsgd:replica=node", (2, 3)),
    ],
)
def test_an_inf_on_one_node_skips_the_step_of_that_learner_only(inside, spec, skipping):
    skips(ranks(4, scaled, inside=inside, spec=spec), skipping)


def skips(results: list[tuple[int, float, torch.Tensor]], skipping: tuple[int, ...]) -> None:
    for rank, (steps, scale, end) in enumerate(results):
        assert steps == (8 if rank in skipping else 9)
        assert scale == (4.0 if rank in skipping else 8.0)
        assert bool(end.isfinite().all())
        assert torch.equal(end, results[0][2])


def scaled_apart(rank: int, unlucky: int):
    """Two optimizers step in the order in which they were not attached; one of them meets an Inf at
    step 2. What each is followed by: the steps that the run has counted.
    """
    layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in layers]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    counted = []
    with loosestep.attach(
        layers, optimizers[::-1], "daso:period=2", topology=Topology([[0], [1]]), deadline=20
    ) as run:
        for step in range(5):
            for index, layer in enumerate(layers):
                x = batch(rank, step, "plain") * (
                    float("inf") if (step, index) == (2, unlucky) else 1.0
                )
                scaler.scale(layer(x).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
                counted.append(run.stats["steps"])
            scaler.update()
    return counted


@pytest.mark.parametrize("unlucky", [0, 1])
def test_a_step_ends_after_its_last_optimizer_though_a_scaler_has_skipped_one_of_them(unlucky):
    for counted in ranks(2, scaled_apart, unlucky=unlucky):
        assert counted == [0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
