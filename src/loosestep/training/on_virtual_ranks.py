"""A run of a recipe on virtual ranks: the same loop, folder and report as on processes."""

from __future__ import annotations

import statistics
import time
from typing import Any

from loosestep.core.errors import CommError
from loosestep.recipes import Task
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import Journal, RunFolder
from loosestep.sim.cluster import Cluster
from loosestep.sim.driver import Simulation, simulate
from loosestep.topology import Topology
from loosestep.training.loop import Tell, Trainer, describe_run
from loosestep.training.rank import attach_to

MEASURED = 5  # steps, after one to warm up


class VirtualTrainer(Trainer):
    """A simulation is repeated rather than resumed: no checkpoints but the final model."""

    def _save(self) -> None:
        self.journal.flush()


def simulate_run(
    folder: RunFolder, config: Config, task: Task[Any], cluster: Cluster, tell: Tell
) -> Simulation:
    """All ranks of a run, to the end. The task is built once: it holds no state of a rank."""
    counts = config.counts()
    began = time.time()
    starts = [sum(counts[:node]) for node in range(len(counts))]
    topology = Topology(
        [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )

    def train(rank: int) -> None:
        model = task.make_model()
        run = attach_to(config, model, task.training.make_optimizer(model))
        with Journal(folder, rank, began=began) as journal, run:
            run.trace.sink = journal.event
            trainer = VirtualTrainer(
                config, task, run, folder=folder, journal=journal, start=None, tell=tell
            )
            if rank == 0:
                described = describe_run(config, task, run.topology)
                journal.metric("begin", gradients=0, **described)
                tell({"kind": "begin", "gradients": 0, **described})
            trainer.train()
            trainer.finish()

    try:
        done = simulate(train, ranks=topology.world, topology=topology, cluster=cluster)
    except CommError as error:
        raise TrainingError(str(error)) from error
    folder.merge_traces()
    return done


def measure_step(task: Task[Any]) -> float:
    """Seconds of one step of this task on this machine."""
    model = task.make_model().train()
    optimizer = task.training.make_optimizer(model)
    times = []
    for _, batch in zip(range(MEASURED + 1), task.stream(), strict=False):
        begin = time.perf_counter()
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:] or times)
