"""What attach and a run refuse: clear on every rank, never a hang."""

import threading
import warnings

import pytest
import torch
from little import GRID, PAIR, flat, linear, one_step, sgd
from pool import drop, errors, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loosestep
from loosestep import Topology


def bad(rank: int, case: str):
    model = linear()
    optimizer = sgd(model)
    strategy = "daso"
    if case == "no parameters":
        model = nn.ReLU()
    elif case == "frozen":
        model.requires_grad_(False)
    elif case == "empty":
        model = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))])
        optimizer = sgd(model)
    elif case == "foreign optimizer":
        optimizer = sgd(linear(1))
    elif case == "shape" and rank == 1:
        model = nn.Linear(3, 3)
        optimizer = sgd(model)
    elif case == "dtype" and rank == 1:
        model = linear().double()
        optimizer = sgd(model)
    elif case == "more" and rank == 1:
        model = nn.Linear(3, 2, bias=False)
        optimizer = sgd(model)
    elif case == "nan" and rank == 1:
        model.weight.data[0, 1] = float("nan")
    elif case == "strategy" and rank == 1:
        strategy = "daso:period=8"
    elif case == "typo" and rank == 1:
        strategy = "dasso"
    elif case == "ddp":
        model = DistributedDataParallel(model)
    elif case == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters())
        strategy = "allreduce"
    elif case == "hooks":
        strategy = "allreduce"
    elif case == "shared memory":
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.data = model[0].weight.data
        optimizer = sgd(model)
    elif case.startswith("zero"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        strategy = "daso" if case == "zero, nodes" else "localsgd:replica=rank"
    elif case == "a number":
        strategy = 3
    elif case == "not a module":
        model = "net"
    elif case == "not an optimizer":
        optimizer = [3]
    elif case == "a scheduler":
        optimizer = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    elif case == "no plain group":
        optimizer.param_groups[0]["rule"] = {1, 2}
    elif case == "topology":
        loosestep.attach(model, optimizer, strategy, topology=Topology([[0, 1, 2]]))
    loosestep.attach(model, optimizer, strategy, topology=PAIR, deadline=5, hooks=case != "hooks")


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("no parameters", ["no parameters that require gradients"] * 2),
        ("frozen", ["no parameters that require gradients"] * 2),
        ("empty", ["or only empty ones"] * 2),
        ("foreign optimizer", ["build the optimizer from model.parameters()"] * 2),
        ("a scheduler", ["must be a torch optimizer or several of them, got StepLR"] * 2),
        ("no plain group", ["group 0 of SGD holds rule={1, 2}, which cannot be sent"] * 2),
        (
            "shape",
            ["entry 0 is 'weight: (3, 3) float32' on rank 1 and 'weight: (2, 3) float32' on rank 0"]
            * 2,
        ),
        ("dtype", ["'weight: (2, 3) float64' on rank 1"] * 2),
        ("more", ["1 tensors on rank 1, 2 on rank 0"] * 2),
        ("shared memory", ["parameters 0.weight and 1.weight share memory"] * 2),
        ("zero, nodes", ["over ranks 0, 1 and gives them all the same parameters"] * 2),
        ("zero, ranks", ["lets each rank learn on its own; use a plain optimizer"] * 2),
        ("a number", ["as in 'daso:period=8', got int"] * 2),
        (
            "nan",
            [
                "rank 1 could not attach: parameter weight contains NaN or Inf",
                "parameter weight contains NaN or Inf on rank 1",
            ],
        ),
        (
            "strategy",
            ["rank 1 uses the strategy daso:period=8, rank 0 daso; all ranks need the same"] * 2,
        ),
        (
            "typo",
            [
                "rank 1 could not attach: unknown strategy 'dasso'",
                "unknown strategy 'dasso' (did you mean 'daso'?)",
            ],
        ),
        ("ddp", ["wrapped in DistributedDataParallel"] * 2),
        ("lbfgs", ["use a strategy with replica='rank'"] * 2),
        ("hooks", ["hooks=False needs a strategy with replica='rank'"] * 2),
        ("not a module", ["must be a torch.nn.Module, got str"] * 2),
        ("not an optimizer", ["must be a torch optimizer"] * 2),
        ("topology", ["the topology names 3 ranks, but 2 processes were started"] * 2),
    ],
)
def test_bad_input_is_refused_on_every_rank(case, messages):
    for seen, expected in zip(errors(2, bad, case=case), messages, strict=True):
        assert expected in seen


def twice(rank: int):
    model = linear()
    run = loosestep.attach(model, sgd(model), "daso", topology=PAIR, deadline=5)
    try:
        loosestep.attach(model, sgd(model), "daso", topology=PAIR, deadline=5)
    except RuntimeError as error:
        return str(error)
    finally:
        run.finish()


def test_attaching_twice_is_refused_and_the_first_run_lives():
    assert all("already attached" in message for message in ranks(2, twice))


def absent(rank: int):
    if rank == 0:
        return loosestep.attach(linear(), sgd(linear()), "daso", topology=PAIR, deadline=1)
    threading.Event().wait(2)
    raise RuntimeError("rank 1 never attached")


def test_a_rank_that_does_not_attach_is_named():
    assert "rank(s) 1 did not call loosestep.attach within 1 s" in errors(2, absent)[0]
    drop(2)


def changed(rank: int, case: str):
    model = nn.ModuleList([linear(), linear()])
    model[1].requires_grad_(False)
    optimizer = sgd(model[0])
    with loosestep.attach(model, optimizer, "localsgd:replica=rank", topology=PAIR, deadline=5):
        one_step(model[0], optimizer, rank, 0)
        if case == "unfreeze":
            model[1].requires_grad_(True)
        elif "assign" in case:
            model.load_state_dict(
                {name: value.clone() for name, value in model.state_dict().items()}, assign=True
            )
        else:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        if case != "assign, finish":
            one_step(model[0], optimizer, rank, 1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unfreeze", "1.weight was frozen when the run was attached"),
        ("group", "parameter groups changed after attach"),
        ("assign", "parameter 0.weight is another tensor than when the run was attached"),
        ("assign, finish", "parameter 0.weight is another tensor than when the run was attached"),
    ],
)
def test_parameters_that_appear_after_attach_are_detected(case, message):
    assert any(message in seen for seen in errors(2, changed, case=case))


def poisoned(rank: int):
    model = linear()
    optimizer = sgd(model)
    with loosestep.attach(
        model, optimizer, "localsgd:period=1,replica=rank", topology=PAIR, deadline=5
    ):
        if rank == 1:
            model.weight.data.fill_(float("nan"))
        before = flat(model)
        try:
            one_step(model, optimizer, rank, 0)
        finally:
            assert rank == 1 or not flat(model).isnan().any()
            assert rank == 1 or not torch.equal(flat(model), before)


def test_nan_on_one_rank_is_not_spread():
    for message in errors(2, poisoned):
        assert "parameters of rank 1 contain NaN or Inf at step 1" in message
        assert "nothing was exchanged" in message


def poisoned_node(rank: int, row: int):
    """After its step a node has NaN in the half of the model that local rank `row` sends."""
    model = linear()
    optimizer = sgd(model)

    def poison(*_):
        if rank in GRID.nodes[1]:
            (model.bias if row else model.weight).data.view(-1)[-row] = float("nan")

    optimizer.register_step_post_hook(poison)
    with loosestep.attach(model, optimizer, "daso:period=1,delay=0", topology=GRID, deadline=5):
        try:
            one_step(model, optimizer, rank, 0)
        finally:
            assert rank in GRID.nodes[1] or not flat(model).isnan().any()


@pytest.mark.parametrize("row", [0, 1])
def test_nan_of_a_node_is_told_of_its_first_rank(row):
    for message in errors(4, poisoned_node, row=row):
        assert "parameters of rank 2 contain NaN or Inf at step 1" in message
        assert "nothing was exchanged" in message


def same_data(rank: int, spec: str, topology: list[list[int]]):
    model = linear()
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loosestep.attach(model, optimizer, spec, topology=Topology(topology), deadline=5):
            for step in range(8):
                one_step(model, optimizer, 0, step)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("spec", "topology"),
    [
        ("localsgd:period=1,replica=rank", [[0], [1]]),
        ("allreduce", [[0, 1]]),
        ("daso:period=1", [[0], [1]]),
    ],
)
def test_ranks_that_see_the_same_data_are_warned_once(spec, topology):
    for seen in ranks(2, same_data, spec=spec, topology=topology):
        assert len(seen) == 1
        assert "DistributedSampler" in seen[0]
