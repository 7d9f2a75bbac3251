"""Runs on a device, in a world of one that exchanges with itself."""

import gc
import warnings
from contextlib import nullcontext

import pytest
import torch
from device import needs_cuda, no_synchronisation
from torch import nn

import loosestep

pytestmark = [needs_cuda, pytest.mark.timeout(90)]
LOOPS = [
    "daso:period=2,delay=1",
    "daso:period=4,delay=3",
    "localsgd:period=3,delay=2,replica=rank",
    "diloco:period=3,delay=2,outer_lr=1.0,outer_momentum=0.0,replica=rank",
    "delay-by-one:replica=rank",
    "adpsgd",
    "adpsgd:replica=node",
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)
    ).cuda()


def train(model, optimizer, run, steps, data):
    x, y = data
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if run is not None:
            run.observe(loss)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 64, generator=generator).cuda(), torch.randint(
        10, (32,), generator=generator
    ).cuda()


def plain(data, steps):
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None, steps, data)
    return model


@pytest.mark.parametrize("spec", LOOPS)
def test_a_loop_is_never_synchronised_and_alone_it_learns_what_it_would_without_us(spec, data):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with loosestep.attach(model, optimizer, spec) as run:
        train(model, optimizer, run, 8, data)
        with no_synchronisation():
            train(model, optimizer, run, 24, data)
        folds = run.stats["folds"]
    assert folds > 0 or spec.startswith("adpsgd")
    # its outer step subtracts what was learnt and adds it again
    rounding = 1e-5 if spec.startswith("diloco") else 0
    for ours, theirs in zip(model.parameters(), plain(data, 32).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding)


def test_losses_reach_the_schedule(data):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loosestep.attach(
        model, optimizer, "daso:period=2,delay=1,window=4,threshold=0.9,patience=1"
    ) as run:
        train(model, optimizer, run, 40, data)
        assert run.state["best"] is not None
        assert 0 < run.state["best"] < 10


@pytest.mark.parametrize("spec", ["daso:period=2,delay=1", "adpsgd"])
def test_cudnn_keeps_its_contiguous_lstm_weights(spec):
    torch.manual_seed(0)
    model = nn.LSTM(40, 64, num_layers=3, bidirectional=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(12, 4, 40, device="cuda")
    places = [p.data_ptr() for p in model.parameters()]
    with warnings.catch_warnings():
        # "RNN module weights are not part of single contiguous chunk of memory"
        warnings.simplefilter("error")
        with loosestep.attach(model, optimizer, spec) as run:
            for _ in range(12):
                model(x)[0].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with run.consensus():
                model(x)
        model(x)
    assert places == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("spec", ["daso:period=4,delay=2", "adpsgd"])
def test_a_cuda_graph_of_the_whole_step_is_replayed_between_boundaries(spec, data):
    def graphed(model, optimizer):
        x, y = data
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train(model, optimizer, None, 3, data)  # warm-up, as torch asks for
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return graph, loss

    reference = net()
    graph, _ = graphed(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9))
    for _ in range(16):
        graph.replay()

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    graph, loss = graphed(model, optimizer)
    with loosestep.attach(model, optimizer, spec, hooks=False) as run:
        for watch in (nullcontext, no_synchronisation):
            with watch():
                for _ in range(8):
                    graph.replay()
                    run.observe(loss)
                    run.step()
        assert run.stats["steps"] == 16
        assert spec == "adpsgd" or run.stats["exchanges"] == 4
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_another_stream_than_the_default_one_is_followed(data):
    model = net()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with (
        torch.cuda.stream(stream),
        loosestep.attach(model, optimizer, "daso:period=2,delay=1") as run,
    ):
        train(model, optimizer, run, 32, data)
    torch.cuda.synchronize()
    for ours, theirs in zip(model.parameters(), plain(data, 32).parameters(), strict=True):
        # another stream may choose other kernels
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["daso:period=2,delay=1", "adpsgd"])
def test_a_model_that_was_away_between_steps_goes_on_and_one_that_stays_away_is_refused(spec, data):
    model = net()
    stayed = net()
    runs = []
    for trained in (stayed, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
        runs.append(loosestep.attach(trained, optimizer, spec))
        train(trained, optimizer, runs[-1], 6, data)
        if trained is model:
            model.cpu()
            model.cuda()
        train(trained, optimizer, runs[-1], 6, data)
    here, away = runs
    with here.consensus(), away.consensus():  # what gossip shows may be some steps old
        assert spec == "adpsgd" or torch.equal(model[1].running_var, stayed[1].running_var)
    assert torch.equal(model[1].running_var, stayed[1].running_var)
    for ours, theirs in zip(model.parameters(), stayed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    here.finish()
    model.cpu()
    with pytest.raises(
        RuntimeError, match=r"was on cuda:0 when the run was attached and is on cpu now"
    ):
        away.finish()


def test_one_copy_on_the_device_and_none_when_the_run_has_ended():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()
    for spec in ("daso:period=2,delay=1", "adpsgd", "daso:period=2,delay=1", "adpsgd"):
        before = torch.cuda.memory_allocated()
        with loosestep.attach(model, optimizer, spec):
            for _ in range(6):
                optimizer.step()
            assert size <= torch.cuda.memory_allocated() - before <= 1.05 * size
        assert torch.cuda.memory_allocated() - before <= 0.05 * size
