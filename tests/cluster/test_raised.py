"""A backward that raises and is caught, the usual "skip this batch": training goes on right, or
ends with the reason.
"""

import pytest
import torch
from little import GRID, PAIR
from pool import drop, errors, ranks
from torch import nn

import loosestep

# the large model has several buckets
SMALL = 8
LARGE = 400


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("no memory for this batch")


def net(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*hidden, nn.Linear(width, 1)).double()


def batch(rank: int, step: int, width: int) -> torch.Tensor:
    return torch.randn(
        4, width, generator=torch.Generator().manual_seed(100 * rank + step)
    ).double()


def loss_of(model: nn.Sequential, x: torch.Tensor, raises: bool) -> torch.Tensor:
    hidden = model[0](x)
    if raises:
        hidden = Raises.apply(hidden)  # the layers behind have their gradients by then
    return (model[1:](hidden) - 1).square().mean()


def train(
    rank: int, spec: str, topology: loosestep.Topology, width: int, skipped: dict[int, int]
) -> torch.Tensor:
    model = net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with loosestep.attach(model, optimizer, spec, topology=topology, deadline=10) as run:
        for step in range(7):
            optimizer.zero_grad()
            try:
                loss_of(model, batch(rank, step, width), skipped.get(rank) == step).backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()
        assert run.stats["steps"] == 7 - (rank in skipped)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(width: int, batches: list[list[int]]) -> torch.Tensor:
    """Synchronous training on those batches of each rank."""
    model = net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(len(batches[0])):
        optimizer.zero_grad()
        x = torch.cat([batch(rank, mine[step], width) for rank, mine in enumerate(batches)])
        loss_of(model, x, False).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("width", "skipped"), [(SMALL, 3), (LARGE, 3), (SMALL, 6)])
def test_a_batch_that_all_ranks_skip_is_as_if_it_had_not_been(width, skipped):
    kept = [step for step in range(7) if step != skipped]
    for end in ranks(
        2, train, spec="allreduce", topology=PAIR, width=width, skipped={0: skipped, 1: skipped}
    ):
        torch.testing.assert_close(end, alone(width, [kept, kept]), rtol=1e-9, atol=1e-12)


def test_a_rank_that_skips_a_batch_alone_fills_the_round_with_its_next():
    ends = ranks(2, train, spec="allreduce", topology=PAIR, width=SMALL, skipped={0: 2, 1: 4})
    expected = alone(SMALL, [[0, 1, 3, 4, 5, 6], [0, 1, 2, 3, 5, 6]])
    for end in ends:
        torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-12)


def test_daso_averages_gradients_after_a_batch_was_skipped():
    ends = ranks(
        4,
        train,
        spec="daso:period=2",
        topology=GRID,
        width=SMALL,
        skipped=dict.fromkeys(range(4), 2),
    )
    assert all(torch.equal(end, ends[0]) for end in ends)


# the last batch is not filled by a next one
@pytest.mark.parametrize(("width", "skipped"), [(LARGE, 3), (SMALL, 6)])
def test_a_part_of_the_gradients_of_some_ranks_ends_the_run_with_the_reason(width, skipped):
    for message in errors(
        2, train, spec="allreduce", topology=PAIR, width=width, skipped={1: skipped}
    ):
        assert (
            "backward() raised on rank(s) 1 when a part of its gradients had been averaged"
            in message
        )
    drop(2)


def steps_anyway(rank: int) -> None:
    model = net(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loosestep.attach(model, optimizer, "allreduce", topology=PAIR, deadline=10):
        try:
            loss_of(model, batch(rank, 0, SMALL), True).backward()
        except torch.OutOfMemoryError:
            optimizer.step()


def test_a_step_on_what_a_raised_backward_has_left_is_refused():
    for message in errors(2, steps_anyway):
        assert "what a backward() that raised has left" in message
    drop(2)


def in_backward(rank: int, spec: str) -> torch.Tensor:
    """One optimizer a parameter, stepped by its gradient's hook, as torch's
    `_apply_optimizer_in_backward` does it.
    """
    model = net(SMALL)
    optimizers = {param: torch.optim.SGD([param], lr=0.05) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    with loosestep.attach(model, list(optimizers.values()), spec, topology=PAIR, deadline=10):
        for number in range(4):
            loss_of(model, batch(rank, number, SMALL), False).backward()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_an_optimizer_inside_backward_is_refused_where_gradients_are_averaged():
    for message in errors(2, in_backward, spec="allreduce"):
        assert "the optimizer steps inside backward(), before its gradients are averaged" in message
    drop(2)


def test_an_optimizer_inside_backward_trains_where_parameters_are_averaged():
    first, second = ranks(2, in_backward, spec="localsgd:period=2,replica=rank")
    assert torch.equal(first, second)
