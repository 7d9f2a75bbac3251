"""`loosestep resume`: a run goes on, with the same ranks or with others."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

import warm
from cli.commands import TINY, loosestep
from loosestep.report.outcome import Outcome
from loosestep.runfolder import checkpoint
from loosestep.runfolder.checkpoint import Checkpoints
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder

pytestmark = pytest.mark.usefixtures("own_folder", "warm_ranks")


def final_model(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(RunFolder(path).final_model)["model"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_kill_nine_and_resume_is_bit_for_bit_the_uninterrupted_run() -> None:
    common = [
        "--strategy",
        "daso:period=3,delay=1",
        "--nodes",
        "2",
        "--gradients",
        "120",
        "--checkpoint-every",
        "10",
    ]
    loosestep("train", TINY, *common, "--name", "whole")
    slowly = ["--set", "pause=0.05", "--evaluate-every", "40", "--name", "killed"]
    with warm.command("train", TINY, *common, *slowly) as job:
        job.ranks[0].expect("0/120 gradients  accuracy")  # 40, or 80
        job.ranks[0].kill(signal.SIGKILL)
    folder = RunFolder(Path("runs/killed"))
    made = max(line["gradients"] for line in folder.metrics())
    output = loosestep("resume", "runs/killed")
    resumed_at = int(re.search(r"goes on at gradient (\d+) of 120", output).group(1))  # type: ignore[union-attr]
    assert 30 <= resumed_at <= made
    # no more is lost than lies between two checkpoints, and one step
    assert made - resumed_at <= 12
    ours = final_model(Path("runs/whole"))
    theirs = final_model(Path("runs/killed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("report.html", "timeline.json", "trace.jsonl", "config.toml"):
        assert (folder.path / name).is_file()
    assert "is complete (120 gradients)" in loosestep("resume", "runs/killed", code=2)
    assert "holds a run already" in loosestep("train", TINY, "--name", "killed", code=2)


@pytest.mark.slow
def test_gossip_without_rank_0_is_judged_and_stored_by_the_first_that_is_left() -> None:
    common = ["--strategy", "adpsgd", "--nodes", "3", "--gradients", "300", "--name", "left"]
    with warm.command("train", TINY, *common, "--set", "pause=0.02") as job:
        job.ranks[0].expect("/300 gradients  accuracy")
        writer = Path("runs/left/writers/rank-0").read_text().split()[0]
        os.kill(int(writer), signal.SIGKILL)
        job.wait(timeout=60)
    folder = RunFolder(Path("runs/left"))
    final = [line for line in folder.metrics() if line["kind"] == "final"]
    assert [line["rank"] for line in final] == [1]
    assert folder.complete
    assert "is complete" in loosestep("resume", "runs/left", code=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["localsgd:period=2", "adpsgd"])
def test_fewer_ranks_and_more_train_on_and_count_what_was_sent_once(strategy: str) -> None:
    loosestep(
        "train", TINY, "--strategy", strategy, "--nodes", "2", "--gradients", "16", "--name", "run"
    )
    folder = RunFolder(Path("runs/run"))
    states = [
        Checkpoints(folder.checkpoints_of(folder.config(), rank)).list()[-1].read()
        for rank in (0, 1)
    ]
    sent = sum(state["stats"]["bytes_sent"] for state in states)
    assert sent > 0
    output = loosestep("resume", "runs/run", "--nodes", "1", "--gradients", "24")
    assert (
        "1 node of 1 rank(s) instead of 2 nodes of 1 rank(s): all start from the mean of the 2 "
        "ranks'" in output
    )
    alone = Outcome.read(folder)
    assert alone.gradients == 24
    assert [end["bytes_sent"] for end in alone.ends] == [sent]  # one rank sends nothing
    assert "at gradient 24" in loosestep(
        "resume", "runs/run", "--nodes", "3", "--gradients", "39", "--no-start"
    )
    loosestep("resume", "runs/run")
    more = Outcome.read(folder)
    assert (folder.complete, len(more.ends)) == (True, 3)
    assert more.gradients >= 39
    assert 39 * more.per_gradient("bytes_sent") > sent


def test_a_mistake_in_the_ranks_changes_nothing() -> None:
    Path("run").mkdir()
    before = Config(recipe=TINY, nodes=2, gradients=8)
    before.write(Path("run/config.toml"))
    assert "nodes" in loosestep("resume", "run", "--nodes", "0", "--gradients", "16", code=2)
    assert "--ranks-per-node" in loosestep(
        "resume", "run", "--ranks-per-node", "", "--gradients", "16", code=2
    )
    assert RunFolder(Path("run")).config() == before


@pytest.mark.parametrize(
    "changes", [["--gradients", "9"], ["--nodes", "2"], ["--ranks-per-node", "1"], ["--no-start"]]
)
def test_under_another_launcher_a_run_cannot_be_changed(
    changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    Config(recipe=TINY, nodes=2, gradients=8).write(Path("run/config.toml"))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert "first run, outside of it: loosestep resume run --no-start" in loosestep(
        "resume", "run", *changes, code=2
    )
