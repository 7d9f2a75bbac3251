"""Ranks that make different numbers of steps neither hang nor mismatch."""

import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology

GRID = [[0, 1], [2, 3]]


def build():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_step(model, optimizer, rank, step):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + step))
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def uneven(rank: int, spec: str, steps: list[int], topology: list[list[int]]):
    model, optimizer = build()
    with loosestep.attach(model, optimizer, spec, topology=Topology(topology), deadline=10) as run:
        for step in range(steps[rank]):
            one_step(model, optimizer, rank, step)
    return flat(model), run.stats


SPECS = [
    "allreduce",
    "localsgd:period=2,replica=rank",
    "localsgd:period=3,delay=2,replica=rank",
    "diloco:period=2,delay=1,replica=node",
    "daso:period=2",
    "daso-paper:period=2",
    "delay-by-one:replica=rank",
    "delay-by-one:older_gradient=true,replica=rank",
    "localsgd:start=3,period=2,replica=rank",
    "daso:period=2,warmup=4",
    "daso:period=3,cooldown=4,total=8",
    "localsgd:replica=node,local_period=2,period=2",
]


@pytest.mark.parametrize("steps", [[8, 8, 8, 5], [5, 8, 8, 8], [3, 3, 8, 8], [8, 2, 5, 0]], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_uneven_numbers_of_steps_end_with_identical_parameters(spec, steps):
    results = ranks(4, uneven, spec=spec, steps=steps, topology=GRID)
    assert all(torch.equal(end, results[0][0]) for end, _ in results)
    assert all(end.isfinite().all() for end, _ in results)
    assert [stats["steps"] for _, stats in results] == steps


def linear(rank: int, spec: str, steps: list[int]):
    """A gradient that is the same wherever it is computed: rank + 1."""
    weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    with loosestep.attach(weight, optimizer, spec, deadline=10):
        for _ in range(steps[rank]):
            optimizer.zero_grad()
            weight(torch.full((1, 1), rank + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()
    return weight.weight.item()


@pytest.mark.parametrize("steps", [[10, 3], [3, 10], [8, 0]], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        "localsgd:period=2,delay=1,replica=rank",
        "delay-by-one:replica=rank",
        "delay-by-one:older_gradient=true,replica=rank",
    ],
)
def test_every_step_of_every_rank_is_in_the_mean_at_the_end(spec, steps):
    ends = ranks(2, linear, spec=spec, steps=steps)
    assert ends == pytest.approx([-0.1 * (steps[0] + 2 * steps[1]) / 2] * 2)


@pytest.mark.parametrize(
    "topology", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]]], ids=str
)
@pytest.mark.parametrize(
    "spec",
    [
        "allreduce",
        "daso:period=2",
        "localsgd:start=3,period=2,replica=rank",
        "daso:period=2,warmup=4",
    ],
)
def test_uneven_numbers_of_steps_on_any_nodes(spec, topology):
    results = ranks(4, uneven, spec=spec, steps=[8, 5, 2, 7], topology=topology)
    assert all(torch.equal(end, results[0][0]) for end, _ in results)


@pytest.mark.parametrize("spec", ["allreduce", "daso:period=2", "localsgd:period=2,replica=rank"])
def test_uneven_runs_are_deterministic_too(spec):
    first = ranks(4, uneven, spec=spec, steps=[8, 5, 7, 6], topology=[[0, 1, 2], [3]])
    again = ranks(4, uneven, spec=spec, steps=[8, 5, 7, 6], topology=[[0, 1, 2], [3]])
    assert torch.equal(first[0][0], again[0][0])


def test_a_rank_that_stopped_early_adds_zeros_and_the_divisor_counts_the_others():
    """With one rank stopped, synchronous training is synchronous training of the others."""
    (end, _), *_ = ranks(4, uneven, spec="allreduce", steps=[6, 6, 6, 0], topology=GRID)
    reference, optimizer = build()
    for step in range(6):
        gradients = []
        for rank in range(3):
            reference.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + step))
            (reference(x) - 1).square().mean().backward()
            gradients.append([p.grad.clone() for p in reference.parameters()])
        for position, param in enumerate(reference.parameters()):
            param.grad = sum(g[position] for g in gradients) / 3
        optimizer.step()
    torch.testing.assert_close(end, flat(reference), rtol=1e-5, atol=1e-6)


def epochs(rank: int, spec: str, lengths: list[int]):
    """Loaders of different lengths, the average model evaluated after every epoch, then training
    goes on.
    """
    model, optimizer = build()
    seen = []
    done = 0
    with loosestep.attach(model, optimizer, spec, topology=Topology(GRID), deadline=10) as run:
        for _ in range(3):
            for _ in range(lengths[rank]):
                one_step(model, optimizer, rank, done)
                done += 1
            with run.consensus():
                seen.append(flat(model))
    return seen, flat(model)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("lengths", [[4, 4, 4, 3], [3, 4, 4, 4], [3, 3, 5, 5]], ids=str)
def test_loaders_of_different_lengths_with_an_evaluation_every_epoch(spec, lengths):
    results = ranks(4, epochs, spec=spec, lengths=lengths)
    for seen, end in results:
        assert torch.equal(end, results[0][1])
        assert all(torch.equal(a, b) for a, b in zip(seen, results[0][0], strict=True))


def scaled(rank: int, spec: str, bad: dict[int, list[int]], fused: bool):
    """GradScaler skips the steps in which a rank sees an overflow."""
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    cool: list[torch.Tensor] = []
    with loosestep.attach(model, optimizer, spec, topology=Topology(GRID), deadline=10) as run:
        for step in range(10):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + step))
            loss = (model(x) - 1).square().mean()
            if step in bad.get(rank, []):
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if run.state.get("cooling"):
                cool.append(flat(model))
        steps = run.stats["steps"]
    return flat(model), steps, cool


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "daso:period=2",
        "daso:period=3,delay=3",
        "localsgd:period=3,delay=1,replica=rank",
        "delay-by-one:replica=rank",
        "allreduce",
        "daso:period=2,cooldown=4,total=10",
    ],
)
def test_a_step_skipped_by_grad_scaler_on_one_rank_mismatches_nobody(spec, fused):
    results = ranks(4, scaled, spec=spec, bad={1: [2, 5], 2: [5]}, fused=fused)
    assert all(torch.equal(end, results[0][0]) for end, _, _ in results)
    assert results[0][0].isfinite().all()
    for _, _, cool in results:  # in lockstep, although the nodes scale their losses differently
        assert len(cool) >= 3 if "cooldown" in spec else not cool
        assert all(map(torch.equal, cool, results[0][2]))
    if not fused:
        skipped = {"allreduce": [2, 2, 2, 2]}.get(
            spec, [0, 2, 1, 0] if spec.startswith(("localsgd", "delay")) else [2, 2, 1, 1]
        )
        if "cooldown" not in spec:
            assert [10 - steps for _, steps, _ in results] == skipped
