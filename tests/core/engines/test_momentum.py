"""The momentum that is averaged on request."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, RAdam

from loosestep.core.engines.momentum import momentum


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (Adam, {}),
        (Adam, {"amsgrad": True}),
        (Adam, {"fused": True}),
        (AdamW, {"amsgrad": True, "capturable": False}),
    ],
)
def test_momentum_that_is_made_before_the_first_step_changes_no_step(kind, options):
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizer, plain = (kind(m.parameters(), lr=0.1, **options) for m in (model, twin))
    found = momentum([optimizer])
    assert all((tensor == 0).all() for tensor in found)
    for _ in range(3):
        torch.testing.assert_close(step(optimizer, model), step(plain, twin), rtol=0, atol=0)
    assert [tensor.data_ptr() for tensor in momentum([optimizer])] == [
        tensor.data_ptr() for tensor in found
    ]
    assert all((tensor > 0).all() for tensor in found)


@pytest.mark.parametrize("kind", [NAdam, Adamax, RAdam])
def test_optimizers_with_another_state_are_refused(kind):
    with pytest.raises(ValueError, match=f"Adam or AdamW; got {kind.__name__}"):
        momentum([kind(nn.Linear(2, 2).parameters())])


def test_sgd_without_momentum_or_with_dampening_is_refused():
    for options in ({}, {"momentum": 0.9, "dampening": 0.5}):
        with pytest.raises(ValueError, match="SGD with momentum and without dampening"):
            momentum([SGD(nn.Linear(2, 2).parameters(), lr=0.1, **options)])


def test_a_state_that_is_loaded_is_the_one_that_counts():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    momentum([optimizer])
    step(optimizer, model)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (weight, bias) = momentum([optimizer])
    assert weight is optimizer.state[model.weight]["momentum_buffer"]
    assert bias is optimizer.state[model.bias]["momentum_buffer"]
