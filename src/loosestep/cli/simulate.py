"""`loosestep simulate`: a recipe on a cluster nobody has, in this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loosestep.cli import options as asked
from loosestep.cli.common import (
    conclude,
    new_folder,
    one_line_errors,
    prepare,
    report_so_far,
    settle,
)
from loosestep.cli.launch import gentle_end
from loosestep.cli.screen import Screen, spell_time
from loosestep.lab import grammar
from loosestep.recipes import Task
from loosestep.runfolder.config import Config, TrainingError
from loosestep.sim.cluster import Cluster
from loosestep.sim.driver import Simulation
from loosestep.sim.predict.timing import Prediction, predict
from loosestep.topology import Topology
from loosestep.training.on_virtual_ranks import measure_step, simulate_run
from loosestep.training.watch import RunResult


def simulate(
    recipe: asked.RecipeName,
    strategy: asked.StrategyName = None,
    nodes: asked.Nodes = None,
    ranks_per_node: asked.RanksPerNode = None,
    data: asked.Data = None,
    gradients: asked.Gradients = None,
    epochs: asked.Epochs = None,
    batch: asked.Batch = None,
    lr: asked.Lr = None,
    seed: Annotated[
        int | None, typer.Option(help="Of everything random, the order of events included. (0)")
    ] = None,
    device: asked.Device = None,
    settings: asked.Settings = None,
    config: asked.ConfigFile = None,
    evaluate_every: asked.EvaluateEvery = None,
    name: asked.RunName = None,
    runs: asked.Runs = Path("runs"),
    bandwidth: Annotated[str, typer.Option(help="Of a node's uplink, each way.")] = "10gbit",
    latency: Annotated[str, typer.Option(help="Between nodes.")] = "50us",
    node_bandwidth: Annotated[str, typer.Option(help="Inside a node.")] = "200gbit",
    node_latency: Annotated[str, typer.Option(help="Inside a node.")] = "5us",
    backbone: Annotated[str | None, typer.Option(help="Of all nodes together. (no limit)")] = None,
    compute: Annotated[
        str | None, typer.Option(help="Of one step: 120ms. (as measured on this machine)")
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of a step's time, as a share of it.")
    ] = 0.0,
    slow: Annotated[list[str] | None, typer.Option(help="A slow rank: 3:10x. Repeatable.")] = None,
    kill: Annotated[
        list[str] | None, typer.Option(help="Kill a rank at a virtual time: 3@20s. Repeatable.")
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(help="A rank starts late: 3@20s. Repeatable.")
    ] = None,
    timing_only: Annotated[
        bool,
        typer.Option(
            "--timing-only", help="Predict the speed without any training; thousands of ranks."
        ),
    ] = False,
    options: asked.ListOptions = False,
) -> None:
    """Train RECIPE on virtual ranks in this process, on a virtual clock; the run and its report go
    to runs/NAME.

    The mathematics is that of real processes; only time is simulated.

    Example: loosestep simulate vision --strategy adpsgd:graph=random-ring --nodes 16
    --ranks-per-node 2
    """
    console = Console(highlight=False)
    with one_line_errors(), gentle_end():
        given: dict[str, Any] = {
            "recipe": recipe,
            "strategy": strategy,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "data": None if data is None else str(data),
            "gradients": gradients,
            "epochs": epochs,
            "lr": lr,
            "seed": seed,
            "device": device,
            "evaluate_every": evaluate_every,
        }
        wanted = asked.gather(given, config, settings or [], batch)
        if options:
            asked.show_options(wanted, console)
            return
        task = prepare(wanted, console)
        measured = compute is None
        if compute is None:
            compute = f"{1e3 * measure_step(task):.3g}ms"
        described = {
            "bandwidth": bandwidth,
            "latency": latency,
            "node_bandwidth": node_bandwidth,
            "node_latency": node_latency,
            "backbone": backbone,
            "compute": compute,
            "jitter": jitter,
            "slow": dict(map(_slow, slow or [])),
            "failures": dict(_at(text, "--kill") for text in kill or []),
            "joins": dict(_at(text, "--join") for text in join or []),
            "seed": wanted.seed,
        }
        cluster = make_cluster(described, Topology.grid(1, sum(wanted.counts())))
        if measured:
            console.print(
                f"a step takes {compute} on this machine; the same again with: --compute {compute}"
            )
        if timing_only:
            show_prediction(predict_run(wanted, task, cluster), console)
        else:
            train_virtually(
                wanted, task, cluster, runs / (name or asked.default_name(wanted)), console
            )


def make_cluster(described: dict[str, Any], topology: Topology) -> Cluster:
    """The cluster; what is wrong with it in one line."""
    try:
        cluster = Cluster(**described)
        cluster.check(topology)
    except ValueError as error:
        raise TrainingError(str(error)) from None
    return cluster


def _slow(text: str) -> tuple[int, float]:
    try:
        return grammar.slow(text)
    except ValueError as error:
        raise TrainingError(str(error)) from None


def _at(text: str, option: str) -> tuple[int, str]:
    """(3, "20s") of `3@20s`."""
    rank, found, time = text.partition("@")
    if not found or not rank.strip().isdigit():
        raise TrainingError(f"{option} {text!r}: expected RANK@TIME, for example 3@20s")
    return int(rank), time


def train_virtually(
    config: Config, task: Task[Any], cluster: Cluster, path: Path, console: Console
) -> None:
    """With real mathematics: a run folder and a report as of any run."""
    config = settle(config, task)
    simulated = ", ".join(
        f"{f.name} {v}" for f in dataclasses.fields(cluster) if (v := getattr(cluster, f.name))
    )
    config = config.but(environment={**config.environment, "simulated": simulated})
    folder = new_folder(path, config)
    title = f"{asked.short(config.recipe)}  {config.strategy}"
    console.print(
        f"[bold]{escape(config.recipe)}[/] with {escape(config.strategy)} on "
        f"{sum(config.counts())} virtual ranks: {config.gradients} gradients, run folder "
        f"{escape(str(path))}",
        soft_wrap=True,
    )
    try:
        with Screen(console, title) as screen:
            done = simulate_run(folder, config, task, cluster, screen.show)
    except TrainingError:
        report_so_far(folder)
        raise
    show_simulation(done, console)
    conclude(folder, RunResult(complete=True, problem=_losses(done)), console)


def _losses(done: Simulation) -> str:
    return ", ".join(
        f"rank {rank} was killed after {at:g} s" for rank, at in sorted(done.lost.items())
    )


def show_simulation(done: Simulation, console: Console) -> None:
    """The figures of the virtual cluster; its speed stands in the last line, as of any run."""
    rows = {
        "virtual time": spell_time(done.seconds),
        "sent": f"{done.bytes_sent / 1e6:.1f} MB, {done.bytes_between_nodes / 1e6:.1f} MB between "
        "nodes",
        "consensus distance": f"{done.distance:.3g}",
    }
    console.print(_table(rows))


def predict_run(config: Config, task: Task[Any], cluster: Cluster) -> Prediction:
    """Timing only: nothing of the recipe but the sizes of its parameters."""
    sizes = [
        p.numel() * p.element_size() for p in task.make_model().parameters() if p.requires_grad
    ]
    counts = config.counts()
    starts = [sum(counts[:node]) for node in range(len(counts))]
    topology = Topology(
        [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )
    steps = max(1, (settle(config, task).gradients or 1) // topology.world)
    try:
        return predict(config.chosen_strategy(), topology, cluster, parameters=sizes, steps=steps)
    except ValueError as error:
        raise TrainingError(str(error)) from None


def show_prediction(found: Prediction, console: Console) -> None:
    """What a run would take."""
    rows = {
        "ranks": str(found.ranks),
        "virtual time": spell_time(found.seconds),
        "gradients/s": f"{found.gradients_per_second:.1f}",
        "a step": f"{1e3 * found.seconds_per_step:.3g} ms",
        "waiting": f"{found.waiting.mean():.1%}, at most {found.waiting.max():.1%}",
        "sent between nodes": f"{found.bytes_per_gradient / 1e6:.3g} MB a gradient",
        "of the speed without communication": f"{found.efficiency:.1%}",
    }
    console.print(_table(rows))


def _table(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    for title, value in rows.items():
        table.add_row(title, f"[bold]{value}[/]")
    return table
