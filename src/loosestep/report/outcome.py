"""What a run came to: the figures of tables and reports, read from its folder."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from loosestep.report.spans import Activity, read_activities
from loosestep.runfolder.config import Config, TrainingError
from loosestep.runfolder.folder import RunFolder

POINTS = 80  # of a curve


class Point(NamedTuple):
    """A value of a curve: after so many gradients of all learners, and so many seconds of
    training.
    """

    gradients: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Outcome:
    """One run: its configuration, its metrics and what each of its ranks did."""

    folder: RunFolder
    config: Config
    metrics: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, folder: RunFolder) -> Outcome:
        """What is known so far; the run need not be complete."""
        metrics = folder.metrics()
        if not any(line["kind"] == "begin" for line in metrics):
            raise TrainingError(
                f"{folder.path}: nothing is known of this run yet ({folder.metrics_file.name} is "
                "empty)"
            )
        return cls(folder, folder.config(), metrics)

    @property
    def strategy(self) -> str:
        return self.config.strategy

    @property
    def name(self) -> str:
        return self.folder.path.name

    @cached_property
    def begin(self) -> dict[str, Any]:
        return self._of_kind("begin")[-1]

    @property
    def final(self) -> dict[str, Any] | None:
        """The line about the final model; None if the run is not complete."""
        return next(iter(self._of_kind("final")), None)

    @cached_property
    def diverged(self) -> bool:
        """Whether the loss was no number any more: what was judged before counts as no result."""
        return self.folder.diverged

    @property
    def quality_name(self) -> str:
        return str(self.begin["quality"]["name"])

    @property
    def higher_is_better(self) -> bool:
        return bool(self.begin["quality"]["better"] == "higher")

    @property
    def gradients(self) -> int:
        return max(int(line["gradients"]) for line in self.metrics)

    @property
    def seconds(self) -> float:
        """Of training, by rank 0's clock."""
        return max(
            (
                float(line["seconds"])
                for line in self.metrics
                if "seconds" in line and line["rank"] == 0
            ),
            default=0.0,
        )

    @property
    def speed(self) -> float:
        """Gradients per second of all learners."""
        return self.gradients / self.seconds if self.seconds > 0 else 0.0

    @property
    def quality(self) -> float | None:
        """Of the final model, or of the last evaluation."""
        curve = self.quality_curve
        return curve[-1].value if curve else None

    @cached_property
    def quality_curve(self) -> list[Point]:
        """Evaluations of the mean model; the final one last."""
        lines = self._of_kind("evaluation") + self._of_kind("final")
        return [
            Point(line["gradients"], line["seconds"], line["metrics"][self.quality_name])
            for line in lines
        ]

    @cached_property
    def loss_curve(self) -> list[Point]:
        """The training loss: the mean of the ranks' lines at about the same gradient."""
        return self._curve("loss")

    @cached_property
    def distance_curve(self) -> list[Point]:
        """The consensus distance."""
        return self._curve("consensus_distance")

    @cached_property
    def ends(self) -> list[dict[str, Any]]:
        """The last figures of every rank there is; one of before the run went on with fewer has
        passed its sums on.
        """
        ranks = {rank for node in self.begin["nodes"] for rank in node}
        last: dict[int, dict[str, Any]] = {}
        for line in self.metrics:
            if line["kind"] in ("progress", "end") and line["rank"] in ranks:
                last[line["rank"]] = line
        return [last[rank] for rank in sorted(last)]

    def per_gradient(self, name: str) -> float:
        """A sum over all ranks, per gradient: `bytes_sent`, `bytes_between_nodes`."""
        return sum(float(end.get(name, 0)) for end in self.ends) / max(1, self.gradients)

    @property
    def exchanges_per_step(self) -> float:
        """Models that a rank has exchanged per step, on average; averaging gradients counts as one."""
        if self.config.chosen_strategy().spans_world:
            return 1.0
        return statistics.fmean(
            float(end.get("exchanges", 0)) / max(1, int(end.get("steps", 0))) for end in self.ends
        )

    @property
    def distance_in_steps(self) -> float:
        """How many of its own steps a learner was from the mean, on average; nan where it is not
        known.
        """
        told = [end.get("distance_in_steps") for end in self.ends]
        known = [float(value) for value in told if value is not None]
        return statistics.fmean(known) if known else math.nan

    @cached_property
    def activities(self) -> list[Activity]:
        """What each rank did when."""
        return read_activities(self.folder.events())

    @property
    def waiting(self) -> float:
        """The part of their training time that ranks spent waiting, on average; evaluations do
        not count.
        """
        shares = [
            activity.waiting / activity.seconds
            for activity in self.activities
            if activity.seconds > 0
        ]
        return statistics.mean(shares) if shares else 0.0

    @property
    def staleness(self) -> list[float]:
        """Of every fold of every rank."""
        return [value for activity in self.activities for value in activity.staleness]

    @property
    def staleness_mean(self) -> float:
        values = self.staleness
        return statistics.mean(values) if values else 0.0

    @property
    def distance(self) -> float:
        """The last consensus distance that is known and not zero by construction."""
        values = [point.value for point in self.distance_curve if math.isfinite(point.value)]
        return values[-1] if values else 0.0

    def seconds_to(self, target: float) -> float | None:
        """When the mean model first was at least as good."""
        for point in self.quality_curve:
            if point.value >= target if self.higher_is_better else point.value <= target:
                return point.seconds
        return None

    def best(self) -> float | None:
        """The best quality on the way."""
        values = [point.value for point in self.quality_curve]
        return None if not values else (max if self.higher_is_better else min)(values)

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == kind]

    def _curve(self, name: str) -> list[Point]:
        bins = defaultdict(list)
        width = max(1, int(self.begin["total"]) // POINTS)
        for line in self._of_kind("progress"):
            if line.get(name) is not None:
                bins[line["gradients"] // width].append(line)
        return [
            Point(
                round(statistics.mean(line["gradients"] for line in lines)),
                statistics.mean(
                    line["seconds"] for line in lines if line["rank"] == 0 or not _has_first(lines)
                ),
                statistics.mean(line[name] for line in lines),
            )
            for _, lines in sorted(bins.items())
        ]


def _has_first(lines: Sequence[dict[str, Any]]) -> bool:
    return any(line["rank"] == 0 for line in lines)
