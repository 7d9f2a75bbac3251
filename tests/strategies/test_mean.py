"""The invariant: exchanging never moves the mean of the replicas."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import loosestep
from loosestep import Topology


class Weights(nn.Module):
    """A model whose gradient is whatever the caller says."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.w * gradient).sum()


nodes = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def make_topology(sizes: list[int]) -> Topology:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Topology([range(start, start + size) for start, size in zip(starts, sizes, strict=True)])


def final_replicas(
    spec: str, topology: Topology, steps: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's parameters after `steps` steps, before finish, and the sum of the updates
    each rank made.
    """

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = Weights(5, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        moved = torch.zeros(5, dtype=torch.float64)
        with loosestep.attach(model, optimizer, spec):
            for _ in range(steps):
                gradient = torch.randn(5, generator=generator, dtype=torch.float64).to(dtype)
                optimizer.zero_grad()
                model(gradient).backward()
                moved -= 0.1 * model.w.grad.double()
                optimizer.step()
            replica = model.w.detach().double().clone()
        return replica, moved

    results = loosestep.simulate(work, ranks=topology.world, topology=topology).results
    return torch.stack([x for x, _ in results]), torch.stack([m for _, m in results])


@settings(max_examples=25, deadline=None)
@given(
    sizes=nodes,
    period=st.integers(1, 5),
    data=st.data(),
    steps=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_mean_is_untouched_by_daso_whatever_the_delay_and_the_nodes(
    sizes, period, data, steps, seed
):
    delay = data.draw(st.integers(0, period))
    replicas, moved = final_replicas(
        f"daso:period={period},delay={delay}", make_topology(sizes), steps, seed, torch.float64
    )
    torch.testing.assert_close(replicas.mean(0), moved.mean(0), rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    sizes=nodes,
    period=st.integers(1, 5),
    data=st.data(),
    steps=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_mean_is_untouched_by_local_sgd_whatever_the_delay_and_the_ranks(
    sizes, period, data, steps, seed
):
    delay = data.draw(st.integers(0, period))
    replica = data.draw(st.sampled_from(["rank", "node"]))
    local = data.draw(st.integers(1, 3)) if replica == "node" else 1
    spec = f"localsgd:period={period},delay={delay},replica={replica},local_period={local}"
    replicas, moved = final_replicas(spec, make_topology(sizes), steps, seed, torch.float64)
    torch.testing.assert_close(replicas.mean(0), moved.mean(0), rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    sizes=nodes,
    steps=st.integers(1, 12),
    seed=st.integers(0, 99),
    replica=st.sampled_from(["rank", "node"]),
)
def test_mean_is_untouched_by_delay_by_one(sizes, steps, seed, replica):
    replicas, moved = final_replicas(
        f"delay-by-one:replica={replica}", make_topology(sizes), steps, seed, torch.float64
    )
    torch.testing.assert_close(replicas.mean(0), moved.mean(0), rtol=0, atol=1e-12)


@settings(max_examples=10, deadline=None)
@given(steps=st.integers(4, 12), seed=st.integers(0, 99))
def test_mean_is_kept_to_the_rounding_of_bfloat16_parameters(steps, seed):
    replicas, _ = final_replicas(
        "daso:period=2,delay=1", Topology.grid(2, 1), steps, seed, torch.bfloat16
    )
    reference, _ = final_replicas(
        "daso:period=1000", Topology.grid(2, 1), steps, seed, torch.bfloat16
    )
    torch.testing.assert_close(replicas.mean(0), reference.mean(0), rtol=0, atol=2e-2)


def test_the_published_merge_does_move_the_mean_so_the_test_above_can_fail():
    replicas, moved = final_replicas("daso-paper", Topology.grid(2, 1), 9, 0, torch.float64)
    assert (replicas.mean(0) - moved.mean(0)).abs().max() > 1e-3
