"""A recipe on virtual ranks trains to the same model as on processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pool
import pytest
import torch

from loosestep import Cluster
from loosestep.recipes import find_recipe
from loosestep.report.outcome import Outcome
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder
from loosestep.training.on_virtual_ranks import measure_step, simulate_run
from training.trainees import final_model, tiny, train


@pytest.fixture(scope="module", autouse=True)
def close_pool() -> Any:
    yield
    pool.drop(2)


def virtually(path: Path, config: Config, cluster: Cluster) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path)
    config.write(folder.config_file)
    task = find_recipe(config.recipe).build(config.options, seed=config.seed)
    simulate_run(folder, config, task, cluster, lambda message: None)
    return folder


@pytest.mark.races(reason="processes have to be started and to meet within the deadline")
@pytest.mark.parametrize("strategy", ["daso:period=3,delay=1,window=4", "delay-by-one"])
def test_the_final_model_is_that_of_real_processes(tmp_path: Path, strategy: str) -> None:
    """The schedule has a memory, so the losses that ranks tell each other must be the same too."""
    config = tiny(strategy)
    ours = virtually(tmp_path / "virtual", config, Cluster(compute="20ms", jitter=0.3))
    theirs = train(tmp_path / "real", config)
    for name, value in final_model(theirs).items():
        assert torch.equal(final_model(ours)[name], value), name


def test_the_report_counts_virtual_seconds(tmp_path: Path) -> None:
    folder = virtually(
        tmp_path / "run", tiny("allreduce"), Cluster(compute="500ms", latency="10ms")
    )
    outcome = Outcome.read(folder)
    assert outcome.final is not None
    assert outcome.gradients == 96
    # the last bucket, there and back
    assert outcome.seconds == pytest.approx(48 * (0.5 + 2 * 0.01), rel=0.01)
    assert {activity.rank for activity in outcome.activities} == {0, 1}


def test_a_step_is_measured_on_this_machine() -> None:
    task = find_recipe(tiny("daso").recipe).build({"pause": 0.01}, seed=0)
    assert 0.01 < measure_step(task) < 5
