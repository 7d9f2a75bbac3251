"""DiLoCo against the algorithm written down with torch's own outer optimizer."""

import pytest
import torch
from test_mean import Weights

import loosestep
from loosestep import DiLoCo, Topology

SIZE = 7
STEPS = 17
LR = 0.1
TWO_BY_TWO = Topology([[0, 1], [2, 3]])


def gradient(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def train(rank: int, spec: str) -> torch.Tensor:
    """The parameters after every step."""
    model = Weights(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    seen = []
    with loosestep.attach(model, optimizer, spec):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(gradient(rank, step)).backward()
            optimizer.step()
            seen.append(model.w.detach().clone())
    return torch.stack(seen)


def published(
    learners: list[list[int]], *, period: int, delay: int, lr: float, momentum: float
) -> list[torch.Tensor]:
    """The same for every learner (some ranks that share gradients): inner SGD, outer SGD with
    Nesterov momentum.
    """
    replicas = [torch.zeros(SIZE, dtype=torch.float64) for _ in learners]
    theta = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    outer = torch.optim.SGD([theta], lr=lr, momentum=momentum, nesterov=momentum > 0)
    seen: list[list[torch.Tensor]] = [[] for _ in learners]
    snapshots = []
    taken = -1
    for step in range(STEPS):
        for replica, ranks in zip(replicas, learners, strict=True):
            replica -= LR * torch.stack([gradient(rank, step) for rank in ranks]).mean(0)
        # what is in flight lands before the next snapshot, or with it if nothing is delayed
        for due in (False, True):
            if snapshots and step - taken >= delay:
                theta.grad = theta.detach() - torch.stack(snapshots).mean(0)
                outer.step()
                for replica, snapshot in zip(replicas, snapshots, strict=True):
                    replica += theta.detach() - snapshot
                snapshots = []
            if not due and (step + 1) % period == 0:
                snapshots = [replica.clone() for replica in replicas]
                taken = step
        for replica, list_ in zip(replicas, seen, strict=True):
            list_.append(replica.clone())
    return [torch.stack(list_) for list_ in seen]


@pytest.mark.parametrize("replica", ["rank", "node"])
@pytest.mark.parametrize(("period", "delay"), [(4, 0), (4, 2), (3, 3), (1, 0), (5, 1)])
def test_every_step_is_the_published_one(replica: str, period: int, delay: int) -> None:
    spec = f"diloco:period={period},delay={delay},outer_lr=0.6,outer_momentum=0.8,replica={replica}"
    results = loosestep.simulate(
        lambda rank: train(rank, spec), ranks=4, topology=TWO_BY_TWO
    ).results
    learners = [[0], [1], [2], [3]] if replica == "rank" else [[0, 1], [2, 3]]
    expected = published(learners, period=period, delay=delay, lr=0.6, momentum=0.8)
    for learner, trajectory in zip(learners, expected, strict=True):
        for rank in learner:
            torch.testing.assert_close(results[rank], trajectory, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 2])
def test_an_outer_step_of_one_without_momentum_is_local_sgd(delay: int) -> None:
    outer, plain = (
        loosestep.simulate(
            lambda rank, spec=spec: train(rank, spec), ranks=4, topology=TWO_BY_TWO
        ).results
        for spec in (
            f"diloco:period=4,delay={delay},outer_lr=1,outer_momentum=0",
            f"localsgd:period=4,delay={delay}",
        )
    )
    torch.testing.assert_close(torch.stack(outer), torch.stack(plain), rtol=0, atol=1e-12)


def test_each_rank_of_a_node_keeps_its_part_of_theta_and_momentum() -> None:
    def kept(rank: int) -> list[int]:
        model = Weights(8)
        with loosestep.attach(
            model, torch.optim.SGD(model.parameters(), lr=LR), DiLoCo(replica="node")
        ) as run:
            return [flat.numel() for vector in run.state["outer"].values() for flat in vector]

    assert loosestep.simulate(kept, ranks=4, topology=TWO_BY_TWO).results == [[4, 4]] * 4


def test_a_checkpoint_holds_the_outer_state_of_the_exchange_in_flight() -> None:
    def saved(rank: int) -> torch.Tensor:
        model = Weights(SIZE)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with loosestep.attach(model, optimizer, "diloco:period=1,delay=1") as run:
            model(gradient(rank, 0)).backward()
            optimizer.step()
            return run.state_dict()["state"]["outer"]["theta"][0]

    slow = loosestep.Cluster(bandwidth="1kbit")  # the exchange takes a while
    for theta in loosestep.simulate(saved, ranks=2, cluster=slow).results:
        assert theta.count_nonzero() == SIZE


def test_ranks_that_missed_steps_keep_their_own_part_of_the_outer_state() -> None:
    def part(rank: int) -> torch.Tensor:
        model = Weights(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with loosestep.attach(model, optimizer, "diloco:period=2,replica=node") as run:
            for step in range((6, 3, 6, 6)[rank]):
                optimizer.zero_grad()
                model(gradient(rank, step)[:1] * torch.arange(1, 9)).backward()
                optimizer.step()
            with run.consensus():  # rank 1 takes over what its node has learned meanwhile
                return run.state["outer"]["theta"][0].clone()

    parts = loosestep.simulate(part, ranks=4, topology=TWO_BY_TWO).results
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(parts[1], parts[3])
    assert not torch.equal(parts[0], parts[1])


def test_half_precision_parameters_have_an_outer_step_in_single_precision() -> None:
    def theta(rank: int) -> torch.Tensor:
        model = Weights(4, torch.bfloat16)
        torch.nn.init.ones_(model.w)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
        with loosestep.attach(
            model, optimizer, "diloco:period=1,outer_lr=0.5,outer_momentum=0"
        ) as run:
            model(torch.ones(4, dtype=torch.bfloat16)).backward()
            optimizer.step()
            return run.state["outer"]["theta"][0].clone()

    for value in loosestep.simulate(theta, ranks=2).results:
        # bfloat16 has nothing between 1 - 1/256 and 1
        assert torch.equal(value, torch.full((4,), 1 - 2.0**-9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco:period=2,delay=3", "delay must be at most period, got delay=3 and period=2"),
        ("diloco:outer_lr=0", "outer_lr must be above 0 and at most 2"),
        ("diloco:outer_momentum=1", "outer_momentum must be at least 0 and below 1, got 1"),
        ("diloco:outer_lr=high", "outer_lr must be above 0 and at most 2 .* got 'high'"),
        ("diloco:replica=world", "replica must be one of 'auto', 'rank', 'node'"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loosestep.strategy(text)
