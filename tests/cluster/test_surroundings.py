"""What a script has set around its calls of us: inference mode, a default device."""

import pytest
import torch
from little import PAIR, flat, linear, one_step, sgd
from pool import ranks

import loosestep

SPECS = [
    "allreduce",
    "localsgd:period=2,delay=1,replica=rank",
    "daso:period=2,delay=1",
    "diloco:period=2,replica=rank",
    "adpsgd",
]


def judged(rank: int, spec: str):
    model = linear(seed=rank)
    optimizer = sgd(model)
    with loosestep.attach(model, optimizer, spec, topology=PAIR, deadline=10) as run:
        for step in range(4):
            one_step(model, optimizer, rank, step)
        before = flat(model)
        with torch.inference_mode(), run.consensus() as mean:
            inside = flat(mean)
        after = flat(model)
        for step in range(4, 8):
            one_step(model, optimizer, rank, step)
        with torch.inference_mode():
            saved = run.state_dict()
            run.load_state_dict(saved)
    return {"before": before, "inside": inside, "after": after, "end": flat(model)}


@pytest.mark.parametrize("spec", SPECS)
def test_a_consensus_inside_inference_mode(spec):
    one, other = ranks(2, judged, spec=spec)
    assert torch.equal(one["after"], one["before"])
    if spec != "adpsgd":  # its ranks are at different steps when one of them asks
        torch.testing.assert_close(one["inside"], (one["before"] + other["before"]) / 2)
    assert torch.equal(one["end"], other["end"])


def elsewhere(rank: int, spec: str):
    model = linear(seed=rank)
    optimizer = sgd(model)
    batches = [torch.randn(4, 3, device="cpu") for _ in range(6)]
    # any device but the host: a tensor of ours on it would hold nothing
    torch.set_default_device("meta")
    try:
        with loosestep.attach(model, optimizer, spec, topology=PAIR, deadline=10) as run:
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with run.consensus() as mean:
                inside = flat(mean)
            before = flat(model)
    finally:
        torch.set_default_device(None)
    return {"before": before, "inside": inside, "end": flat(model)}


@pytest.mark.parametrize("spec", SPECS)
def test_a_default_device_is_for_the_tensors_of_the_script(spec):
    one, other = ranks(2, elsewhere, spec=spec)
    if spec != "adpsgd":  # its ranks are at different steps when one of them asks
        torch.testing.assert_close(one["inside"], (one["before"] + other["before"]) / 2)
    assert torch.equal(one["end"], other["end"])
