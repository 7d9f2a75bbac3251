"""Each defect of the reference implementation of DASO, as a fact about ours."""

import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
import loosestep.core.collectives.collective as collective
from loosestep import Topology

GRID = [[0, 1], [2, 3]]


def train(
    rank: int, model: nn.Module, spec: str, *, topology=GRID, steps: int = 8, lr: float = 0.1
):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    with loosestep.attach(model, optimizer, spec, topology=Topology(topology), deadline=20) as run:
        for step in range(steps):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        return run.stats


def frozen(rank: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    kept = [p.clone() for p in model[1].parameters()]
    train(rank, model, "daso:period=2")
    return all(torch.equal(a, b) for a, b in zip(kept, model[1].parameters(), strict=True)), [
        p.detach() for p in model.parameters()
    ]


def test_frozen_parameters_do_not_corrupt_the_others():
    results = ranks(4, frozen)
    assert all(kept for kept, _ in results)
    for a, b in zip(results[0][1], results[3][1], strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() < 3


def spanning(rank: int, piece: int):
    collective.PIECE = piece
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2))
        train(rank, model, "daso:period=2")
        return torch.cat([p.detach().flatten() for p in model.parameters()])
    finally:
        collective.PIECE = 1 << 20


def test_a_tensor_may_span_any_number_of_pieces():
    whole = ranks(4, spanning, piece=1 << 20)
    small = ranks(4, spanning, piece=5)
    assert torch.equal(whole[0], small[0])


def pretrained(rank: int):
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.25)
        model.bias.fill_(-3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(model, optimizer, "daso", topology=Topology(GRID)):
        return model.weight.unique().tolist(), model.bias.unique().tolist()


def test_a_pretrained_model_is_not_initialised_again():
    assert ranks(4, pretrained) == [([0.25], [-3.0])] * 4


def scheduled(rank: int):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    rates = []
    with loosestep.attach(model, optimizer, "daso:period=2", topology=Topology(GRID)):
        for step in range(4):
            model(torch.full((1, 4), float(rank + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(1.0)
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_learning_rate_scheduler_works():
    assert ranks(4, scheduled) == [[1.0, 0.5, 0.25, 0.125]] * 4


def cycles(rank: int, spec: str):
    torch.manual_seed(0)
    return train(rank, nn.Linear(4, 2), spec)["exchanges"]


def test_cycling_starts_without_a_warm_up():
    assert ranks(4, cycles, spec="daso:warmup=0,period=2") == [4] * 4
    assert ranks(4, cycles, spec="daso-paper:warmup=0,period=2") == [4] * 4


def shaped(rank: int, topology: list[list[int]], spec: str):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    stats = train(rank, model, spec, topology=topology)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), stats["exchanges"]


@pytest.mark.parametrize(
    "spec", ["daso:period=2", "daso-paper:period=2", "daso:period=2,warmup=2,cooldown=2,total=8"]
)
def test_one_rank_per_node_works(spec):
    results = ranks(4, shaped, topology=[[0], [1], [2], [3]], spec=spec)
    assert all(torch.equal(end, results[0][0]) for end, _ in results)


@pytest.mark.parametrize(
    "spec", ["daso:period=2", "daso-paper:period=2", "daso:period=2,warmup=2,cooldown=2,total=8"]
)
@pytest.mark.parametrize(
    "topology", [[[0, 1, 2], [3]], [[0], [1, 2, 3]], [[0, 2], [1], [3]]], ids=str
)
def test_uneven_nodes_work(spec, topology):
    results = ranks(4, shaped, topology=topology, spec=spec)
    assert all(torch.equal(end, results[0][0]) for end, _ in results)


def weighted(rank: int):
    """Nodes of three and of one rank: the mean counts ranks."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(6))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with loosestep.attach(
        model, optimizer, "daso:period=1,delay=0", topology=Topology([[0, 1, 2], [3]])
    ):
        (model[0] * (0.0 if rank < 3 else -4.0)).sum().backward()
        optimizer.step()
        return model[0].unique().tolist()


def test_a_node_counts_as_its_number_of_ranks():
    assert ranks(4, weighted) == [[1.0]] * 4


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def batch_norm(rank: int, spec: str):
    torch.manual_seed(0)
    model = Normalised()
    train(rank, model, spec, steps=rank % 2 + 7)
    norm = model.norm
    return norm.running_mean, norm.running_var, int(norm.num_batches_tracked)


@pytest.mark.parametrize(
    "spec", ["daso:period=2,delay=2", "allreduce", "localsgd:period=3,delay=3,replica=rank"]
)
def test_batch_norm_statistics_are_the_same_on_every_node_and_stay_positive(spec):
    results = ranks(4, batch_norm, spec=spec)
    for mean, var, count in results:
        assert torch.equal(mean, results[0][0])
        assert torch.equal(var, results[0][1])
        assert (var > 0).all()
        assert count == results[0][2] == 7


def checkpointed(rank: int):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(
        model, optimizer, "daso:window=1,patience=1,period=4", topology=Topology(GRID)
    ) as run:
        for step in range(11):
            model(torch.full((1, 4), float(rank + step))).sum().backward()
            optimizer.step()
            run.observe(1.0)
        state = run.state_dict()["state"]
    return state["period"], state["step"], state["exchanges"]


def test_its_state_is_in_the_checkpoint():
    results = ranks(4, checkpointed)
    assert results == [results[0]] * 4
    assert results[0][:2] == (1, 11)
