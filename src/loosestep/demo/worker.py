"""One rank of the demo: trains the same network on the same digits with torch's DDP, then with DASO."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import loosestep
from loosestep.demo.diary import DDP, Diary
from loosestep.recipes.vision.recipe import VisionRecipe, VisionTask

MARK = "@demo "  # a line for the process that shows the demo
EVALUATIONS = 8


def main(
    folder: Path,
    steps: Annotated[int, typer.Option()],
    daso: Annotated[str, typer.Option()],
    width: Annotated[float, typer.Option()] = 1.0,
    interface: Annotated[str, typer.Option(help="Whose bytes to count; empty: count none.")] = "",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train twice, write two diaries."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))  # connects everybody, so that nobody is charged for it later
    task = VisionRecipe().build({"width": width}, seed=seed)
    for strategy in (DDP, daso):
        diary = Diary(strategy, rank=dist.get_rank(), node=int(os.environ["GROUP_RANK"]))
        train(task, diary, steps=steps, interface=interface)
        diary.write(folder)
        tell(diary, kind="end")
    dist.destroy_process_group()


def train(task: VisionTask, diary: Diary, *, steps: int, interface: str) -> None:
    """`steps` steps on every rank; the clock starts when all ranks are ready and stops when the model is final."""
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    run = None if diary.strategy == DDP else loosestep.attach(model, optimizer, diary.strategy)
    trained = DistributedDataParallel(model) if run is None else model
    dist.barrier()
    before = bytes_sent(interface)
    diary.start_clock()
    tell(diary, kind="begin")
    loop(task, trained, optimizer, diary, steps=steps, run=run)
    if run is not None:
        run.finish()
        diary.read_events(run.trace.events)
    diary.seconds = diary.now()
    dist.barrier()
    diary.bytes_sent = bytes_sent(interface) - before if interface else count_bytes(model, run, steps=steps)
    diary.accuracy = task.evaluate(model)["accuracy"]


def loop(
    task: VisionTask, model: nn.Module, optimizer: Optimizer, diary: Diary, *, steps: int, run: loosestep.Run | None
) -> None:
    """An ordinary training loop with a diary."""
    schedule = CosineAnnealingLR(optimizer, steps)
    batches = task.stream(learner=dist.get_rank(), learners=dist.get_world_size())
    latest_gradient = watch_gradients(model, diary) if run is None else []
    for step in range(1, steps + 1):
        loss = task.loss(model, next(batches))
        loss.backward()
        if run is None:  # DDP: once the last gradient is there, backward only waits for the other ranks
            diary.wait_until_now(latest_gradient[0])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if run is not None:
            run.observe(loss)
        diary.steps.append(diary.now())
        diary.losses.append(loss.item())
        if step % max(1, steps // EVALUATIONS) == 0:
            diary.accuracies.append((step, diary.now(), task.evaluate(model)["accuracy"]))
        tell(diary, kind="step", waited=diary.waited if run is None else run.stats["wait_seconds"])


def watch_gradients(model: nn.Module, diary: Diary) -> list[float]:
    """A list of one number: when the latest gradient was complete on this rank."""
    latest = [0.0]

    def note(_: Tensor) -> None:
        latest[0] = diary.now()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    return latest


def bytes_sent(interface: str) -> float:
    """What this node has sent on its cable so far, as the kernel counts."""
    for line in Path("/proc/net/dev").read_text().splitlines() if interface else []:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return float(counters.split()[8])
    return 0.0


def count_bytes(model: nn.Module, run: loosestep.Run | None, *, steps: int) -> float:
    """Without a cable of its own: what the events say, or for DDP what a ring through all ranks sends to the next node."""
    mates = int(os.environ["LOCAL_WORLD_SIZE"])
    if run is not None:
        return float(run.stats["bytes_between_nodes"] * mates)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    world = dist.get_world_size()
    return 2 * (world - 1) / world * size * steps


def tell(diary: Diary, *, kind: str, waited: float = 0.0) -> None:
    """A line for the screen, from the first rank only."""
    if diary.rank != 0:
        return
    news = {
        "kind": kind,
        "strategy": diary.strategy,
        "step": len(diary.losses),
        "seconds": diary.now(),
        "loss": diary.losses[-1] if diary.losses else None,
        "accuracy": diary.accuracies[-1][2] if diary.accuracies else None,
        "waited": waited,
    }
    typer.echo(MARK + json.dumps(news))


if __name__ == "__main__":
    typer.run(main)
