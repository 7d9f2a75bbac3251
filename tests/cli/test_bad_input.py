"""Files that are wrong, as a user of the commands meets them: one line that names the file, and
nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import warm
from loosestep.cli import app
from loosestep.runfolder.folder import RunFolder
from recipes.acoustic.test_data import write_mfc, write_wav
from recipes.vision.test_data import write_npz

pytestmark = pytest.mark.usefixtures("own_folder", "warm_ranks")
TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:recipe"


def refused(*arguments: str) -> str:
    """The error of a command that starts nothing: one line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not Path("runs").exists()
    return result.stderr


def sphinx() -> None:
    """A Sphinx folder `data` with frame labels, all of it right."""
    for part, name in (("train", "ann/a1"), ("test", "bob/b1")):
        write_mfc(Path("data/feat") / f"{name}.mfc", frames=30)
        label = Path("data/labels") / f"{name}.npy"
        label.parent.mkdir(parents=True)
        np.save(label, np.zeros(30, np.int64))
        Path("data/etc").mkdir(exist_ok=True)
        Path(f"data/etc/my_{part}.fileids").write_text(f"{name}\n")
        Path(f"data/etc/my_{part}.transcription").write_text(f"YES ({name[-2:]})\n")


def wavs() -> None:
    """A folder `data` of wav files, all of it right."""
    for name in ("ann/1.wav", "bob/2.wav"):
        write_wav(Path("data") / name, samples=16000)
    Path("data/transcripts.tsv").write_text("ann/1.wav\tone\ttrain\nbob/2.wav\ttwo\ttest\n")


def cut(path: str, size: int) -> Callable[[], None]:
    return lambda: os.truncate(path, size)


@pytest.mark.parametrize(
    ("make", "spoil", "message"),
    [
        (sphinx, cut("data/feat/bob/b1.mfc", 100), "data/feat/bob/b1.mfc is truncated or damaged"),
        (sphinx, cut("data/etc/my_train.fileids", 0), "data/etc/my_train.fileids is empty"),
        (sphinx, cut("data/etc/my_test.fileids", 0), "data/etc/my_test.fileids is empty"),
        (
            sphinx,
            lambda: Path("data/feat/ann/a1.mfc").unlink(),
            "data/feat/ann/a1.mfc cannot be read: No such file",
        ),
        (
            wavs,
            lambda: write_wav(Path("data/bob/2.wav"), rate=8000),
            "data/bob/2.wav has 1 channels of 16 bits at 8000 Hz",
        ),
        (wavs, lambda: write_wav(Path("data/bob/2.wav"), samples=0), "data/bob/2.wav has length 0"),
        (
            wavs,
            lambda: write_wav(Path("data/bob/2.wav"), samples=500),
            "data/bob/2.wav is too short for its transcript",
        ),
        (wavs, cut("data/bob/2.wav", 3000), "data/bob/2.wav is truncated"),
        (
            wavs,
            lambda: Path("data/transcripts.tsv").write_text(
                "ann/1.wav\tone\ttrain\nbob/2.wav\tzwölf\ttest\n"
            ),
            "data/transcripts.tsv:2: unknown character 'Ö'",
        ),
    ],
)
def test_speech_that_is_wrong_is_one_line_with_the_file(
    make: Callable[[], None], spoil: Callable[[], object], message: str
) -> None:
    make()
    spoil()
    assert message in refused("train", "acoustic", "--data", "data", "--set", "preset=tiny")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda: np.save("data/labels/bob/b1.npy", np.full(30, 7)),
            "bob/b1.mfc: frame label 7 is out of range, expected 0..3",
        ),
        (
            lambda: np.save("data/labels/bob/b1.npy", np.zeros(29, np.int64)),
            "bob/b1.npy: expected 30 whole numbers",
        ),
        (cut("data/labels/bob/b1.npy", 0), "bob/b1.npy cannot be read as frame labels"),
    ],
)
def test_a_wrong_frame_label_is_one_line_with_the_file(
    spoil: Callable[[], object], message: str
) -> None:
    sphinx()
    spoil()
    assert message in refused(
        "train", "acoustic", "--data", "data", "--set", "loss=frames", "--set", "outputs=4"
    )


def test_a_picture_of_an_unknown_class_is_one_line_with_the_file() -> None:
    Path("data").mkdir()
    write_npz(Path("data/train.npz"))
    write_npz(Path("data/test.npz"), (0, 1), classes=np.array(["dark"]))
    assert "data/test.npz: label 1 of image 1 is out of range, expected 0..0" in refused(
        "train", "vision", "--data", "data"
    )


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_and_kept() -> None:
    arguments = ["train", TINY, "--strategy", "localsgd", "--gradients", "8", "--name", "run"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    folder = RunFolder(Path("runs/run"))
    kept = sorted(folder.generation(0).rglob("*.safetensors"))
    folder.config().but(options={"hidden": 5}).write(folder.config_file)
    result = CliRunner().invoke(app, ["resume", "runs/run", "--gradients", "16"])
    assert result.exit_code == 1
    assert re.search(
        r"generation-0 is a checkpoint of another model: .* is \(8, 4\) there and \(5, 4\) here",
        result.output,
    )
    assert "Traceback" not in result.output
    assert sorted(folder.generation(0).rglob("*.safetensors")) == kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a run and its report, and little more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs to mount a file system (root)")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_line_and_it_can_be_resumed(small_disk: Path) -> None:
    train = [
        "train",
        TINY,
        "--strategy",
        "localsgd",
        "--gradients",
        "60",
        "--checkpoint-every",
        "5",
        "--set",
        "pause=0.03",
    ]
    with warm.command(
        *train, "--evaluate-every", "20", "--name", "run", "--runs", small_disk
    ) as job:
        job.ranks[0].expect("0/60 gradients")
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):  # the run has taken some of it meanwhile
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
        assert job.wait(timeout=60).returncodes == (1,)
    # the first says what begins, another that a rank alone has nobody to exchange with
    _, *said = [line for line in job.ranks[0].output if "gradients/s" not in line]
    said = [line for line in said if "nobody to exchange with" not in line]
    assert len(said) == 1, said
    assert re.search(
        rf"{small_disk}/run/\S+ .*could not be written: No space left on device", said[0]
    )
    filler.unlink()
    resumed = CliRunner().invoke(app, ["resume", str(small_disk / "run")])
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"goes on at gradient [1-9]\d* of 60", resumed.output)
