from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.runfolder.checkpoint import (
    CheckpointError,
    Checkpoints,
    load_latest,
    load_latest_common,
    read,
    restore_model,
    write,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool((a == b).all())
        )
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(step))}, "step": step}


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    plain | st.builds(lambda n: torch.arange(n, dtype=torch.bfloat16), st.integers(0, 5)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "a/b", "a"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_every_state_comes_back_as_it_was(
    state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "c"
    assert same(read(write(path, state)), state)


def test_optimizer_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    assert same(read(write(tmp_path / "c", state)), state)


def test_tied_tensors_are_stored_once_and_slices_alone(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    path = write(tmp_path / "c", {"a": big, "b": big, "slice": big[10:20]})
    assert (path / "tensors.safetensors").stat().st_size < 4_100_000
    state = read(path)
    assert state["a"].shape == state["b"].shape == (1_000_000,)
    assert state["slice"].shape == (10,)


@pytest.mark.parametrize("value", [object(), {1.5: 2}, torch.Size([1]), b"bytes"])
def test_what_cannot_be_stored_is_refused_with_its_path(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="state/outer"):
        write(tmp_path / "c", {"outer": value})
    assert not list(tmp_path.iterdir())


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, state_of(step))
    assert [c.step for c in checkpoints.list()] == [20, 30]


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(10, {"round": 1})
    checkpoints.save(10, {"round": 2})
    assert load_latest(tmp_path)[1] == {"round": 2}  # type: ignore[index]


def test_newer_ones_are_discarded_on_request(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20, 30):
        checkpoints.save(step, state_of(step))
    checkpoints.discard_after(10)
    assert [c.step for c in checkpoints.list()] == [10]


def test_of_two_writers_of_one_path_the_first_wins(tmp_path: Path) -> None:
    write(tmp_path / "c", {"writer": 1})
    write(tmp_path / "c", {"writer": 2})
    assert read(tmp_path / "c") == {"writer": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_an_unfinished_checkpoint_of_a_dead_writer_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".writing-0123").mkdir()
    (tmp_path / ".writing-0123" / "state.json").write_text("{")
    Checkpoints(tmp_path).save(1, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001-0"]


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over_by_name(
    tmp_path: Path, name: str, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1))
    file = checkpoints.save(2, state_of(2)) / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes({"truncate": data[:-1], "empty": b"", "flip": data}[damage])
    said: list[str] = []
    found = load_latest(tmp_path, said.append)
    assert found is not None
    assert same(found[1], state_of(1))
    assert len(said) == 1
    assert str(file) in said[0]


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    path = write(tmp_path / "c", {"w": torch.arange(4), "name": "x"})
    draw = random.Random(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for _ in range(60):
            bad = bytearray(good)
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=file.name):
                read(path)
        file.write_bytes(good)
    read(path)


def test_the_common_step_is_the_newest_that_all_ranks_hold_intact(tmp_path: Path) -> None:
    ranks = [tmp_path / f"rank-{r}" for r in range(2)]
    for rank in ranks:
        for step in (10, 20, 30):
            Checkpoints(rank).save(step, state_of(step))
    Checkpoints(ranks[0]).save(40, state_of(40))
    (Checkpoints(ranks[1]).list()[-1].path / "state.json").write_bytes(b"")
    said: list[str] = []
    found = load_latest_common(ranks, said.append)
    assert found is not None
    assert found[0] == 20
    assert [state["step"] for state in found[1]] == [20, 20]
    assert "rank-1" in said[0]


def test_a_checkpoint_of_another_model_is_refused_untouched() -> None:
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"run/c is a checkpoint of another model.*weight is \(2, 4\) there"
    ):
        restore_model(model, torch.nn.Linear(4, 2).state_dict(), source="run/c")
    with pytest.raises(CheckpointError, match="1 tensors of the model are not in it"):
        restore_model(model, {"bias": model.bias}, source="run/c")
    assert bool((model.weight == before).all())


# A parent that has torch loaded and forks writers: twenty interpreter starts would be most of the
# test's time.
ZYGOTE = """
import os, sys, torch
from loosestep.runfolder.checkpoint import Checkpoints
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        checkpoints = Checkpoints(sys.argv[1], keep=2)
        step = max((c.step for c in checkpoints.list()), default=0)
        while True:
            step += 1
            w = torch.full((100_000,), float(step))
            checkpoints.save(step, {"model": {"w": w, "also": w + 1}, "step": step})
            os.write(1, f"{step}\\n".encode())
    os.write(1, f"{pid}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


@pytest.mark.processes
def test_a_writer_killed_at_random_moments_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """Kill -9 again and again: what was reported as saved is there, whole, and nothing
    half-written is ever read.
    """
    draw = random.Random(1)
    said: list[str] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    try:
        for _ in range(20):
            zygote.stdin.write("go\n")
            zygote.stdin.flush()
            pid = int(zygote.stdout.readline())
            reported = 0
            # at least one checkpoint a round, then die somewhere in the next ones
            while reported == 0:
                reported = int(zygote.stdout.readline())
            time.sleep(draw.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            while (line := zygote.stdout.readline().strip()) != "dead":
                reported = int(line)
            found = load_latest(tmp_path, said.append)
            assert found is not None
            step = found[0].step
            assert step in (reported, reported + 1)
            assert bool((found[1]["model"]["w"] == step).all())
            assert bool((found[1]["model"]["also"] == step + 1).all())
    finally:
        zygote.stdin.close()
        zygote.wait(timeout=30)
        zygote.stdout.close()
    assert said == []
    assert len(list(tmp_path.glob("step-*"))) <= 3


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs Linux and root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.processes
def test_a_full_disk_is_said_and_leaves_the_previous_checkpoint(tiny_disk: Path) -> None:
    checkpoints = Checkpoints(tiny_disk / "checkpoint")
    checkpoints.save(1, state_of(1))
    with pytest.raises(
        CheckpointError, match=r"step-0000000002-0 \(2\.0 MB\) could not be written: No space left"
    ):
        checkpoints.save(2, {"w": torch.zeros(500_000)})
    assert [path.name for path in (tiny_disk / "checkpoint").iterdir()] == ["step-0000000001-0"]
    found = load_latest(tiny_disk / "checkpoint")
    assert found is not None
    assert same(found[1], state_of(1))
    checkpoints.save(3, state_of(3))


def test_an_unwritable_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        Checkpoints(tmp_path / "file").save(1, state_of(1))


def test_nonsense_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        Checkpoints(tmp_path).save(-1, {})
    with pytest.raises(ValueError, match="at least one"):
        load_latest_common([])
