"""Going back to a state in mid-training, while an exchange is in flight."""

import copy

import pytest
import torch
from little import PAIR
from pool import ranks
from torch import nn

import loosestep


def there_and_back(rank: int, spec: str):
    """Train from a state twice; the second time the exchange of the first is still in the air."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2_000_000))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    run = loosestep.attach(model, optimizer, spec, topology=PAIR, deadline=20)

    def train(steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + rank)
        for _ in range(steps):
            pull = torch.randn(model[0].shape, generator=generator)
            model[0].grad = model[0].detach() + pull
            optimizer.step()

    train(4, 0)  # the exchange that this step has started is a part of the state
    saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, run)]
    ends = []
    for _ in range(3):
        train(4, 10)
        ends.append(model[0].detach().clone())
        for part, state in zip((model, optimizer, run), saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))
    run.finish()
    return [torch.equal(end, ends[0]) for end in ends]


@pytest.mark.parametrize("spec", ["localsgd:period=4,delay=2", "diloco:period=4,delay=2"])
def test_a_rollback_with_an_exchange_in_flight_is_exact(spec):
    assert ranks(2, there_and_back, spec=spec) == [[True] * 3] * 2
