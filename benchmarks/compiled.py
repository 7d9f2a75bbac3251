"""Attaching to compiled code: graphs, graph breaks and the time of a step, with and without.

    python benchmarks/compiled.py [--quick] [--width 2048 --batch 4096]

Two models of the same kind, one attached and one not, make their steps in turn in one process, so
that whatever else the machine does hits both alike. The strategy never exchanges: what is compared
is what attaching itself does to compiled code. On a GPU make the step long enough (`--width`,
`--batch`) that the device and not the host decides how long it takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import loosestep
from common import Spread, here, machine, options, publish, table

STRATEGY = "localsgd:period=1000000"
FORMS = ("model", "model and optimizer", "whole step, hooks=False")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Step = Callable[[], None]


def make(form: str, attached: bool, seed: int, *, width: int, batch: int) -> tuple[Step, Any]:
    """One step of a training loop of which `form` is compiled, and the run it is attached to."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU()))
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(batch, width, device=DEVICE)
    whole = form == FORMS[2]
    run = loosestep.attach(model, optimizer, STRATEGY, hooks=not whole) if attached else None

    def loss_and_step(
        forward: Callable[[torch.Tensor], torch.Tensor], update: Callable[[], Any]
    ) -> None:
        nn.functional.mse_loss(forward(x), x).backward()
        update()
        optimizer.zero_grad()

    if whole:
        inner = torch.compile(lambda: loss_and_step(model, optimizer.step))

        def step() -> None:
            inner()
            if run is not None:
                run.step()
    else:
        forward = torch.compile(model)
        update = torch.compile(optimizer.step) if form == FORMS[1] else optimizer.step

        def step() -> None:
            loss_and_step(forward, update)

    return step, run


def count(step: Step) -> tuple[int, int]:
    """Compile it: graphs and graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    for _ in range(5):
        step()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(form: str, rounds: int, steps: int, **size: int) -> dict[str, Any]:
    """Graphs of both, and the medians of their steps round by round."""
    found: dict[str, Any] = {"form": form, "plain": [], "attached": []}
    for name in ("plain", "attached"):
        step, run = make(form, name == "attached", 0, **size)
        found[f"{name} graphs"] = count(step)
        if run is not None:
            run.finish()
    for seed in range(rounds):
        torch._dynamo.reset()
        plain, _ = make(form, False, seed, **size)
        attached, run = make(form, True, seed, **size)
        for step in (plain, attached) * 4:
            step()
        times: dict[str, list[float]] = {"plain": [], "attached": []}
        for number in range(steps):
            pair = [("plain", plain), ("attached", attached)]
            for name, step in pair if number % 2 else reversed(pair):
                times[name].append(timed(step))
        run.finish()
        for name, values in times.items():
            found[name].append(median(values))
        print(
            f"  {form:24} round {seed}: {1e3 * found['plain'][-1]:.2f} and "
            f"{1e3 * found['attached'][-1]:.2f} ms",
            flush=True,
        )
    return found


def section(found: list[dict[str, Any]], chosen: argparse.Namespace, steps: int, where: str) -> str:
    """One row a form."""
    rows = []
    for line in found:
        added = [100 * (b / a - 1) for a, b in zip(line["plain"], line["attached"], strict=True)]
        graphs = [f"{g} ({b})" for g, b in (line["plain graphs"], line["attached graphs"])]
        milliseconds = Spread(tuple(1e3 * value for value in line["plain"])).text()
        rows.append([line["form"], *graphs, milliseconds, Spread(tuple(added)).text("+.2f")])
    header = [
        "compiled",
        "graphs (breaks), plain",
        "attached",
        "ms a step, plain",
        "added by attaching, %",
    ]
    return (
        f"## torch.compile: with and without attach, {DEVICE.type}\n\n{table(header, rows)}\n\n"
        f"Median and range (least-most) of {chosen.rounds} rounds; a round is the median of "
        f"{steps} steps of each, made in turn. Six linear layers of {chosen.width} with GELU, "
        f"batch {chosen.batch}, SGD with momentum; `{STRATEGY}`, so nothing is exchanged. {where}."
    )


def main() -> None:
    """Parse, run, publish."""
    parser = options(__doc__, quick="one form, few steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024 if DEVICE.type == "cuda" else 512)
    parser.add_argument("--batch", type=int, default=1024 if DEVICE.type == "cuda" else 256)
    chosen = parser.parse_args()
    chosen.rounds, steps = (1, 20) if chosen.quick else (chosen.rounds, 200)
    torch.set_num_threads(1)
    where = machine()
    found = [
        compare(form, chosen.rounds, steps, width=chosen.width, batch=chosen.batch)
        for form in (FORMS[:1] if chosen.quick else FORMS)
    ]
    name = here("compiled" if DEVICE.type == "cpu" else f"compiled-{DEVICE.type}", where)
    publish(name, section(found, chosen, steps, where), quick=chosen.quick)


if __name__ == "__main__":
    main()
