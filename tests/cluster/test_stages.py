"""A model cut into pipeline stages over the ranks of a node, connected to other nodes stage by
stage.
"""

import pytest
import torch
from composed import GRID, mesh
from pool import ranks
from torch import nn

import loosestep

STEPS = 12
MICROBATCHES = 4


def layers(norm: bool = False) -> nn.Sequential:
    """Two stages of different sizes: the first three parts and the others."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(5, affine=False) if norm else nn.Tanh()
    return nn.Sequential(
        nn.Linear(3, 5), middle, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def batch(node: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a node learns from in a step."""
    draw = torch.Generator().manual_seed(100 * node + step)
    return (
        torch.randn(8, 3, generator=draw, dtype=torch.float64),
        torch.randn(8, 2, generator=draw, dtype=torch.float64),
    )


def stage_of(rank: int, model: nn.Sequential):
    from torch.distributed.pipelining import PipelineStage

    index = GRID.local_index(rank)
    part = model[:3] if index == 0 else model[3:]
    return PipelineStage(part, index, 2, torch.device("cpu"), group=mesh().get_group())


def train_cut(rank: int, spec: str, schedule: str, norm: bool = False):
    """This rank's stage after every step, and in the end; and whether an average was shown."""
    from torch.distributed import pipelining

    node = GRID.node_of(rank)
    last = GRID.local_index(rank) == 1
    model = layers(norm)
    if node == 1:  # what the nodes begin with is the first one's
        model.double().apply(
            lambda part: part.reset_parameters() if hasattr(part, "weight") else None
        )
    stage = stage_of(rank, model)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1, momentum=0.9)
    kind = getattr(pipelining, schedule)
    pipeline = kind(stage, n_microbatches=MICROBATCHES, loss_fn=nn.MSELoss())
    seen = []
    with loosestep.attach(stage, optimizer, spec, topology=GRID, deadline=20) as run:
        for step in range(STEPS):
            inputs, targets = batch(node, step)
            optimizer.zero_grad()
            if last:
                losses: list[torch.Tensor] = []
                pipeline.step(target=targets, losses=losses)
                run.observe(torch.stack(losses).mean())
            else:
                pipeline.step(inputs)
            optimizer.step()
            seen.append(flat(stage.submod))
        with run.consensus():
            shown = flat(stage.submod)
    return seen, shown, flat(stage.submod), [b.clone() for b in stage.submod.buffers()]


def train_whole(node: int, spec: str):
    """The same with the model in one piece: a node is a rank."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    with loosestep.attach(model, optimizer, spec) as run:
        for step in range(STEPS):
            inputs, targets = batch(node, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            seen.append(flat(model))
        with run.consensus():
            shown = flat(model)
    return seen, shown, flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize(
    "spec",
    [
        "daso:period=3,delay=2",
        "daso:period=2,delay=1,warmup=4,ramp=parameters",
        "localsgd:period=4,replica=node",
        "adpsgd:replica=node,lockstep=true",
    ],
)
def test_stages_learn_what_the_uncut_model_learns(spec, schedule):
    # a warm-up sends parameters as bfloat16: the last bit of a gradient may decide how they round
    tolerance = 1e-2 if "ramp" in spec else 1e-12
    uncut = loosestep.simulate(lambda rank: train_whole(rank, spec), ranks=2).results
    results = ranks(4, train_cut, spec=spec, schedule=schedule)
    for node in range(2):
        cut = results[2 * node : 2 * node + 2]
        for step in range(STEPS):
            joined = torch.cat([seen[step] for seen, *_ in cut])
            torch.testing.assert_close(joined, uncut[node][0][step], rtol=0, atol=tolerance)
        for which in (1, 2):
            joined = torch.cat([result[which] for result in cut])
            torch.testing.assert_close(joined, uncut[node][which], rtol=0, atol=tolerance)
    apart = [
        not torch.equal(one, other) for one, other in zip(uncut[0][0], uncut[1][0], strict=True)
    ]
    assert any(apart)  # or there was nothing to average


@pytest.mark.parametrize("spec", ["daso:period=2", "adpsgd:replica=node"])
def test_statistics_of_a_stage_are_averaged_with_those_of_the_same_stage(spec):
    results = ranks(4, train_cut, spec=spec, schedule="ScheduleGPipe", norm=True)
    assert [len(buffers) for *_, buffers in results] == [3, 0, 3, 0]
    for (*_, end, mine), (*_, other, theirs) in zip(results[:2], results[2:], strict=True):
        assert torch.equal(end, other)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
    assert 0.01 < float(results[0][-1][1].mean()) < 10  # running variances


def refused(rank: int, wrong: str):
    from torch.distributed.pipelining import PipelineStage

    model = layers()
    index = GRID.local_index(rank)
    node = GRID.node_of(rank)
    cut = 2 if wrong == "cut" and node == 1 else 3
    part = model[:cut] if index == 0 else model[cut:]
    group = None if wrong == "group" else mesh().get_group()
    count = 4 if wrong == "group" else 2
    at = rank if wrong == "group" else index
    if wrong == "order" and node == 1:
        at = 1 - index
    stage = PipelineStage(part, at, count, torch.device("cpu"), group=group)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    spec = {"lockstep": "allreduce", "rank": "adpsgd"}.get(wrong, "daso")
    try:
        loosestep.attach(stage, optimizer, spec, topology=GRID, deadline=20)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("cut", "2.weight: (4, 5) float64"),
        ("order", "'stage 1 of 2' on rank 2 and 'stage 0 of 2' on rank 0"),
        ("group", "runs over ranks 0-3; the ranks of this node are"),
        ("lockstep", "LocalSGD(period=1) in the place of AllReduce"),
        ("rank", "cut into pipeline stages over the ranks of its node, so a node is one learner"),
    ],
)
def test_what_cannot_be_connected_is_refused_with_its_name(wrong, said):
    for message in ranks(4, refused, wrong=wrong):
        assert said in message
