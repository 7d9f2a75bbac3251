"""attach and Run on real processes: life cycle, what composes, resuming."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from little import GRID, PAIR, data, flat, linear, one_step, sgd
from pool import errors, ranks
from torch import nn

import loosestep
from loosestep import Topology

# Life cycle ---------------------------------------------------------------------------------------


def network_threads() -> int:
    """Gloo has one for each of its ways into the network."""
    return sum("gloo_tcp" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def life(rank: int, spec: str, steps: int = 7):
    threads = threading.active_count()
    network = network_threads()
    model = linear(seed=rank)
    optimizer = sgd(model)
    start = flat(model)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=10) as run:
        aligned = flat(model)
        shared = network_threads() - network
        for step in range(steps):
            run.observe(one_step(model, optimizer, rank, step))
        before = flat(model)
        last = dict(run.stats)
        with run.consensus() as mean:
            inside = flat(mean)
        after = flat(model)
    gc.collect()
    return {
        "start": start,
        "aligned": aligned,
        "before": before,
        "inside": inside,
        "after": after,
        "end": flat(model),
        "threads": threading.active_count() - threads,
        "network threads": (shared, network_threads() - network),
        "stats": last,
    }


SPECS = [
    "allreduce",
    "localsgd:period=2,replica=rank",
    "localsgd:period=3,delay=2,replica=rank",
    "daso",
    "daso:period=2,delay=2",
    "daso-paper",
    "delay-by-one:replica=rank",
    "localsgd:start=3,replica=rank",
    "localsgd:replica=node,local_period=2,period=2",
    "diloco:period=2,delay=1,replica=rank",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_from_attach_to_finish(spec):
    results = ranks(4, life, spec=spec)
    first = results[0]
    for result in results:
        assert torch.equal(result["aligned"], first["start"])  # everybody starts from rank 0
        assert torch.equal(result["inside"], first["inside"])  # one average model
        assert torch.equal(result["after"], result["before"])  # consensus changes nothing
        assert torch.equal(result["end"], first["end"])  # bit-identical at the end
        assert result["threads"] == 0
        # all groups of a run share one, which ends with it
        assert result["network threads"] == (1, 0)
        assert result["stats"]["steps"] == 7
    mean = torch.stack([result["before"] for result in results]).mean(0)
    torch.testing.assert_close(first["inside"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "exchanges", "staleness"),
    [
        ("localsgd:period=2,replica=rank", 3, 0),
        ("localsgd:period=3,delay=2,replica=rank", 2, 2),
        ("daso:period=2,delay=2", 3, 2),
        ("diloco:period=3,delay=2,replica=rank", 2, 2),
        ("delay-by-one:replica=rank", 7, 1),
    ],
)
def test_exchanges_and_staleness_are_what_the_strategy_says(spec, exchanges, staleness):
    for result in ranks(4, life, spec=spec):
        assert result["stats"]["exchanges"] == exchanges
        assert result["stats"]["staleness_max"] == staleness


def alone(rank: int, spec: str):
    model = linear()
    optimizer = sgd(model)
    with loosestep.attach(model, optimizer, spec, topology=Topology([[0]])) as run:
        for step in range(6):
            run.observe(one_step(model, optimizer, rank, step))
        with run.consensus():
            flat(model)
    reference = linear()
    optimizer = sgd(reference)
    for step in range(6):
        one_step(reference, optimizer, rank, step)
    return torch.equal(flat(model), flat(reference))


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith(("daso-paper", "diloco"))])
def test_a_world_of_one_trains_as_if_nothing_was_attached(spec):
    assert ranks(1, alone, spec=spec) == [True]


def without_hooks(rank: int):
    model = linear()
    optimizer = sgd(model)
    with loosestep.attach(
        model, optimizer, "localsgd:period=2,replica=rank", topology=PAIR, hooks=False
    ) as run:
        for step in range(4):
            one_step(model, optimizer, rank, step)
            run.step()
        return run.stats["exchanges"]


def test_without_hooks_the_loop_calls_step_itself():
    assert ranks(2, without_hooks) == [2, 2]


def two_optimizers(rank: int):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    pair = [sgd(model[0]), torch.optim.AdamW(model[1].parameters(), lr=0.01)]
    with loosestep.attach(model, pair, "daso:period=2", topology=GRID) as run:
        for step in range(4):
            model(data(rank, step)).square().mean().backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        return run.stats["steps"], run.stats["exchanges"]


def test_with_several_optimizers_a_step_ends_with_the_last():
    assert ranks(4, two_optimizers) == [(4, 2)] * 4


def composed(rank: int, optimizer: str, foreach: bool | None, fused: bool | None):
    """Schedulers, autocast, GradScaler, accumulation: the loop stays as it is."""
    model = linear()
    kind = getattr(torch.optim, optimizer)
    chosen = kind(model.parameters(), lr=0.01, foreach=foreach, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(chosen, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with loosestep.attach(model, chosen, "daso:period=2", topology=GRID) as run:
        for step in range(6):
            for micro in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = (model(data(rank, 10 * step + micro)).float() - 1).square().mean() / 2
                with run.no_sync() if micro == 0 else torch.enable_grad():
                    scaler.scale(loss).backward()
            scaler.unscale_(chosen)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(chosen)
            scaler.update()
            chosen.zero_grad()
            schedule.step()
        steps = run.stats["steps"]
    return flat(model), steps, chosen.param_groups[0]["lr"]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize(("foreach", "fused"), [(False, None), (True, None), (None, True)])
def test_any_optimizer_with_scaler_autocast_accumulation_and_schedule(optimizer, foreach, fused):
    results = ranks(4, composed, optimizer=optimizer, foreach=foreach, fused=fused)
    assert all(torch.equal(end, results[0][0]) for end, _, _ in results)
    assert [(steps, lr) for _, steps, lr in results] == [(6, 0.01 / 8)] * 4


def lbfgs(rank: int):
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    with loosestep.attach(model, optimizer, "localsgd:period=2,replica=rank", topology=PAIR) as run:
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(data(rank, step)) - 1).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return run.stats["steps"], run.stats["exchanges"]


def test_lbfgs_works_when_every_rank_is_a_replica():
    assert ranks(2, lbfgs) == [(4, 2)] * 2


def resumed(rank: int, spec: str, cut: int, total: int = 9):
    def build():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        return model, sgd(model)

    torch.manual_seed(0)
    model, optimizer = build()
    with loosestep.attach(model, optimizer, spec, topology=GRID) as run:
        for step in range(total):
            run.observe(one_step(model, optimizer, rank, step))
    whole = flat(model)

    torch.manual_seed(0)
    model, optimizer = build()
    run = loosestep.attach(model, optimizer, spec, topology=GRID)
    for step in range(cut):
        run.observe(one_step(model, optimizer, rank, step))
    saved = (
        run.state_dict(),
        {k: v.clone() for k, v in model.state_dict().items()},
        optimizer.state_dict(),
    )
    saved = (
        saved[0],
        saved[1],
        {
            "state": {
                k: {n: t.clone() for n, t in v.items()} for k, v in saved[2]["state"].items()
            },
            "param_groups": saved[2]["param_groups"],
        },
    )
    run.finish()

    model, optimizer = build()
    with loosestep.attach(model, optimizer, spec, topology=GRID) as run:
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        run.load_state_dict(saved[0])
        for step in range(cut, total):
            run.observe(one_step(model, optimizer, rank, step))
    return torch.equal(flat(model), whole)


@pytest.mark.parametrize("cut", [4, 5])
@pytest.mark.parametrize(
    "spec",
    [
        "daso:period=3,delay=2",
        "localsgd:period=2,delay=1,replica=rank",
        "diloco:period=3,delay=2,replica=node",
        "delay-by-one:replica=rank",
        "daso:window=2,period=2,warmup=2,cooldown=3,total=9",
        "daso-paper:epoch=3",
        "daso:period=3,delay=2,warmup=2,codec=int8:block=8",
        "diloco:period=3,delay=2,replica=rank,codec=(qsgd:levels=20,block=64)",
        "allreduce:codec=bf16",
    ],
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(spec, cut):
    assert ranks(4, resumed, spec=spec, cut=cut) == [True] * 4


def other_state(rank: int, case: str):
    model = linear()
    with loosestep.attach(model, sgd(model), "daso", topology=Topology([[0]])) as run:
        state = run.state_dict()
        state |= {"version": 99} if case == "version" else {"strategy": "localsgd"}
        run.load_state_dict(state)


@pytest.mark.parametrize(
    ("case", "message"),
    [("version", "version 99, expected 1"), ("strategy", "belongs to the strategy localsgd")],
)
def test_a_state_of_something_else_is_refused(case, message):
    assert message in errors(1, other_state, case=case)[0]


def held(beside: set[int]) -> dict[int, float]:
    """Numbers in memory at each address that is none of `beside`."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.data_ptr() not in beside:
                found[storage.data_ptr()] = storage.nbytes() / 4
    return found


def memory(rank: int):
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = sum(p.numel() for p in model.parameters())
    with loosestep.attach(model, optimizer, "daso:period=2", topology=GRID) as run:
        for _ in range(5):
            (model.weight * (1.0 + rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
        buckets = {b.flat.untyped_storage().data_ptr() for b in run._engine.averager._buckets}
        comm = run._engine._comm
        # gradients in shared memory
        buckets.add(comm._g.node._slots._bytes.untyped_storage().data_ptr())
        shared = comm._x.node._slots._bytes.untyped_storage().data_ptr()
        copies = held(mine | buckets)
        # one memory for the ranks of a node
        copies[shared] = copies.get(shared, 0) / len(run.topology.mates(run.rank))
        extra = sum(numel for numel in copies.values() if numel > 1000)
    return extra / size


def test_at_most_two_extra_copies_of_the_parameters_are_held():
    # and the few numbers that ride on sums
    assert all(copies <= 2.001 for copies in ranks(4, memory))


def ended(rank: int, spec: str, how: str):
    before = set(held(set()))
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = loosestep.attach(model, optimizer, spec, topology=GRID, deadline=10)
    for _ in range(5):
        (model.weight * (1.0 + rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = run.state_dict()["state"]
    if how == "finished":
        run.finish()
        assert str(run.state_dict()["state"]) == str(state)
    else:
        run.__exit__(ValueError, ValueError("enough"), None)
    del state
    comm = getattr(run._engine, "_comm", None)
    channels = (
        [channel for part in (comm._x, comm._g) if part for channel in part._distinct]
        if comm
        else []
    )
    scratch = {memory.data_ptr() for channel in channels for memory in channel._scratch.values()}
    kept = held(before | scratch | {p.untyped_storage().data_ptr() for p in model.parameters()})
    return sum(numel for numel in kept.values() if numel > 1000) / 300**2, run.stats["steps"]


@pytest.mark.parametrize("how", ["finished", "broken off"])
@pytest.mark.parametrize(
    "spec",
    ["allreduce", "daso:period=2", "diloco:period=2,replica=rank", "adpsgd", "adpsgd:replica=node"],
)
def test_a_run_that_has_ended_holds_what_its_state_dict_tells_of_and_no_more(spec, how):
    theta_and_momentum = 2.0 if "diloco" in spec else 0.0
    assert ranks(4, ended, spec=spec, how=how) == [(theta_and_momentum, 5)] * 4


def abort(rank: int):
    """What still has its memory when communication is told to end at once, and then no more."""
    model = linear()
    optimizer = sgd(model)
    run = loosestep.attach(model, optimizer, "daso:period=1,delay=1", topology=GRID, deadline=10)
    one_step(model, optimizer, rank, 0)
    engine = run._engine
    replica = run._learner.replica
    there = []
    end = engine.abort
    engine.abort = lambda *why: (there.append(replica._images is not None), end(*why))
    run.__exit__(ValueError, ValueError("enough"), None)
    return [*there, replica._images is not None]


def test_memory_is_let_go_after_communication_has_ended():
    assert ranks(4, abort) == [[True, False]] * 4


def silent(rank: int):
    """A failing run whose state is on a device that nothing can be copied from."""
    model = linear()
    run = loosestep.attach(
        model, sgd(model), "diloco:period=2,replica=rank", topology=Topology([[0]]), deadline=10
    )
    run.state["outer"] = [torch.empty(3, device="meta")]
    with run:
        raise KeyError("of the loop")


def test_a_run_that_fails_asks_nothing_of_its_device():
    assert errors(1, silent) == ["KeyError: 'of the loop'"]


def overwrite(rank: int, spec: str):
    """Whether the parameters were those of the last step, or of the consensus, whenever their
    readers were waited for.
    """
    model = linear()
    optimizer = sgd(model)
    seen = []
    waits = []
    run = loosestep.attach(model, optimizer, spec, topology=GRID, deadline=10)
    run._learner.replica.wait_for_readers = lambda: waits.append(torch.equal(flat(model), seen[-1]))
    for step in range(4):
        one_step(model, optimizer, rank, step)
    seen.append(flat(model))
    with run.consensus():
        seen.append(flat(model))
    seen.append(flat(model))
    run.finish()
    return waits, bool((seen[0] - seen[1]).abs().max() > 0)


@pytest.mark.parametrize(
    "spec", ["daso:period=8,delay=2", "adpsgd:rate=0.01", "adpsgd:replica=node,rate=0.01"]
)
def test_readers_of_the_parameters_are_waited_for_before_they_are_overwritten_out_of_turn(spec):
    results = ranks(4, overwrite, spec=spec)
    assert all(waits == [True, True, True] for waits, _ in results)
    assert any(differs for _, differs in results)


def replaced(rank: int, spec: str):
    """Buffers and the memory of parameters are others in the middle of the run, as after
    `model.cpu(); model.cuda()`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = sgd(model)
    with loosestep.attach(model, optimizer, spec, topology=GRID, deadline=10):
        for step in range(8):
            if step == 3:
                model._apply(torch.clone)
            one_step(model, optimizer, rank, step)
        mine = model[1].running_var.clone()
    return mine, model[1].running_var, model[1].running_mean


@pytest.mark.parametrize("spec", ["daso:period=2", "adpsgd:rate=0.01", "adpsgd:replica=node"])
def test_buffers_that_are_replaced_while_training_are_averaged(spec):
    results = ranks(4, replaced, spec=spec)
    for _, variance, mean in results:
        assert torch.equal(variance, results[0][1])
        assert torch.equal(mean, results[0][2])
    assert not torch.equal(results[0][0], results[0][1])
