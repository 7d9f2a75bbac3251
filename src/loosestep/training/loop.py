"""One rank's training: an ordinary loop, with evaluations, checkpoints and metrics at fixed numbers
of gradients.

Everything is counted in gradients of all learners. In collective strategies that is the number of
steps times the number of ranks, so all ranks do the same things at the same steps and no rank ever
asks another. Under gossip the count comes from the run, every rank acts on its own, and rank 0
alone evaluates.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from loosestep.recipes import Schedule, Task, local_scale, schedules
from loosestep.run import Run
from loosestep.runfolder import checkpoint
from loosestep.runfolder.checkpoint import Checkpoints, restore_model
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import Journal, RunFolder
from loosestep.topology import Topology
from loosestep.training.shared_losses import Board
from loosestep.training.start import Start

Tell = Callable[[dict[str, Any]], None]
LINES = 200  # of progress in metrics.jsonl, per rank
BEAT = 0.5  # seconds between two messages to the screen
EXAMPLES = 10
ADDITIVE = (
    "exchanges",
    "folds",
    "joins",
    "bytes_sent",
    "bytes_between_nodes",
    "wait_seconds",
    "exchange_seconds",
)


class Diverged(TrainingError):
    """The loss is no number any more."""


def budget(config: Config, task: Task[Any]) -> int:
    """Gradients of all learners in this run."""
    if config.gradients is not None:
        return config.gradients
    epochs = task.training.epochs if config.epochs is None else config.epochs
    return max(1, round(epochs * task.order.batches_per_epoch))


def starting_lr(config: Config, task: Task[Any], counts: Sequence[int]) -> float:
    """What was given, or the recipe's rate times the rule for optimizers that step on local
    gradients.

    `counts`: ranks per node as they are, which under an outer launcher only the run's topology
    knows.
    """
    if config.lr is not None:
        return config.lr
    replicas = {"world": 1, "node": len(counts), "rank": sum(counts)}[
        config.chosen_strategy().fitted(counts).learner
    ]
    return task.training.lr * local_scale(task.training.optimizer, replicas)


class Trainer:
    """The state of one rank: a model attached to a run, and where it is in the data, the
    schedule and the budget.
    """

    def __init__(
        self,
        config: Config,
        task: Task[Any],
        run: Run,
        *,
        folder: RunFolder,
        journal: Journal,
        start: Start | None,
        tell: Tell,
    ) -> None:
        self.config = config
        self.task = task
        self.run = run
        self.model = run.model
        self.optimizer = run.optimizers[0]
        self.journal = journal
        self.tell = tell
        self.folder = folder
        self.gossip = run.strategy.gossip is not None
        self.world = run.topology.world
        self.total = budget(config, task)
        self.lr = starting_lr(config, task, run.topology.weights)
        self.schedule: Schedule = task.training.make_schedule(
            total=self.total, epoch=task.order.batches_per_epoch, learners=self.world
        )
        self.checkpoints = Checkpoints(folder.checkpoints_of(config, run.rank), keep=config.keep)
        self.board = Board(
            run.notes("training"),
            run.rank,
            world=self.world,
            deadline=config.deadline,
            gossip=self.gossip,
            recorded=run.recorded,
        )
        self.gradients = 0 if start is None else start.gradients
        self.step = 0
        self.stream = task.stream(learner=run.rank, learners=self.world, taken=self.gradients)
        self.losses = Mean()
        self.round_losses = Mean()
        self.loss = math.nan
        self.latest: torch.Tensor | None = None  # the loss of the step under way
        self.stats_before: dict[str, float] = {}
        self.base = 0  # gradients that the run does not count, because other ranks made them
        self.clock = TrainingTime(run.trace.clock)
        self._messages: deque[tuple[float, int]] = deque(maxlen=10)
        self._said = 0.0
        if start is not None:
            self._restore(start)

    # The loop -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Until the budget is used up."""
        self.clock.go()
        self.run.trace.emit("begin", gradients=self.gradients)
        self.model.train()
        self._say(force=True)
        for batch in self.stream:
            if self.gradients >= self.total:
                break
            schedules.apply(self.schedule, self.optimizer, lr=self.lr, gradients=self.gradients)
            loss = self.task.loss(self.model, batch)
            loss.backward()
            self.latest = loss.detach()
            if self.task.training.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.training.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for listener in (self.run.observe, self.losses.add, self.round_losses.add):
                listener(loss)
            self._advance()
        self.clock.stop()

    def _advance(self) -> None:
        """Count the step, and do what is due."""
        before = self.gradients
        self.step = self.step + 1
        if self.gossip:
            self.gradients = max(before, self.base + self.run.global_steps)
        else:
            self.gradients += self.world
        done = self.gradients >= self.total

        def due(every: int) -> bool:
            return before // every != self.gradients // every

        epoch = self.task.order.batches_per_epoch
        if due(epoch):
            self.board.end_round(
                self.round_losses.take(), self.schedule, number=self.gradients // epoch
            )
        if due(max(1, self.total // LINES)) or done:
            self._note_progress()
        if due(self.config.evaluate_every or max(1, self.total // 10)) and not done:
            self._evaluate()
        if due(self.config.checkpoint_every or max(1, self.total // 10)) or done:
            self._save()
        self.journal.flush_when_many()
        self._say()

    def finish(self) -> None:
        """The final model, the same on every rank: judged and stored by one of them."""
        self.run.finish()
        self.journal.metric(
            "end", gradients=self.gradients, seconds=self.clock.seconds, **self._stats()
        )
        if not self._speaks:
            return
        metrics = self.task.evaluate(self.model)
        examples = [asdict(example) for example in self.task.examples(self.model, EXAMPLES)]
        fields = {
            "metrics": metrics,
            "examples": examples,
            "seconds": self.clock.seconds,
            "lr": self.lr,
        }
        self._store_final(metrics)  # before the line that says that the run is complete
        self.journal.metric("final", gradients=self.gradients, **fields)
        self.tell({"kind": "final", "gradients": self.gradients, **fields})

    @property
    def _speaks(self) -> bool:
        """Whether this rank judges and stores: rank 0, or under gossip the first that is left."""
        lost = self.run.stats.get("lost", [])
        return self.run.rank == next(rank for rank in range(self.world) if rank not in lost)

    def _store_final(self, metrics: dict[str, float]) -> None:
        """In place of that of a shorter training, which is there until the new one is whole."""
        path = self.folder.final_model
        fresh = path.with_name(f"{path.name}.new-{self.run.rank}")
        shutil.rmtree(fresh, ignore_errors=True)
        checkpoint.write(fresh, {"model": self.model.state_dict(), "metrics": metrics})
        shutil.rmtree(path, ignore_errors=True)
        fresh.rename(path)

    # What is due now and then ---------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The mean of all replicas, judged by one rank. Others go on, as far as their strategy
        lets them.
        """
        speaks = self._speaks
        if self.gossip and not speaks:
            return
        if not self.gossip:  # everybody meets, then waits for rank 0: not a part of the training
            self.clock.stop()
        begin = self.clock.now()
        with self.run.consensus() as model:
            metrics = self.task.evaluate(model) if speaks else {}
        self.run.trace.emit("evaluate", seconds=self.clock.now() - begin)
        self.clock.go()
        if not speaks:
            return
        distance = self.run.stats["consensus_distance"]
        fields = {"metrics": metrics, "seconds": self.clock.seconds, "consensus_distance": distance}
        self.journal.metric("evaluation", gradients=self.gradients, **fields)
        self._say(force=True)
        self.tell({"kind": "evaluation", "gradients": self.gradients, "metrics": metrics})

    def _note_progress(self) -> None:
        self.loss = self.losses.take()
        lr = self.optimizer.param_groups[0]["lr"]
        self.journal.metric(
            "progress",
            gradients=self.gradients,
            step=self.step,
            seconds=self.clock.seconds,
            loss=self.loss,
            lr=lr,
            **self._stats(),
        )
        if not math.isfinite(self.loss):
            raise Diverged(
                f"the training loss is {self.loss} at gradient {self.gradients}; lower --lr, it "
                f"is {self.lr:g}"
            )

    def _say(self, force: bool = False) -> None:
        if not force and time.monotonic() - self._said < BEAT:
            return
        self._said = time.monotonic()
        now = self.clock.now()
        self._messages.append((now, self.step))
        (first, step) = self._messages[0]
        seconds = self.clock.wall
        stats = self._stats()
        self.tell(
            {
                "kind": "progress",
                "rank": self.run.rank,
                "node": self.run.topology.node_of(self.run.rank),
                "gradients": self.gradients,
                "loss": self.losses.value if self.losses.count else self.loss,
                "speed": (self.step - step) / (now - first) if now > first else 0.0,
                "waiting": min(
                    1.0,
                    (stats["wait_seconds"] - self.stats_before.get("wait_seconds", 0))
                    / max(seconds, 1e-9),
                ),
            }
        )

    def _stats(self) -> dict[str, Any]:
        """What the run counts, and what was counted before it was resumed."""
        stats = self.run.stats
        return {
            **stats,
            **{name: stats.get(name, 0) + self.stats_before.get(name, 0) for name in ADDITIVE},
        }

    # State ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        begin = time.monotonic()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "run": self.run.state_dict(),
            "stream": self.stream.state_dict(),
            "schedule": self.schedule.state_dict(),
            "board": self.board.state_dict(),
            "losses": [[float(sums.sum), sums.count] for sums in (self.losses, self.round_losses)],
            "gradients": self.gradients,
            "base": self.base,
            "step": self.step,
            "seconds": self.clock.seconds,
            "stats": {name: value for name, value in self._stats().items() if name in ADDITIVE},
            "trace_bytes": self.journal.flush(),
        }
        self.checkpoints.save(self.gradients, state)
        self.run.trace.emit("checkpoint", seconds=time.monotonic() - begin)

    def _restore(self, start: Start) -> None:
        """After attach, which has made all replicas equal: each becomes what it was."""
        state = start.state
        self.checkpoints.discard_after(start.gradients)
        restore_model(self.model, state["model"], source=start.source)
        self.base = int(state.get("base", start.gradients))
        self.schedule.load_state_dict(state["schedule"])
        self.clock.seconds_before = float(state["seconds"])
        self.stats_before = dict(state["stats"])
        if not start.exact:
            return
        self.run.load_state_dict(state["run"])
        self.stream.load_state_dict(state["stream"])
        self.board.load_state_dict(state["board"])
        self.step = int(state["step"])
        for sums, (total, count) in zip(
            (self.losses, self.round_losses), state["losses"], strict=True
        ):
            sums.sum = float(total)
            sums.count = int(count)


class Mean:
    """A running mean of losses, summed where they are: no synchronisation with the device until
    it is asked for.
    """

    def __init__(self) -> None:
        self.sum: torch.Tensor | float = 0.0
        self.count = 0

    def add(self, loss: torch.Tensor) -> None:
        self.sum = self.sum + loss.detach().double()
        self.count += 1

    @property
    def value(self) -> float:
        return float(self.sum) / self.count if self.count else math.nan

    def take(self) -> float:
        """The mean since the last call."""
        value = self.value
        self.sum = 0.0
        self.count = 0
        return value


class TrainingTime:
    """Seconds of training: paused while everybody waits for an evaluation, continued when a run
    is resumed.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds_before = 0.0
        self._since: float | None = None
        self._began = now()

    @property
    def seconds(self) -> float:
        return self.seconds_before + (0.0 if self._since is None else self.now() - self._since)

    @property
    def wall(self) -> float:
        """Since this process began to train, pauses included."""
        return self.now() - self._began

    def go(self) -> None:
        if self._since is None:
            self._since = self.now()

    def stop(self) -> None:
        self.seconds_before = self.seconds
        self._since = None


def describe_run(config: Config, task: Task[Any], topology: Topology) -> dict[str, Any]:
    """What the report says at its top, and what the screen needs."""
    return {
        "recipe": task.name,
        "quality": {"name": task.quality.name, "better": task.quality.better},
        "total": budget(config, task),
        "lr": starting_lr(config, task, topology.weights),
        "optimizer": task.training.optimizer,
        "schedule": task.training.schedule,
        "epoch": task.order.batches_per_epoch,
        "nodes": [list(node) for node in topology.nodes],
        "task": task.describe(),
    }
