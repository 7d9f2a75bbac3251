"""Averaging inside a node, against torch's DistributedDataParallel on the same real processes."""

import pytest
import torch
import torch.distributed as dist
from pool import errors, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loosestep
from loosestep import Topology


class Net(nn.Module):
    """Convolution, normalisation, a tied layer, and two branches of which a batch may use one."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(64, 64)
        self.left = nn.Linear(64, 3)
        self.right = nn.Linear(64, 3)
        self.never = nn.Linear(64, 3)
        self.branches = branches

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x)).mean(1).flatten(1))
        h = torch.relu(self.first(self.first(h)))
        return self.left(h) if left else self.right(h)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.randn(6, 3, generator=generator)


def optimizer_for(name: str, net: nn.Module) -> torch.optim.Optimizer:
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    }
    return kinds[name](net.parameters())


def train(
    rank: int,
    *,
    ddp: bool,
    spec: str = "allreduce",
    topology=None,
    optimizer="sgd",
    clip=False,
    accumulate=1,
    branches=False,
    steps=6,
):
    """The same loop with DDP or with loosestep; every parameter at the end."""
    torch.manual_seed(0)
    net = Net()
    if ddp:  # which refuses parameters that no rank uses
        for p in (*net.never.parameters(), *(() if branches else net.right.parameters())):
            p.requires_grad_(False)
    opt = optimizer_for(optimizer, net)
    model = DistributedDataParallel(net, find_unused_parameters=branches) if ddp else net
    run = (
        None if ddp else loosestep.attach(net, opt, spec, topology=Topology(topology), deadline=10)
    )
    for step in range(steps):
        for micro in range(accumulate):
            x, y = batch(rank, step * accumulate + micro)
            context = (
                (model if ddp else run).no_sync() if micro < accumulate - 1 else torch.enable_grad()
            )
            with context:
                left = (rank + step) % 2 == 0 if branches else True
                (nn.functional.mse_loss(model(x, left), y) / accumulate).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        opt.step()
        opt.zero_grad()
    never = None if ddp else [p.grad for p in net.never.parameters()]
    if run is not None:
        run.finish()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), never


@pytest.mark.parametrize("topology", [[[0, 1]], [[0], [1]]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": True},
        {"accumulate": 3},
        {"optimizer": "adam"},
        {"optimizer": "adamw", "clip": True},
        {"branches": True},
    ],
    ids=str,
)
def test_all_reduce_is_ddp_bit_for_bit_at_two_ranks(topology, options):
    theirs = ranks(2, train, ddp=True, **options)
    ours = ranks(2, train, ddp=False, topology=topology, **options)
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_daso_inside_one_node_is_ddp_bit_for_bit():
    theirs = ranks(2, train, ddp=True, clip=True)
    ours = ranks(2, train, ddp=False, spec="daso", topology=[[0, 1]], clip=True)
    assert torch.equal(ours[0][0], theirs[0][0])


@pytest.mark.parametrize(
    "topology", [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]]
)
def test_all_reduce_is_ddp_to_rounding_at_four_ranks_on_any_nodes(topology):
    theirs = ranks(4, train, ddp=True)
    ours = ranks(4, train, ddp=False, topology=topology)
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-4, atol=1e-6)
    assert all(torch.equal(ours[0][0], other) for other, _ in ours)


def test_local_sgd_every_step_is_synchronous_sgd_to_rounding():
    synchronous = ranks(4, train, ddp=False, topology=[[0, 1], [2, 3]])
    local = ranks(
        4,
        train,
        ddp=False,
        spec="localsgd:period=1,delay=0,replica=rank",
        topology=[[0, 1], [2, 3]],
    )
    torch.testing.assert_close(local[0][0], synchronous[0][0], rtol=1e-4, atol=1e-6)


def test_a_parameter_that_no_rank_uses_keeps_no_gradient():
    for _, never in ranks(2, train, ddp=False, topology=[[0, 1]], branches=True):
        assert never == [None, None]


def sparse(rank: int):
    model = nn.Embedding(4, 2, sparse=True)
    run = loosestep.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        "allreduce",
        topology=Topology([[0, 1]]),
        deadline=5,
    )
    with run:
        model(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused_on_every_rank():
    for message in errors(2, sparse):
        assert "sparse" in message


def buckets(rank: int):
    """More than one bucket, several dtypes."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    model = nn.ParameterList([nn.Parameter(torch.zeros(300_000, dtype=dtype)) for dtype in dtypes])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(model, opt, "allreduce", topology=Topology([[0, 1]]), deadline=10) as run:
        sizes = [b.flat.numel() for b in run._engine.averager._buckets]
        sum((p * (0.5 * (rank + 1))).sum().double() for p in model).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        opt.step()
    return len(sizes), gradients


def test_buckets_of_one_dtype_each_carry_the_mean():
    (count, mine), (_, theirs) = ranks(2, buckets)
    assert count == 3
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    assert {gradient[0].item() for gradient in mine} == {0.75}


def initialised(rank: int):
    """attach inside an initialised program leaves torch.distributed as it was."""
    model = nn.Linear(2, 2)
    with loosestep.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "daso", topology=Topology([[0], [1]])
    ):
        pass
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_process_group_that_was_there_stays_there():
    assert ranks(2, initialised) == [2.0, 2.0]
