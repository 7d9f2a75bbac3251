"""Losses shared between ranks, so that all of them cut the learning rate at the same gradient.

Collective strategies: at the end of round k every rank posts its mean loss of round k and reads everybody's of round
k - 1. Those are there already, since no rank is a round ahead, and all ranks read the same: nobody waits, and the
schedules stay equal bit for bit. Gossip: rank 0 reads what there is, decides, and posts the state of its schedule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from loosestep.recipes import Schedule
from loosestep.training.config import TrainingError

Recorded = Callable[[Callable[[], Any]], Any]


class Board:
    """What the ranks of a run post for each other."""

    def __init__(
        self, store: dist.Store, rank: int, *, world: int, deadline: float, gossip: bool, recorded: Recorded
    ) -> None:
        """`recorded`: what makes readings that depend on time the same in a replay."""
        self._store = store
        self._rank, self._world, self._deadline, self._gossip = rank, world, deadline, gossip
        self._recorded = recorded
        self.round = 0
        self.posted: float | None = None

    def end_round(self, loss: float, schedule: Schedule) -> None:
        """Post this rank's loss of the round that ends, and let the schedule see the mean of all."""
        if not schedule.state_dict():  # a function of the gradients alone
            return
        if self._gossip:
            self._follow(loss, schedule)
            return
        before = None if self.posted is None else self._read(self.round)
        self.round += 1
        self._post(loss)
        if before is not None:
            schedule.observe(before)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "posted": self.posted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, and post again what the others will read: the store is a new one."""
        self.round = int(state["round"])
        if state["posted"] is not None:
            self._post(float(state["posted"]))

    def _post(self, loss: float) -> None:
        self.posted = loss
        self._store.set(f"loss/{self.round}/{self._rank}", repr(loss))

    def _read(self, number: int) -> float:
        keys = [f"loss/{number}/{rank}" for rank in range(self._world)]
        try:
            self._store.wait(keys, timedelta(seconds=self._deadline))
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TrainingError(
                f"rank {missing} is a whole round of gradients behind or has ended; no loss of it within {self._deadline:g} s"
            ) from None
        return sum(float(value) for value in self._store.multi_get(keys)) / self._world

    def _follow(self, loss: float, schedule: Schedule) -> None:
        self._store.set(f"latest/{self._rank}", repr(loss))
        if self._rank == 0:
            values = self._recorded(self._latest)
            schedule.observe(sum(values) / len(values))
            self._store.set("schedule", json.dumps(schedule.state_dict()))
        else:
            state = self._recorded(self._posted_schedule)
            if state is not None:
                schedule.load_state_dict(state)

    def _latest(self) -> list[float]:
        keys = [f"latest/{rank}" for rank in range(self._world)]
        return [float(self._store.get(key)) for key in keys if self._store.check([key])]

    def _posted_schedule(self) -> Any:
        return json.loads(self._store.get("schedule")) if self._store.check(["schedule"]) else None
