"""torch.compile: the same way as without it, and no graph break that the loop does not have
anyway.
"""

import pytest
import torch
from pool import ranks
from torch import nn

import loosestep
from loosestep import Topology


def loop(rank: int, form: str, spec: str | None, backend: str):
    """Some steps, alone (`spec=None`) or attached: parameters, number of graph breaks, number of
    graphs.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def compiled(thing):
        return torch.compile(thing, backend=backend)

    if form == "compiled, then attached":
        model = compiled(model)
    hooks = form != "whole step without hooks"
    run = spec and loosestep.attach(
        model, optimizer, spec, topology=Topology([[0, 1]]), deadline=50, hooks=hooks
    )
    forward = compiled(model) if form == "attached, then compiled" else model

    def step(x):
        (forward(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if form.startswith("whole step"):
        step = compiled(step)
    if form == "optimizer":
        update = compiled(lambda: optimizer.step())

        def step(x):
            (model(x) - 1).square().mean().backward()
            update()
            optimizer.zero_grad()

    for index in range(6):
        step(torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + index)))
        if run and not hooks:
            run.step()
    if run:
        assert run.stats["steps"] == 6
        run.finish()
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return params, sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def both(rank: int, form: str, spec: str, backend: str):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own
        alone = loop(rank, form, None, backend)
        return alone, loop(rank, form, spec, backend), loop(rank, "eager", spec, backend)


@pytest.mark.parametrize(
    ("form", "spec", "backend"),
    [
        ("compiled, then attached", "daso:period=2", "eager"),
        ("attached, then compiled", "daso:period=2", "aot_eager"),
        ("whole step", "daso:period=2", "eager"),
        ("whole step without hooks", "localsgd:period=2,delay=1,replica=rank", "eager"),
        ("optimizer", "daso:period=2", "eager"),
    ],
)
def test_attaching_adds_no_graph_break_and_compiling_does_not_change_the_way(form, spec, backend):
    for alone, attached, eager in ranks(2, both, form=form, spec=spec, backend=backend):
        assert attached[1:] == alone[1:]
        assert attached[2] > 0  # something was compiled
        torch.testing.assert_close(attached[0], eager[0], rtol=1e-5, atol=1e-6)
        # what ranks hold was averaged in both
        assert not torch.allclose(attached[0], alone[0], atol=1e-5)
