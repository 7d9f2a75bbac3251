"""Images: scikit-learn's digits (embedded), a folder of pictures, or `.npz` files of JPEG bytes.

    train/CLASS/*.png, test/CLASS/*.png     a folder of pictures; or CLASS/*.png, of which a tenth is held out
    train.npz, test.npz                     `jpeg` (all bytes), `offsets`, `labels`, `classes`
    NAME.npz                                one such file; `test.npz` beside `train.npz`, else a tenth is held out

Decoded pictures are kept in the cache as bytes.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ..base import Progress, no_progress
from ..cache import cached
from ..errors import RecipeError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}


@dataclass(frozen=True)
class Pictures:
    """uint8 images [count, channels, height, width] with their classes."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Dataset:
    """Pictures to learn from and pictures to be judged by."""

    name: str
    train: Pictures
    test: Pictures
    classes: tuple[str, ...]


@dataclass(frozen=True)
class _Encoded:
    """Pictures not decoded yet: `read(i)` gives the bytes, `where(i)` the name for messages."""

    labels: Sequence[int]
    read: Callable[[int], bytes]
    where: Callable[[int], str]
    digest: str


def digits(size: int = 8) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels, brought to `size`; every fifth for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as problem:
        raise RecipeError(
            "the digits need scikit-learn: pip install 'loosestep[vision]', or give data"
        ) from problem
    found = load_digits()
    images = torch.from_numpy((found.images * (255.0 / 16.0)).round().astype(np.uint8))[:, None]
    if size != images.shape[-1]:
        images = (
            F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
            .round()
            .byte()
        )
    labels = torch.from_numpy(found.target.astype(np.int64))
    test = torch.arange(len(images)) % 5 == 0
    return Dataset(
        "digits",
        Pictures(images[~test], labels[~test]),
        Pictures(images[test], labels[test]),
        tuple("0123456789"),
    )


def read_images(path: Path, *, size: int, cache: Path, progress: Progress = no_progress) -> Dataset:
    """The pictures in the folder or file `path`, as squares of `size` pixels; decoded once, then
    read from the cache.
    """
    if path.is_file():
        test_file = path.with_name("test.npz")
        train, test, classes = _read_npzs(
            path, test_file if path.name == "train.npz" and test_file.exists() else None
        )
    elif not path.is_dir():
        raise RecipeError(f"data {path} does not exist")
    elif (path / "train.npz").exists():
        train, test, classes = _read_npzs(path / "train.npz", path / "test.npz")
    else:
        train, test, classes = _read_folder(path)
    decoded = [
        Pictures(
            _decoded(part, f"{path.name}/{name}", size, cache, progress), torch.tensor(part.labels)
        )
        for part, name in ((train, "train"), (test, "test"))
    ]
    return Dataset(path.name, decoded[0], decoded[1], classes)


# ----------------------------------------------------------------------------------------------
# .npz of JPEG bytes


def _read_npzs(
    train_file: Path, test_file: Path | None
) -> tuple[_Encoded, _Encoded, tuple[str, ...]]:
    """Of a file alone, the pictures whose digest says so are held out: always the same ones, and
    copies together.
    """
    train, classes = _read_npz(train_file)
    if test_file is not None:
        test, test_classes = _read_npz(test_file)
        if test_classes != classes:
            raise RecipeError(
                f"{test_file} has the classes {test_classes}, {train_file.name} has {classes}"
            )
        return train, test, classes
    held_out = [xxhash.xxh3_64_intdigest(train.read(i)) % 10 == 0 for i in range(len(train.labels))]
    if all(held_out) or not any(held_out):
        raise RecipeError(
            f"{train_file} has too few pictures to hold out a tenth: put train.npz and test.npz "
            "in a folder"
        )
    parts = [
        _chosen(train, [i for i, test in enumerate(held_out) if test is wanted])
        for wanted in (False, True)
    ]
    return parts[0], parts[1], classes


def _chosen(encoded: _Encoded, which: Sequence[int]) -> _Encoded:
    return _Encoded(
        labels=[encoded.labels[i] for i in which],
        read=lambda i: encoded.read(which[i]),
        where=lambda i: encoded.where(which[i]),
        digest=xxhash.xxh3_64_hexdigest(f"{encoded.digest} {which}".encode()),
    )


def _read_npz(path: Path) -> tuple[_Encoded, tuple[str, ...]]:
    if path.suffix != ".npz":
        raise RecipeError(
            f"{path} is not a .npz file; expected one with jpeg, offsets, labels and classes, or "
            "a folder"
        )
    try:
        # opened here: numpy leaves a damaged file open
        with path.open("rb") as stream, zipfile.ZipFile(stream):
            stream.seek(0)
            file = np.load(stream, allow_pickle=False)
            jpeg, offsets, labels, classes = (
                file[key] for key in ("jpeg", "offsets", "labels", "classes")
            )
    except OSError as problem:
        raise RecipeError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise RecipeError(f"{path} is truncated or damaged: {problem}") from problem
    except KeyError as problem:
        raise RecipeError(
            f"{path}: {problem.args[0]}; expected jpeg, offsets, labels and classes"
        ) from problem
    _check_npz(path, jpeg, offsets, labels, len(classes))
    data = jpeg.tobytes()
    encoded = _Encoded(
        labels=[int(label) for label in labels],
        read=lambda i: data[offsets[i] : offsets[i + 1]],
        where=lambda i: f"{path}, image {i}",
        digest=xxhash.xxh3_64_hexdigest(data + offsets.tobytes()),
    )
    return encoded, tuple(str(name) for name in classes)


def _check_npz(
    path: Path, jpeg: NDArray[Any], offsets: NDArray[Any], labels: NDArray[Any], classes: int
) -> None:
    if len(labels) == 0:
        raise RecipeError(f"{path} holds no images")
    ordered = len(offsets) == len(labels) + 1 and (np.diff(offsets.astype(np.int64)) > 0).all()
    if not ordered or offsets[0] < 0 or offsets[-1] > len(jpeg):
        raise RecipeError(
            f"{path}: offsets must be {len(labels) + 1} rising numbers from 0 to at most "
            f"{len(jpeg)}"
        )
    if labels.min() < 0 or labels.max() >= classes:
        bad = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise RecipeError(
            f"{path}: label {labels[bad]} of image {bad} is out of range, expected 0..{classes - 1}"
        )


# ----------------------------------------------------------------------------------------------
# folders of pictures


def _read_folder(path: Path) -> tuple[_Encoded, _Encoded, tuple[str, ...]]:
    """Of `CLASS/*` without train and test, the files whose digest says so are held out: always
    the same ones.
    """
    split = (path / "train").is_dir()
    classes = tuple(
        sorted(p.name for p in (path / "train" if split else path).iterdir() if p.is_dir())
    )
    if not classes:
        raise RecipeError(
            f"data folder {path} has no pictures: expected train/CLASS/*.png and test/CLASS/*.png, "
            "CLASS/*.png, or train.npz and test.npz"
        )
    if split:
        parts = [_pictures_in(path / "train", classes), _pictures_in(path / "test", classes)]
    else:
        found = _pictures_in(path, classes)
        held_out = [
            xxhash.xxh3_64_intdigest(str(f.relative_to(path)).encode()) % 10 == 0 for f, _ in found
        ]
        parts = [
            [pair for pair, test in zip(found, held_out, strict=True) if test is wanted]
            for wanted in (False, True)
        ]
    for part, name in zip(parts, ("train", "test"), strict=True):
        if not part:
            raise RecipeError(
                f"data folder {path} leaves nothing to {name} on: expected {name}/CLASS/*.png"
            )
    return _encoded_files(parts[0]), _encoded_files(parts[1]), classes


def _pictures_in(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    return [
        (file, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in SUFFIXES
    ]


def _encoded_files(files: Sequence[tuple[Path, int]]) -> _Encoded:
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path, _ in files]
    return _Encoded(
        labels=[label for _, label in files],
        read=lambda i: files[i][0].read_bytes(),
        where=lambda i: str(files[i][0]),
        digest=xxhash.xxh3_64_hexdigest(json.dumps(facts).encode()),
    )


# --------------------------------------------------------------------------------------------------
# decoding


def _decoded(encoded: _Encoded, name: str, size: int, cache: Path, progress: Progress) -> Tensor:
    def decode() -> dict[str, Tensor]:
        images = torch.empty((len(encoded.labels), 3, size, size), dtype=torch.uint8)
        for i in range(len(images)):
            if i % 256 == 0:
                progress(f"decoding {name}", i, len(images))
            images[i] = torch.from_numpy(_pixels(encoded.read(i), encoded.where(i), size))
        progress(f"decoding {name}", len(images), len(images))
        return {"images": images}

    images: Tensor = cached(cache / f"images-{encoded.digest}-{size}", decode)["images"]
    return images


def _pixels(data: bytes, where: str, size: int) -> NDArray[np.uint8]:
    """[3, size, size]: the middle square, resized where needed."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as problem:
        raise RecipeError("pictures need pillow: pip install 'loosestep[vision]'") from problem
    try:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as problem:
        raise RecipeError(f"{where} is not a readable picture: {problem}") from problem
    if picture.size != (size, size):
        width, height = picture.size
        side = min(width, height)
        left = (width - side) // 2
        top = (height - side) // 2
        picture = picture.crop((left, top, left + side, top + side)).resize(
            (size, size), Image.Resampling.BILINEAR
        )
    pixels = np.array(picture, np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), np.uint8)
