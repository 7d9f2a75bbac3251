from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loosestep.recipes import RecipeError
from loosestep.recipes.vision.data import digits, read_images


def picture(
    colour: tuple[int, int, int], size: tuple[int, int] = (8, 8), kind: str = "PNG"
) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, kind)
    return stream.getvalue()


def write_npz(path: Path, labels: tuple[int, ...] = (0, 1, 1), **changes: Any) -> None:
    jpegs = [picture((200 * label, 0, 100), kind="JPEG") for label in labels]
    arrays = {
        "jpeg": np.frombuffer(b"".join(jpegs), np.uint8),
        "offsets": np.cumsum([0, *map(len, jpegs)]),
        "labels": np.array(labels),
        "classes": np.array(["dark", "red"]),
        **changes,
    }
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    write_npz(folder / "train.npz")
    write_npz(folder / "test.npz", (1, 0))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (tmp_path / "pictures" / part / name).mkdir(parents=True)
            for i in range(2):
                (tmp_path / "pictures" / part / name / f"{i}.png").write_bytes(
                    picture(colour, (12, 20))
                )
    return tmp_path / "pictures"


def test_digits_are_split_and_scaled_to_bytes() -> None:
    found = digits()
    assert found.train.images.shape == (1437, 1, 8, 8)
    assert found.test.images.shape == (360, 1, 8, 8)
    assert found.train.images.dtype == torch.uint8
    assert found.train.images.max() == 255
    assert torch.bincount(found.test.labels).min() > 20


def test_an_npz_of_jpegs_is_read(npz: Path, tmp_path: Path) -> None:
    found = read_images(npz, size=8, cache=tmp_path / "cache")
    assert found.classes == ("dark", "red")
    assert found.train.images.shape == (3, 3, 8, 8)
    assert found.train.labels.tolist() == [0, 1, 1]
    assert found.train.images[0, 0].max() < 10
    assert found.train.images[1, 0].min() > 190


def test_cifar10_is_read(cifar10: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for name in ("train", "test"):
        with np.load(cifar10 / f"{name}.npz") as file:
            whole = dict(file)
        whole["labels"] = whole["labels"][:200]
        whole["offsets"] = whole["offsets"][:201]
        np.savez(part / f"{name}.npz", **whole)
    found = read_images(part, size=32, cache=tmp_path / "cache")
    assert found.train.images.shape == (200, 3, 32, 32)
    assert len(found.classes) == 10


def test_a_folder_of_pictures_is_read_cropped_and_resized(folder: Path, tmp_path: Path) -> None:
    found = read_images(folder, size=16, cache=tmp_path / "cache")
    assert found.classes == ("blue", "red")
    assert found.train.images.shape == (4, 3, 16, 16)
    assert found.train.labels.tolist() == [0, 0, 1, 1]
    assert found.test.images[3, 0].min() == 255


def test_without_train_and_test_a_tenth_is_held_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "p" / name).mkdir(parents=True)
        for i in range(40):
            (tmp_path / "p" / name / f"{i}.png").write_bytes(picture((i, 0, 0)))
    found = read_images(tmp_path / "p", size=8, cache=tmp_path / "cache")
    assert len(found.train.labels) + len(found.test.labels) == 80
    assert 2 <= len(found.test.labels) <= 20


def test_the_second_time_it_comes_from_the_cache(npz: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        found = read_images(
            npz, size=8, cache=tmp_path / "cache", progress=lambda what, *_: said.append(what)
        )
    assert sorted(set(said)) == ["decoding pictures/test", "decoding pictures/train"]
    assert len(said) == 4
    for file in (tmp_path / "cache").glob("*/tensors.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    again = read_images(npz, size=8, cache=tmp_path / "cache")
    assert torch.equal(again.train.images, found.train.images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"labels": np.array([0, 2, 1])},
            r"train\.npz: label 2 of image 1 is out of range, expected 0\.\.1",
        ),
        ({"labels": np.array([0, 1, -1])}, r"train\.npz: label -1 of image 2 is out of range"),
        ({"labels": np.array([], int)}, r"train\.npz holds no images"),
        ({"offsets": np.array([0, 10, 5, 20])}, r"train\.npz: offsets must be 4 rising numbers"),
        ({"offsets": np.array([0, 10, 10**9, 10**9 + 1])}, r"train\.npz: offsets must be"),
        ({"offsets": None}, r"train\.npz: .*offsets.*expected jpeg, offsets, labels and classes"),
        ({"jpeg": np.zeros(10_000, np.uint8)}, r"train\.npz, image 0 is not a readable picture"),
        ({"classes": np.array(["a", "b", "c"])}, r"test\.npz has the classes .*train\.npz has"),
    ],
)
def test_a_wrong_npz_is_explained(
    npz: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_npz(npz / "train.npz", **changes)
    with pytest.raises(RecipeError, match=message):
        read_images(npz, size=8, cache=tmp_path / "cache")


def test_a_truncated_npz_is_named(npz: Path, tmp_path: Path) -> None:
    data = (npz / "test.npz").read_bytes()
    for keep in (0, 10, len(data) // 2, len(data) - 30):
        (npz / "test.npz").write_bytes(data[:keep])
        with pytest.raises(RecipeError, match=r"test\.npz is truncated or damaged"):
            read_images(npz, size=8, cache=tmp_path / "cache")
    (npz / "test.npz").unlink()
    with pytest.raises(RecipeError, match=r"test\.npz cannot be read"):
        read_images(npz, size=8, cache=tmp_path / "cache")


def test_a_damaged_picture_is_named(folder: Path, tmp_path: Path) -> None:
    for content in (b"", b"no picture", picture((1, 2, 3))[:40]):
        (folder / "train/red/1.png").write_bytes(content)
        with pytest.raises(RecipeError, match=r"red/1\.png is not a readable picture"):
            read_images(folder, size=8, cache=tmp_path / "cache")


def test_one_npz_is_split_always_the_same_way(tmp_path: Path) -> None:
    file = tmp_path / "alone.npz"
    jpegs = [picture((i, 2 * i, 0), kind="JPEG") for i in range(60)]
    arrays = {
        "jpeg": np.frombuffer(b"".join(jpegs), np.uint8),
        "offsets": np.cumsum([0, *map(len, jpegs)]),
    }
    write_npz(file, tuple(i % 2 for i in range(60)), **arrays)
    write_npz(tmp_path / "test.npz")  # of something else: this is not train.npz
    found, again = (read_images(file, size=8, cache=tmp_path / "cache") for _ in range(2))
    assert found.name == "alone.npz"
    assert len(found.train.labels) + len(found.test.labels) == 60
    assert 1 <= len(found.test.labels) <= 15
    assert torch.equal(found.test.images, again.test.images)
    held_out = {int(image[1].float().mean()) for image in found.test.images}
    assert not held_out & {int(image[1].float().mean()) for image in found.train.images}


def test_train_npz_is_judged_by_test_npz_beside_it(npz: Path, tmp_path: Path) -> None:
    of_folder, of_file = (
        read_images(path, size=8, cache=tmp_path / "cache") for path in (npz, npz / "train.npz")
    )
    assert torch.equal(of_file.train.images, of_folder.train.images)
    assert of_file.test.labels.tolist() == of_folder.test.labels.tolist() == [1, 0]
    (npz / "test.npz").unlink()
    with pytest.raises(RecipeError, match=r"train\.npz has too few pictures to hold out a tenth"):
        read_images(npz / "train.npz", size=8, cache=tmp_path / "cache")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures.zip").write_bytes(b"")
    with pytest.raises(
        RecipeError, match=r"pictures\.zip is not a \.npz file; expected one with jpeg"
    ):
        read_images(tmp_path / "pictures.zip", size=8, cache=tmp_path)


def test_digits_come_in_any_size() -> None:
    small = digits()
    large = digits(32)
    assert large.train.images.shape == (1437, 1, 32, 32)
    assert torch.equal(digits(8).train.images, small.train.images)
    means = [images.train.images.float().mean().item() for images in (small, large)]
    assert means[1] == pytest.approx(means[0], rel=0.01)


def test_a_missing_or_empty_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="absent does not exist"):
        read_images(tmp_path / "absent", size=8, cache=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="empty has no pictures"):
        read_images(tmp_path / "empty", size=8, cache=tmp_path)
    (tmp_path / "empty/train/cats").mkdir(parents=True)
    with pytest.raises(RecipeError, match="leaves nothing to train on"):
        read_images(tmp_path / "empty", size=8, cache=tmp_path)
