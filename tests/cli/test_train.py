"""`loosestep train` as a user meets it, and what mistakes look like."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.commands import TINY, loosestep
from loosestep import Topology
from loosestep.cli import common
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder

pytestmark = pytest.mark.usefixtures("own_folder", "warm_ranks")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "recipe is missing; it must be acoustic, vision or FILE.py:function"),
        (["train", "visoin"], "recipe must be acoustic, vision or FILE.py:function, got 'visoin'"),
        (["train", "missing.py:recipe"], "missing.py does not exist"),
        (["train", "vision", "--strategy", "dasso"], "did you mean 'daso'?"),
        (["train", "vision", "--set", "widht=2"], "unknown option widht, did you mean width?"),
        (["train", "vision", "--set", "width"], "--set needs key=value, got 'width'"),
        (["train", "vision", "--batch", "0"], "option batch must be at least 1, got 0"),
        (["train", "vision", "--data", "nowhere"], "nowhere"),
        (["train", "acoustic", "--data", "empty"], "empty"),
        (
            ["train", "vision", "--device", "abacus"],
            "--device must be cpu, cuda or cuda:N, got 'abacus'",
        ),
        (
            ["train", "vision", "--device", "meta"],
            "--device must be cpu, cuda or cuda:N, got 'meta'",
        ),
        (["train", "vision", "--device", "cuda:99"], "--device cuda:99: this machine has"),
        (
            ["train", "vision", "--config", "nowhere.toml"],
            "nowhere.toml cannot be read: No such file",
        ),
        (
            ["train", "vision", "--gradients", "9", "--epochs", "1"],
            "--gradients or --epochs, not both",
        ),
        (["train", TINY, "--set", "wrong=1"], "option wrong is wrong"),
        (["train", TINY, "--bandwidth", "fast", "--name", "x"], "--bandwidth fast: "),
        (["compare", TINY, "--bandwidth", "fast", "--name", "x"], "--bandwidth fast: "),
        (
            ["train", TINY, "--set", "schedule=cosine"],
            "schedule must be one of constant, warm-up, one-cycle, plateau",
        ),
        (["train", TINY, "--set", "batch=0"], "batch must be at least 1, got 0"),
        (["compare", "vision", "--strategies", "daso,dasso"], "unknown strategy 'dasso'"),
        (["compare", "vision", "--strategies", "daso,daso"], "must name different strategies"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["report", "empty"], "empty is not a run: there is no config.toml in it"),
        (["resume", "nowhere"], "nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    output = loosestep(*arguments, code=2)
    assert message in output
    assert len(output.splitlines()) == 1
    assert not Path("runs").exists()  # the name can be used for the next try


def test_options_show_the_values_that_the_run_would_use() -> None:
    said = loosestep("train", "vision", "--set", "preset=paper", "--set", "batch=7", "--options")
    assert "preset=paper" in said
    assert "batch=7" in said
    assert loosestep("train", "vision", "--options").count("model=resnet20") == 1
    assert "model=resnet50" in said or "size=224" in said


def test_options_of_a_recipe_are_listed() -> None:
    for command in ("train", "compare", "simulate"):
        assert "preset=digits" in loosestep(command, "vision", "--options")
    assert "your own function decides" in loosestep("compare", TINY, "--options")


@pytest.mark.slow
def test_a_run_that_diverged_leaves_a_report_too() -> None:
    output = loosestep(
        "train", TINY, "--gradients", "8", "--set", "scale=nan", "--name", "odd", code=1
    )
    assert "training loss is nan" in output
    assert "Report: runs/odd/report.html" in output
    assert "daso: diverged" in Path("runs/odd/report.html").read_text()
    assert "odd: diverged  " in loosestep("report", "runs/odd")


@pytest.mark.slow
def test_under_torchrun_the_given_ranks_train() -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    train = [
        "-m",
        "loosestep.cli",
        "train",
        TINY,
        "--strategy",
        "allreduce",
        "--gradients",
        "24",
        "--name",
        "given",
    ]
    done = subprocess.run(
        [*torchrun, *train], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"accuracy \d+\.\d %  24 gradients", done.stdout)
    folder = RunFolder(Path("runs/given"))
    assert (folder.config().nodes, folder.config().ranks_per_node) == (1, "2")
    assert {line["rank"] for line in folder.metrics() if line["kind"] == "end"} == {0, 1}
    assert folder.complete


def test_the_folder_tells_how_many_ranks_each_node_really_had() -> None:
    there = ["launch", "--nodes", "2", "--ranks-per-node", "2,1", "-m", "loosestep"]
    train = ["train", TINY, "--strategy", "allreduce", "--gradients", "12", "--name", "uneven"]
    done = subprocess.run(
        [sys.executable, "-m", "loosestep", *there, *train],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = RunFolder(Path("runs/uneven")).config()
    assert (config.nodes, config.ranks_per_node) == (2, "2,1")


@pytest.fixture
def given_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of two, by another launcher."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    there = SimpleNamespace(topology=Topology([[0], [1]]), close=lambda: None)
    monkeypatch.setattr(common, "open_world", lambda topology, deadline: there)


@pytest.mark.usefixtures("given_two_nodes")
def test_another_launcher_must_give_as_many_ranks_as_before_and_a_name() -> None:
    Path("runs/given").mkdir(parents=True)
    Config(recipe=TINY, nodes=3).write(Path("runs/given/config.toml"))
    message = "first run: loosestep resume runs/given --nodes 2 --ranks-per-node 1 --no-start"
    assert message in loosestep("resume", "runs/given", code=2)
    assert message in loosestep("train", TINY, "--name", "given", code=2)
    assert "give --name" in loosestep("train", TINY, code=2)
    assert "starts its own processes" in loosestep("compare", TINY, code=2)
    assert "leave it out" in loosestep(
        "train", TINY, "--name", "new", "--bandwidth", "1gbit", code=2
    )


@pytest.mark.usefixtures("given_two_nodes")
def test_under_another_launcher_a_run_is_not_continued_with_other_settings() -> None:
    Path("runs/given").mkdir(parents=True)
    before = Config(recipe=TINY, nodes=2, gradients=24, options={"hidden": "5"})
    before.write(Path("runs/given/config.toml"))
    common = ["train", TINY, "--gradients", "24", "--name", "given"]
    output = loosestep(*common, "--set", "hidden=5", "--strategy", "adpsgd", "--lr", "0.1", code=2)
    assert (
        "runs/given is a run with other settings: strategy is daso there and adpsgd now; lr is "
        "not given" in output
    )
    assert "options is {'hidden': '5'} there and {} now" in loosestep(*common, code=2)
    assert RunFolder(Path("runs/given")).config() == before
