"""`loosestep train`, `resume`, `compare` and `report` as a user meets them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import warm
from loosestep import checkpoint
from loosestep.cli import app
from loosestep.training.config import Config
from loosestep.training.folder import RunFolder

pytestmark = pytest.mark.usefixtures("own_folder", "warm_ranks")
TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:recipe"
COMMAND = [sys.executable, "-c", "from loosestep.cli import main; main()"]


def loosestep(*arguments: str, code: int = 0) -> str:
    """Run a command; the output. The commands that start ranks start them as processes."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def final_model(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(RunFolder(path).final_model)["model"]  # type: ignore[no-any-return]


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
        (["train", "vision", "--device", "abacus"], "--device must be cpu, cuda or cuda:N, got 'abacus'"),
        (["train", "vision", "--config", "nowhere.toml"], "nowhere.toml cannot be read: No such file"),
        (["train", "vision", "--gradients", "9", "--epochs", "1"], "--gradients or --epochs, not both"),
        (["train", TINY, "--set", "wrong=1"], "option wrong is wrong"),
        (["compare", "vision", "--strategies", "daso,dasso"], "unknown strategy 'dasso'"),
        (["compare", "vision", "--strategies", "daso,daso"], "must name different strategies"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["report", "empty"], "empty is not a run: there is no config.toml in it"),
        (["resume", "nowhere"], "nowhere does not exist"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    output = loosestep(*arguments, code=2)
    assert message in output
    assert len(output.splitlines()) == 1


def test_options_of_a_recipe_are_listed() -> None:
    assert "preset=digits" in loosestep("train", "vision", "--options")


@pytest.mark.slow
def test_kill_nine_and_resume_is_bit_for_bit_the_uninterrupted_run() -> None:
    common = ["--strategy", "daso:period=3,delay=1", "--nodes", "2", "--gradients", "120", "--checkpoint-every", "10"]
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
    assert made - resumed_at <= 12  # no more is lost than lies between two checkpoints, and one step
    ours, theirs = final_model(Path("runs/whole")), final_model(Path("runs/killed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("report.html", "timeline.json", "trace.jsonl", "config.toml"):
        assert (folder.path / name).is_file()
    assert "is complete (120 gradients)" in loosestep("resume", "runs/killed", code=2)
    assert "holds a run already" in loosestep("train", TINY, "--name", "killed", code=2)


@pytest.mark.slow
def test_a_comparison_is_one_table_and_one_report_and_goes_on_where_it_was() -> None:
    arguments = [
        "compare",
        TINY,
        "--strategies",
        "allreduce,localsgd:period=2,delay=1",
        "--seeds",
        "1",
        "--name",
        "both",
    ]
    output = loosestep(*arguments, "--gradients", "24")
    assert re.search(r"localsgd:period=2, delay=1 +\d+\.\d %", output)
    assert "Report: runs/both/report.html" in output
    again = loosestep(*arguments, "--gradients", "24")  # nothing is trained twice
    assert again.splitlines()[-5:] == output.splitlines()[-5:]
    assert "other settings" in loosestep(*arguments, "--gradients", "30", code=2)
    assert re.search(r"page\.html \(\d\.\d MB\)", loosestep("report", "runs/both", "-o", "page.html"))
    assert "diverged" in loosestep(
        "compare", TINY, "--strategies", "allreduce", "--seeds", "1", "--gradients", "8", "--set", "scale=nan", code=2
    )


@pytest.mark.slow
def test_under_another_launcher_the_given_ranks_train() -> None:
    train = [*COMMAND, "train", TINY, "--strategy", "allreduce", "--gradients", "24", "--name", "given"]
    done = subprocess.run(
        [*COMMAND, "launch", "--nodes", "2", *train], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\[n0 r0\] accuracy \d+\.\d %  24 gradients", done.stdout)
    config = RunFolder(Path("runs/given")).config()
    assert (config.nodes, config.ranks_per_node) == (2, "1")


def test_another_launcher_must_give_as_many_ranks_as_before_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/given").mkdir(parents=True)
    Config(recipe=TINY, nodes=2).write(Path("runs/given/config.toml"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    message = "first run: loosestep resume runs/given --nodes 3 --ranks-per-node 1 --no-start"
    assert message in loosestep("resume", "runs/given", code=2)
    assert message in loosestep("train", TINY, "--name", "given", code=2)
    assert "give --name" in loosestep("train", TINY, code=2)
    assert "starts its own processes" in loosestep("compare", TINY, code=2)
