"""Losses shared between ranks, so that all of them cut the learning rate at the same gradient.

Collective strategies: at the end of round k every rank posts its mean loss of round k and reads
everybody's of round k - 1. Those are there already, since no rank is a round ahead, and all ranks
read the same: nobody waits, and the schedules stay equal bit for bit.

Gossip: whoever first ends a round observes the mean of what has been posted lately, and posts the
state of its schedule, which the others take over when they get there. So no rank is needed, and
when the store is gone each goes on by its own loss.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from loosestep.recipes import Schedule
from loosestep.runfolder.config import TrainingError

Recorded = Callable[[Callable[[], Any]], Any]
log = logging.getLogger("loosestep")


class Board:
    """What the ranks of a run post for each other."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        world: int,
        deadline: float,
        gossip: bool,
        recorded: Recorded,
    ) -> None:
        """`recorded`: what makes readings that depend on time the same in a replay."""
        self._store = store
        self._rank = rank
        self._world = world
        self._deadline = deadline
        self._gossip = gossip
        self._recorded = recorded
        self.round = 0
        self.posted: float | None = None
        self._alone = False

    def end_round(self, loss: float, schedule: Schedule, *, number: int) -> None:
        """Post this rank's loss of the round that ends, and let the schedule see the mean of all.
        `number` counts rounds of all learners: under gossip a slow one may miss some.
        """
        if not schedule.state_dict():  # a function of the gradients alone
            return
        if self._gossip:
            self._follow(loss, schedule, number)
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
                f"rank {missing} is a whole round of gradients behind or has ended; no loss of it "
                f"within {self._deadline:g} s"
            ) from None
        return sum(float(value) for value in self._store.multi_get(keys)) / self._world

    def _follow(self, loss: float, schedule: Schedule, number: int) -> None:
        state = self._recorded(lambda: self._decided(loss, schedule, number))
        if state is None:
            schedule.observe(loss)
        else:
            schedule.load_state_dict(state)

    def _decided(self, loss: float, schedule: Schedule, number: int) -> dict[str, Any] | None:
        """The schedule's state after this round, by whoever ended it first; None when there is
        no store any more.
        """
        if self._alone:
            return None
        before = schedule.state_dict()
        try:
            self._store.set(f"latest/{self._rank}", json.dumps([number, loss]))
            decided = -1
            if self._store.check(["schedule"]):
                decided, state = json.loads(self._store.get("schedule"))
                schedule.load_state_dict(state)
            if decided < number:
                losses = self._latest(number)
                schedule.observe(sum(losses) / len(losses))
                self._store.set("schedule", json.dumps([number, schedule.state_dict()]))
        except RuntimeError as error:  # of torch's stores, when nobody answers
            self._alone = True
            schedule.load_state_dict(before)
            log.warning(
                "the run's store is gone (%s); rank %s sets its learning rate by its own loss",
                error,
                self._rank,
            )
            return None
        return schedule.state_dict()

    def _latest(self, number: int) -> list[float]:
        """What was posted in this round and the one before; what is older is of the dead, or of
        the very slow.
        """
        keys = [f"latest/{rank}" for rank in range(self._world)]
        posted = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return [loss for when, loss in posted if when >= number - 1]
