"""Schedules under gossip need neither rank 0 nor the store; those of collective strategies are
tested in test_loop.py.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from loosestep import launch
from loosestep.recipes.schedules import Plateau
from loosestep.runfolder.folder import RunFolder
from loosestep.training.shared_losses import Board
from training.trainees import tiny


def board(
    store: dist.Store, rank: int, recorded: Callable[[Callable[[], Any]], Any] | None = None
) -> Board:
    through_json = recorded or (lambda compute: json.loads(json.dumps(compute())))
    return Board(store, rank, world=3, deadline=5.0, gossip=True, recorded=through_json)


def test_ranks_go_on_together_without_rank_0() -> None:
    store = dist.HashStore()
    schedules = {1: Plateau(patience=2), 2: Plateau(patience=2)}
    boards = {rank: board(store, rank) for rank in schedules}
    for number in range(1, 9):
        for rank in (1, 2) if number % 2 else (2, 1):
            boards[rank].end_round(1.0, schedules[rank], number=number)
    assert schedules[1].state_dict() == schedules[2].state_dict()
    # the first round is the best, and every third without a better one is a cut
    assert schedules[1].factor(0) == 0.25


def test_a_round_counts_once_and_a_rank_that_missed_some_takes_over_what_was_decided() -> None:
    store = dist.HashStore()
    schedules = [Plateau(patience=10) for _ in range(3)]
    boards = [board(store, rank) for rank in range(3)]
    for number in range(1, 5):
        for rank in (0, 1):
            boards[rank].end_round(1.0, schedules[rank], number=number)
    boards[2].end_round(1.0, schedules[2], number=4)
    assert [schedule.state_dict()["bad"] for schedule in schedules] == [3, 3, 3]


def test_what_a_dead_rank_posted_last_does_not_count_for_ever() -> None:
    store = dist.HashStore()
    schedule = Plateau()
    board(store, 0).end_round(100.0, Plateau(), number=1)
    living = board(store, 1)
    living.end_round(2.0, schedule, number=2)
    assert schedule.state_dict()["best"] == 51.0
    living.end_round(2.0, schedule, number=3)
    assert schedule.state_dict()["best"] == 2.0


def test_without_a_store_each_rank_goes_on_by_its_own_loss_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    schedule = Plateau(patience=1)
    mine = board(client, 1)
    mine.end_round(4.0, schedule, number=1)
    del server
    with caplog.at_level(logging.WARNING, "loosestep"):
        for number in (2, 3, 4):
            mine.end_round(3.0, schedule, number=number)
    assert schedule.state_dict() == {"factor": 0.5, "best": 3.0, "bad": 0}
    assert len(caplog.records) == 1


def test_a_round_that_the_store_did_not_survive_is_replayed_as_it_was() -> None:
    """What is recorded is that there was no store: nothing of the attempt may stay in the
    schedule.
    """

    class Dying(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            if key == "schedule":
                raise RuntimeError("nobody answers")
            super().set(key, value)

    recorded: list[Any] = []

    def record(compute: Callable[[], Any]) -> Any:
        recorded.append(compute())
        return recorded[-1]

    schedule = Plateau()
    replayed = Plateau()
    board(Dying(), 1, record).end_round(3.0, schedule, number=1)
    board(dist.HashStore(), 1, lambda compute: recorded[0]).end_round(3.0, replayed, number=1)
    assert recorded == [None]
    assert schedule.state_dict() == replayed.state_dict() == {"factor": 1.0, "best": 3.0, "bad": 0}


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_ranks")
def test_a_training_under_gossip_outlives_rank_0_and_the_store_and_still_cuts_its_learning_rate(
    tmp_path: Path,
) -> None:
    config = tiny("adpsgd:graph=pairs", gradients=900, options={"batch": 4, "pause": 0.005})
    config = dataclasses.replace(config, nodes=3)
    folder = RunFolder(tmp_path)
    config.write(folder.config_file)
    with launch.start(
        [sys.executable, "-m", "loosestep.training.rank", str(tmp_path)], nodes=3
    ) as job:
        for rank in job.ranks:
            rank.expect('"progress"')
        job.ranks[0].kill(signal.SIGKILL)
        job._store = None  # and with it the server
        assert job.wait(60).returncodes == (-signal.SIGKILL, 0, 0)
    for rank in (1, 2):
        progress = [
            line for line in folder.metrics() if line["kind"] == "progress" and line["rank"] == rank
        ]
        rates = [line["lr"] for line in progress if line["gradients"] > 100]  # after the warm-up
        assert rates[-1] < max(rates)
        assert progress[-1]["gradients"] >= 900
        assert all(math.isfinite(line["loss"]) for line in progress)
