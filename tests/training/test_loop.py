"""Training on real processes: what is written, and that a crash costs nothing but time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pool
import pytest
import torch

from loosestep import Cluster
from loosestep.recipes import find_recipe
from loosestep.runfolder import checkpoint
from loosestep.runfolder.checkpoint import CheckpointError, Checkpoints
from loosestep.runfolder.config import TrainingError
from loosestep.runfolder.folder import RunFolder
from loosestep.training.on_virtual_ranks import simulate_run
from loosestep.training.start import START, find_start, rearrange
from training.trainees import final_model, tiny, train

COLLECTIVE = [
    "allreduce",
    "daso:period=3,delay=1,window=4",
    "localsgd:period=4",
    "localsgd:period=4,delay=2",
    "delay-by-one",
]


@pytest.fixture(scope="module", autouse=True)
def close_pool() -> Any:
    yield
    pool.drop(2)


def assert_same_model(first: RunFolder, second: RunFolder) -> None:
    ours = final_model(first)
    theirs = final_model(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def losses(folder: RunFolder) -> list[tuple[int, int, float, float]]:
    lines = [line for line in folder.metrics() if line["kind"] == "progress"]
    return sorted((line["rank"], line["gradients"], line["loss"], line["lr"]) for line in lines)


@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    # an epoch is two gradients: the learning rate is cut on the way
    config = tiny(strategy, options={"batch": 48})
    whole = train(tmp_path / "whole", config)
    broken = tmp_path / "broken"
    for crash_at in (11, 30, 41):
        train(broken, config, crash_at=crash_at)
    resumed = train(broken, config)
    assert_same_model(whole, resumed)
    assert losses(resumed) == losses(whole)


def test_a_run_under_gossip_goes_on_from_each_ranks_own_checkpoint(tmp_path: Path) -> None:
    config = tiny("adpsgd")
    train(tmp_path, config, crash_at=30)
    folder = RunFolder(tmp_path)
    starts = [find_start(folder, config, rank, pytest.fail) for rank in (0, 1)]
    assert all(start is not None and start.exact and start.gradients >= 16 for start in starts)
    train(tmp_path, config)
    final = [line for line in folder.metrics() if line["kind"] == "final"]
    assert len(final) == 1
    assert final[0]["gradients"] >= 96
    assert final[0]["metrics"]["accuracy"] > 0.7


def test_other_ranks_go_on_from_the_mean_and_are_told_so(tmp_path: Path) -> None:
    config = tiny("localsgd:period=50")  # never averaged: the ranks differ
    train(tmp_path, config, crash_at=20)
    folder = RunFolder(tmp_path)
    states = [Checkpoints(folder.checkpoints_of(config, rank)).list()[-1].read() for rank in (0, 1)]
    changed, words = rearrange(folder, config, nodes=1, ranks_per_node="1", warn=pytest.fail)
    assert "1 node of 1 rank(s) instead of 2 nodes of 1" in words
    assert "mean of the 2 ranks" in words
    assert folder.config() == changed
    start = find_start(folder, changed, 0, pytest.fail)
    assert start is not None
    assert start.gradients == 32
    for name, value in start.state["model"].items():
        assert torch.allclose(value, (states[0]["model"][name] + states[1]["model"][name]) / 2)
    assert any(
        (states[0]["model"][name] != states[1]["model"][name]).any() for name in states[0]["model"]
    )
    assert not folder.generation(0).exists()


def test_what_the_old_ranks_counted_is_divided_among_the_new_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    config = tiny("localsgd")
    for rank, sent in enumerate((10, 30)):
        state = {"model": {}, "optimizer": {}, "schedule": {}, "gradients": 16, "seconds": 1.0}
        Checkpoints(folder.checkpoints_of(config, rank)).save(
            16, {**state, "stats": {"bytes_sent": sent}}
        )
    # from the second on there are no checkpoints but the common start
    for nodes, each in ((4, 10), (5, 8), (1, 40)):
        config, _ = rearrange(folder, config, nodes=nodes, ranks_per_node="1", warn=pytest.fail)
        start = find_start(folder, config, 0, pytest.fail)
        assert start is not None
        assert start.source.endswith(START)
        assert start.state["stats"] == {"bytes_sent": each}


@pytest.mark.parametrize("strategy", ["allreduce", "adpsgd"])
def test_a_missing_folder_of_one_rank_is_refused_and_nothing_overwritten(
    strategy: str, tmp_path: Path
) -> None:
    config = tiny(strategy)
    train(tmp_path, config, crash_at=30)
    folder = RunFolder(tmp_path)
    shutil.rmtree(folder.checkpoints_of(config, 1))
    kept = Checkpoints(folder.checkpoints_of(config, 0)).list()
    for rank in (0, 1):
        with pytest.raises(TrainingError, match=r"rank-1 is missing, and other ranks of this run"):
            find_start(folder, config, rank, pytest.fail)
    assert Checkpoints(folder.checkpoints_of(config, 0)).list() == kept


def test_damaged_checkpoints_are_passed_over_and_named(tmp_path: Path) -> None:
    config = tiny("allreduce")
    train(tmp_path, config, crash_at=30)
    folder = RunFolder(tmp_path)
    newest = Checkpoints(folder.checkpoints_of(config, 1)).list()[-1]
    file = newest.path / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    warnings: list[str] = []
    start = find_start(folder, config, 0, warnings.append)
    assert start is not None
    assert start.gradients == newest.step - 16
    assert str(file) in warnings[0]
    train(tmp_path, config)


def test_the_folder_tells_the_whole_story(tmp_path: Path) -> None:
    folder = train(tmp_path, tiny("daso:period=2,delay=1"))
    metrics = folder.metrics()
    kinds = [line["kind"] for line in metrics]
    assert kinds.count("begin") == kinds.count("final") == 1
    assert kinds.count("end") == 2
    evaluated = [line["gradients"] for line in metrics if line["kind"] == "evaluation"]
    assert evaluated == [24, 48, 72]  # at 96 the final model is judged instead
    events = list(folder.events())
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    for rank in (0, 1):
        assert sum(event["kind"] == "step" and event["rank"] == rank for event in events) == 48
    folder.merge_traces()
    assert list(folder.events()) == events
    assert not folder.trace_of(0).exists()


def test_a_run_is_complete_only_when_its_final_model_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    config = tiny("allreduce", gradients=8)
    task = find_recipe(config.recipe).build({}, seed=0)

    def train_once() -> None:
        folder.forget_metrics_after(-1)
        simulate_run(folder, config, task, Cluster(compute="1ms"), lambda message: None)

    def full(*_: object) -> None:
        raise CheckpointError("no space left")

    train_once()
    assert folder.complete
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        with pytest.raises(CheckpointError, match="no space left"):
            train_once()
    assert not any(line["kind"] == "final" for line in folder.metrics())
    assert final_model(folder)  # that of before
    train_once()
    assert folder.complete
    folder.final_model.rename(tmp_path / "elsewhere")
    assert not folder.complete  # there is a line, but no model


def test_the_learning_rate_counts_the_nodes_there_are(tmp_path: Path) -> None:
    """Open MPI does not say how many there are: the settings count one node of two ranks, the
    ranks know better.
    """
    config = tiny("daso", gradients=8, options={"optimizer": "adamw"}).but(
        nodes=1, ranks_per_node="2"
    )
    lines = {line["kind"]: line for line in train(tmp_path, config).metrics()}
    assert lines["begin"]["nodes"] == [[0], [1]]
    assert lines["begin"]["lr"] == lines["final"]["lr"] == pytest.approx(0.3 * 2**0.5)


def test_all_ranks_cut_the_learning_rate_at_the_same_gradient(tmp_path: Path) -> None:
    # two gradients an epoch: the plateau comes soon
    config = tiny("allreduce", gradients=240, options={"batch": 48})
    folder = train(tmp_path, config)
    rates = {rank: [(g, lr) for r, g, _, lr in losses(folder) if r == rank] for rank in (0, 1)}
    assert rates[0] == rates[1]
    after_warm_up = [lr for gradients, lr in rates[0] if gradients > 30]
    assert min(after_warm_up) < max(after_warm_up)


def test_a_loss_that_is_no_number_ends_the_run_with_advice(tmp_path: Path) -> None:
    config = tiny("allreduce", options={"scale": "nan"})
    with pytest.raises(
        AssertionError, match=r"training loss is nan at gradient 2; lower --lr, it is 0\.3"
    ):
        train(tmp_path, config)
