"""`loosestep train --record` and `loosestep replay` as a user meets them."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loosestep.cli import app
from loosestep.record.format import BEHIND, Recording, RecordKind, _bodies, rank_file
from loosestep.record.recorder import Recorder, digest_of
from loosestep.runfolder import checkpoint

pytestmark = pytest.mark.usefixtures("warm_ranks")
TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:recipe"


def loosestep(*arguments: object, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, [str(argument) for argument in arguments]
    )
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, warm_ranks: None) -> Path:
    """A run of two processes under gossip, whose learning rate follows losses that were read
    when they came.
    """
    runs = tmp_path_factory.mktemp("runs")
    budget = ["--nodes", "2", "--gradients", "80", "--set", "batch=48", "--set", "pause=0.002"]
    loosestep(
        "train", TINY, "--strategy", "adpsgd", *budget, "--record", "--name", "run", "--runs", runs
    )
    return runs / "run"


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_a_run_is_identical_on_processes(recorded: Path) -> None:
    output = loosestep("replay", recorded)
    found = re.search(
        r"bit for bit identical at (\d+) steps of 2 ranks, and at the end \((\d+) steps were made\)",
        output,
    )
    assert found
    assert 2 <= int(found[1]) <= int(found[2])
    assert int(found[2]) >= 80


def test_a_run_is_identical_in_one_process(recorded: Path) -> None:
    assert "bit for bit identical at" in loosestep("replay", recorded, "--in-process")


def test_a_replay_stops_where_it_is_told_and_leaves_the_state_of_that_step(run: Path) -> None:
    output = loosestep("replay", run, "--in-process", "--until", "rank=1,step=7")
    found = re.search(
        r"rank 1 after step 7: loss \d\.\d+, parameters have the digest ([0-9a-f]{16})", output
    )
    assert found
    state = checkpoint.read(run / "replay" / "rank-1-step-7")
    assert f"{digest_of(state['model'].values()):016x}" == found[1]
    assert state["run"]["state"]["step"] == 7
    assert 0 < state["loss"] < 10


def test_another_training_is_told_from_the_recorded_one_with_rank_and_step(run: Path) -> None:
    config = run / "recording" / "config.toml"
    config.write_text(config.read_text().replace("[options]\n", "[options]\nscale = 1.0001\n"))
    output = loosestep("replay", run, "--in-process", code=1)
    assert re.search(
        r"rank \d differs at step 1: its parameters have the digest [0-9a-f]{16}, recorded was",
        output,
    )


def test_one_changed_weight_is_found_although_the_file_is_in_order(run: Path) -> None:
    recording = Recording.read(run / "recording", 1)
    bodies = list(_bodies(recording.path, recording.data, recording.start, recording.crc))
    place = _folds_that_matter([body[0] & ~BEHIND for body in bodies])[3]
    bodies[place] = bodies[place][:-8] + struct.pack("<d", 0.25)
    recording.path.unlink()
    again = Recorder(run / "recording", 1, recording.header)
    for body in bodies:
        again.write(body)
    assert re.search(
        r"rank \d differs at step \d+.*identical up to",
        loosestep("replay", run, "--in-process", code=1),
    )


def _folds_that_matter(kinds: list[int]) -> list[int]:
    """Where values were taken after this rank had moved on: two that have just been averaged are
    equal, whatever the weight.
    """
    moved = False
    taken = False
    folds = []
    for place, kind in enumerate(kinds):
        moved |= kind == RecordKind.LANDED
        taken |= moved and kind == RecordKind.TAKE
        if kind == RecordKind.FOLD:
            folds += [place] * taken
            moved = taken = False
    return folds


def test_what_cannot_be_replayed_is_one_clear_line(run: Path) -> None:
    def refused(message: str, *arguments: str) -> None:
        output = loosestep("replay", run, *arguments, code=2)
        assert message in output
        assert len(output.splitlines()) == 1

    refused("--until: a place in a run is rank=R,step=S with S at least 1, got '7'", "--until", "7")
    refused("--until rank=2,step=1: there are ranks 0 to 1", "--until", "rank=2,step=1")
    refused("rank 1 made", "--until", "rank=1,step=999")
    path = rank_file(run / "recording", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    refused("ends inside its header")
    path.write_bytes(whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:])
    refused("is damaged at byte")
    path.unlink()
    refused("the recording of rank 1 is missing")
    (run / "recording" / "config.toml").unlink()
    refused("was not recorded")


def test_a_resumed_run_says_that_it_is_not_recorded_any_more(run: Path) -> None:
    before = [rank_file(run / "recording", rank).read_bytes() for rank in (0, 1)]
    output = loosestep("resume", run, "--gradients", "96")
    assert "from here on the run is not recorded" in output
    assert [rank_file(run / "recording", rank).read_bytes() for rank in (0, 1)] == before
    # of the part that was recorded
    assert "bit for bit identical" in loosestep("replay", run, "--in-process")
