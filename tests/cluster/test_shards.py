"""What holds for models that are sharded or wrapped inside their node: means, endings,
checkpoints, accumulation.
"""

import pytest
import torch
import torch.distributed as dist
from composed import GRID, batch, build, mesh, train, whole
from pool import ranks
from torch import nn

import loosestep


def traffic(rank: int):
    """Bytes that a rank sends for each exchange, against what it holds; 5 % more is for headers."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(256, 255), mesh=mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = sum(p.to_local().numel() * 4 for p in model.parameters())
    with loosestep.attach(
        model, optimizer, "daso:period=2,delay=0", topology=GRID, deadline=20
    ) as run:
        for step in range(8):
            if step == 2:  # the start and the first exchange are behind us
                before = run.stats["bytes_sent"]
            optimizer.zero_grad()
            model(torch.full((1, 256), float(rank + step))).sum().backward()
            optimizer.step()
        return (run.stats["bytes_sent"] - before) / 3, held


def test_a_rank_sends_its_own_shard_and_nothing_else():
    results = ranks(4, traffic)
    assert results[0][1] > results[1][1]  # 128 and 127 rows
    for sent, held in results:
        assert held <= sent < 1.05 * held


class Line(nn.Module):
    """Constant gradients: whatever is exchanged, the mean of the replicas goes its way."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3))

    def forward(self, direction: torch.Tensor) -> torch.Tensor:
        return (self.w * direction).sum()


def drift(rank: int, spec: str, steps: int):
    """The mean of the nodes' models against where the gradients alone would take it, after every
    step.
    """
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Line(), mesh=mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = whole(model)
    errors = []
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20) as run:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((7, 3), float(rank + 1) * (step % 3), dtype=torch.float64)).backward()
            optimizer.step()
            expected = expected - 0.1 * 2.5 * (step % 3)
            if not run.strategy.gossip:
                mean = whole(model)
                dist.all_reduce(mean)
                errors.append(float((mean / 4 - expected).abs().max()))
        local = whole(model)
        distance = run.stats["consensus_distance"]
    errors.append(float((whole(model) - expected).abs().max()))
    return max(errors), float((local - expected).abs().max()), distance, whole(model)


@pytest.mark.parametrize("spec", ["daso:period=3,delay=2", "adpsgd:replica=node"])
def test_an_exchange_of_shards_never_moves_the_mean_of_the_nodes(spec):
    results = ranks(4, drift, spec=spec, steps=24)
    for error, local, distance, end in results:
        assert error < 1e-12
        assert local > 0.01  # or there was nothing to average
        assert distance > 0
        assert torch.equal(end, results[0][3])


def train_gossip(rank: int, inside: str, spec: str, device: str = "cpu"):
    """Replicas that learn, gossiping asynchronously: loss before and after, and what all hold in
    the end.
    """
    model = build(inside, seed=GRID.node_of(rank), width=6, norm=inside == "fsdp", device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20) as run:
        for step in range(40):
            loss = (model(batch(rank, step, inside, device)) - 1).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 20:
                before = whole(model)
                with run.consensus():
                    model(batch(rank, step, inside, device)).sum().backward()
                optimizer.zero_grad()
                torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
        plain = [p.detach().clone() for p in model.parameters() if type(p) is nn.Parameter]
    return losses, whole(model), [b.clone() for b in model.buffers()], plain


@pytest.mark.parametrize(
    ("inside", "spec"),
    [
        ("fsdp", "adpsgd:replica=node"),
        ("fsdp", "adpsgd:replica=node,average_momentum=true"),
        ("tensor", "adpsgd:replica=node"),
        ("ddp", "adpsgd:replica=node"),
    ],
)
def test_nodes_that_gossip_about_shards_learn_and_end_identical(inside, spec):
    results = ranks(4, train_gossip, inside=inside, spec=spec)
    for losses, end, buffers, _ in results:
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert torch.equal(end, results[0][1])
        for mine, first in zip(buffers, results[0][2], strict=True):
            assert torch.equal(mine, first)
    for one, other in ((0, 1), (2, 3)):  # copies inside a node never drift
        for mine, mates in zip(results[one][3], results[other][3], strict=True):
            assert torch.equal(mine, mates)


def count(rank: int, consensus: bool):
    """What the ranks of a node say at every step that all have done, while each hears of others
    in its own lane.
    """
    model = build("fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    with loosestep.attach(
        model, optimizer, "adpsgd:replica=node", topology=GRID, deadline=20
    ) as run:
        members = run._engine._mailbox._courier.members
        hear = members.progress
        members.progress = lambda: hear() + 1000 * rank
        for step in range(8):
            train(model, optimizer, rank, step, "fsdp")
            seen.append(run.global_steps)
            if consensus and step % 3 == 1:
                with run.consensus():
                    pass
    return seen, run.global_steps


@pytest.mark.parametrize("consensus", [False, True])
def test_the_ranks_of_a_node_count_the_same_gradients_at_every_step(consensus):
    results = ranks(4, count, consensus=consensus)
    for one, other in ((0, 1), (2, 3)):
        assert results[one] == results[other]
        seen, end = results[one]
        heard = 1000 * one
        # one step late
        assert [number >= heard for number in seen] == [False] + [True] * 7 if heard else True
        assert all(number - 2 * (step + 1) - heard <= 16 for step, number in enumerate(seen))
        assert end == heard + 32


def empty(rank: int):
    """One row over two ranks: the second holds nothing at all."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 1), mesh=mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # a slow name server may take five seconds
    with loosestep.attach(
        model, optimizer, "adpsgd:replica=node", topology=GRID, deadline=20
    ) as run:
        for step in range(10):
            optimizer.zero_grad()
            model(torch.full((1, 8), float(rank + step))).sum().backward()
            optimizer.step()
        with run.consensus():
            inside = whole(model)
        rejected = run.stats["rejected"]
    return (
        sum(p.to_local().numel() for p in model.parameters()),
        inside,
        whole(model),
        run.stats["lost"],
        rejected,
    )


def test_a_rank_that_holds_nothing_is_heard_and_ends_with_the_others():
    results = ranks(4, empty)
    assert [held for held, *_ in results] == [9, 0, 9, 0]
    for _, inside, end, lost, rejected in results:
        assert inside.isfinite().all()
        assert torch.equal(end, results[0][2])
        assert lost == []
        assert not rejected


def gathered(rank: int, spec: str):
    """A forward without a backward before the step: `fully_shard` keeps what it gathered in the
    places of the shards.
    """
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 3), mesh=mesh(), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20):
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            before = model(torch.ones(2, 4))
        optimizer.step()
        with torch.no_grad():
            return before - model(torch.ones(2, 4))


def test_parameters_that_are_gathered_at_a_step_are_no_strangers_and_not_stale():
    for moved in ranks(4, gathered, spec="localsgd:replica=node"):
        # 2 rows of 4 ones and the bias, times the rate
        torch.testing.assert_close(moved, torch.full((2, 3), 1.0))


def uneven(rank: int, inside: str, spec: str):
    model = build(inside)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20) as run:
        for step in range(9 if rank > 1 else 14):
            train(model, optimizer, rank, step, inside)
        steps = run.stats["steps"]
    end = whole(model)
    train(model, optimizer, rank, 99, inside)  # alone again, with the moments that were taken over
    return steps, end


@pytest.mark.parametrize(
    ("inside", "spec"), [("fsdp", "daso:period=2"), ("fsdp", "allreduce"), ("ddp", "allreduce")]
)
def test_a_node_that_ends_early_joins_the_others_until_they_are_done(inside, spec):
    results = ranks(4, uneven, inside=inside, spec=spec)
    expected = ranks(4, uneven, inside="plain", spec=spec)
    assert [steps for steps, _ in results] == [14, 14, 9, 9]
    for (_, one), (_, other) in zip(results, expected, strict=True):
        torch.testing.assert_close(one, results[0][1], rtol=0, atol=0)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def checkpointed(rank: int, folder: str, spec: str):
    """A run that is cut in the middle, an exchange in flight, against one that is not."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    group = mesh().get_group()
    place = f"{folder}/node{GRID.node_of(rank)}"
    model = build("fsdp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20) as run:
        for step in range(11):
            train(model, optimizer, rank, step, "fsdp")
            if step == 6:
                parts = get_state_dict(model, optimizer)
                dcp.save(
                    {"model": parts[0], "optimizer": parts[1]},
                    checkpoint_id=place,
                    process_group=group,
                )
                rest = run.state_dict()
        with run.consensus():
            mean = whole(model)
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/mean")
    end = whole(model)

    model = build("fsdp", seed=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20) as run:
        parts = get_state_dict(model, optimizer)
        dcp.load(
            {"model": parts[0], "optimizer": parts[1]}, checkpoint_id=place, process_group=group
        )
        set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
        run.load_state_dict(rest)
        for step in range(7, 11):
            train(model, optimizer, rank, step, "fsdp")
    state = {"model": model.state_dict()}
    resumed = whole(model)
    dcp.load(state, checkpoint_id=f"{folder}/mean")
    model.load_state_dict(state["model"])
    return rest["flight"] is not None, end, resumed, mean, whole(model)


def test_a_run_on_shards_resumes_bit_for_bit_from_a_distributed_checkpoint(tmp_path):
    for flying, end, resumed, mean, loaded in ranks(
        4, checkpointed, folder=str(tmp_path), spec="daso:period=3,delay=2"
    ):
        assert flying
        assert torch.equal(end, resumed)
        assert torch.equal(mean, loaded)


def stepped(rank: int, hooks: bool):
    """Without hooks, as where CUDA graphs are replayed: DDP looks after the node, `run.step()`
    says when a step is made.
    """
    model = build("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loosestep.attach(
        model, optimizer, "daso:period=2", topology=GRID, deadline=20, hooks=hooks
    ) as run:
        for step in range(7):
            train(model, optimizer, rank, step, "ddp")
            if not hooks:
                run.step()
        assert run.stats["exchanges"] == 3
    assert not optimizer._optimizer_step_post_hooks
    return whole(model)


def test_steps_that_are_told_by_hand_go_the_same_way():
    for by_hand, by_hook in zip(
        ranks(4, stepped, hooks=False), ranks(4, stepped, hooks=True), strict=True
    ):
        assert torch.equal(by_hand, by_hook)


def accumulate(rank: int, inside: str, spec: str):
    model = build(inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=20) as run:
        for step in range(6):
            optimizer.zero_grad()
            with run.no_sync():
                model(batch(rank, 2 * step, inside)).square().mean().backward()
            model(batch(rank, 2 * step + 1, inside)).square().mean().backward()
            optimizer.step()
    return whole(model)


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_gradients_accumulate_without_communication(inside):
    spec = "daso:period=2,warmup=2"
    for one, other in zip(
        ranks(4, accumulate, inside=inside, spec=spec),
        ranks(4, accumulate, inside="plain", spec=spec),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
