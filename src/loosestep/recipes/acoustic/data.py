"""Speech from folders: Sphinx features (`etc/`, `feat/`), or wav files with `transcripts.tsv`.

Either may have a folder `labels/` beside: `labels/ID.npy`, one class for each frame, for frame
cross-entropy. Whatever is wrong with a file is said with its name before training begins.
"""

from __future__ import annotations

import re
import struct
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..base import Progress, no_progress
from ..errors import RecipeError
from . import units
from .corpus import Corpus, Labels, Utterance
from .features import BINS, Frames, log_mel


def read_folder(
    folder: Path,
    *,
    rate: int = 16000,
    cepstra: int = 13,
    aligned: bool = False,
    progress: Progress = no_progress,
) -> Corpus:
    """The corpus in `folder`, of whichever of the two kinds it is; `aligned`: with frame labels."""
    if not folder.is_dir():
        raise RecipeError(
            f"data folder {folder} {'is a file' if folder.exists() else 'does not exist'}"
        )
    if (folder / "transcripts.tsv").is_file():
        return read_wavs(folder, rate=rate, aligned=aligned, progress=progress)
    if list((folder / "etc").glob("*_train.fileids")):
        return read_sphinx(folder, cepstra=cepstra, aligned=aligned, progress=progress)
    what = "is empty" if not any(folder.iterdir()) else "is not a speech corpus"
    raise RecipeError(
        f"data folder {folder} {what}: expected transcripts.tsv (and wav files), "
        "or etc/*_train.fileids with feat/ (Sphinx features)"
    )


# --------------------------------------------------------------------------------------------------
# sphinx


def read_sphinx(
    folder: Path, *, cepstra: int = 13, aligned: bool = False, progress: Progress = no_progress
) -> Corpus:
    """`etc/NAME_{train,test}.{fileids,transcription}` and `feat/ID.mfc`."""
    name = next((folder / "etc").glob("*_train.fileids")).name.removesuffix("_train.fileids")
    parts = []
    for part in ("train", "test"):
        lists = (
            folder / "etc" / f"{name}_{part}.fileids",
            folder / "etc" / f"{name}_{part}.transcription",
        )
        parts.append(tuple(_sphinx_part(folder, *lists, cepstra, aligned, progress)))
    return Corpus(folder.name, train=parts[0], test=parts[1])


def _sphinx_part(
    folder: Path,
    fileids: Path,
    transcription: Path,
    cepstra: int,
    aligned: bool,
    progress: Progress,
) -> Iterator[Utterance]:
    ids = [line.strip() for line in _lines(fileids) if line.strip()]
    if not ids:
        raise RecipeError(f"{fileids} is empty: expected the names of feature files, one a line")
    texts = _sphinx_transcripts(transcription)
    for done, name in enumerate(ids):
        progress(f"reading {folder.name}", done, len(ids))
        path = folder / "feat" / f"{name}.mfc"
        key = Path(name).name
        if key not in texts:
            raise RecipeError(
                f"{transcription} has no transcript of {key}, which {fileids.name} lists"
            )
        frames = read_mfc(path, cepstra)
        labels = _read_labels(folder / "labels" / f"{name}.npy", len(frames)) if aligned else None
        yield Utterance(name, Path(name).parent.name, texts[key], frames, str(path), labels)


def _sphinx_transcripts(path: Path) -> dict[str, str]:
    """`<s> YES </s> (an251-fash-b)` -> {"an251-fash-b": "YES"}"""
    found = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"(.*)\(([^()]+)\)\s*", line)
        if not match:
            raise RecipeError(f"{path}:{number}: expected 'TEXT (ID)', got {line.strip()!r}")
        found[match[2].strip()] = _checked_text(re.sub(r"</?s>", " ", match[1]), f"{path}:{number}")
    return found


def read_mfc(path: Path, cepstra: int = 13) -> Frames:
    """A 4-byte count, then that many float32, in either byte order."""
    data = _bytes(path)
    values = (len(data) - 4) // 4
    for order in (">", "<"):
        if (
            len(data) >= 4
            and struct.unpack(f"{order}i", data[:4])[0] == values
            and len(data) == 4 + 4 * values
        ):
            break
    else:
        claims = struct.unpack(">i", data[:4])[0] if len(data) >= 4 else "nothing"
        raise RecipeError(
            f"{path} is truncated or damaged: it announces {claims} values and holds "
            f"{max(values, 0)}"
        )
    if values == 0 or values % cepstra:
        raise RecipeError(
            f"{path} holds {values} values, expected a positive multiple of {cepstra} (option "
            "cepstra)"
        )
    frames = np.frombuffer(data, f"{order}f4", offset=4).reshape(-1, cepstra).astype(np.float32)
    if not np.isfinite(frames).all():
        raise RecipeError(f"{path} holds values that are not finite numbers")
    return frames


# --------------------------------------------------------------------------------------------------
# wav files


def read_wavs(
    folder: Path, *, rate: int = 16000, aligned: bool = False, progress: Progress = no_progress
) -> Corpus:
    """`transcripts.tsv`: FILE <tab> TEXT, and optionally <tab> train or test (otherwise a tenth is
    held out).

    The speaker of a file is the folder it lies in.
    """
    listing = folder / "transcripts.tsv"
    rows = [(number, line) for number, line in enumerate(_lines(listing), 1) if line.strip()]
    if not rows:
        raise RecipeError(f"{listing} is empty: expected lines of FILE <tab> TEXT")
    parts: dict[str, list[Utterance]] = {"train": [], "test": []}
    seen: dict[str, int] = {}
    for done, (number, line) in enumerate(rows):
        progress(f"reading {folder.name}", done, len(rows))
        name, text, part = _wav_row(line, f"{listing}:{number}")
        if seen.setdefault(name, number) != number:
            raise RecipeError(
                f"{listing}:{number}: {name} is listed already in line {seen[name]}; remove one "
                "of them"
            )
        path = folder / name
        frames = log_mel(read_wav(path, rate), rate)
        if len(frames) == 0:
            raise RecipeError(f"{path} is shorter than one frame of 25 ms")
        label_path = folder / "labels" / Path(name).with_suffix(".npy")
        labels = _read_labels(label_path, len(frames)) if aligned else None
        parts[part].append(Utterance(name, str(Path(name).parent), text, frames, str(path), labels))
    for part, utterances in parts.items():
        if not utterances:
            raise RecipeError(
                f"{listing} leaves nothing to {part} on: mark lines train and test in a third "
                "column"
            )
    return Corpus(folder.name, tuple(parts["train"]), tuple(parts["test"]), bins=BINS)


def _wav_row(line: str, where: str) -> tuple[str, str, str]:
    columns = line.rstrip("\r\n").split("\t")
    if len(columns) not in (2, 3):
        raise RecipeError(
            f"{where}: expected FILE <tab> TEXT [<tab> train|test], got {len(columns)} columns"
        )
    name = columns[0].strip()
    part = columns[2].strip() if len(columns) == 3 else _held_out(name)
    if part not in ("train", "test"):
        raise RecipeError(f"{where}: the third column must be train or test, got {part!r}")
    return name, _checked_text(columns[1], where), part


def _held_out(name: str) -> str:
    """One file in ten is for testing: always the same ones."""
    return "test" if xxhash.xxh3_64_intdigest(name.encode()) % 10 == 0 else "train"


def read_wav(path: Path, rate: int) -> NDArray[np.float32]:
    """Samples in [-1, 1] of a 16-bit mono wav file of this rate."""
    try:
        with wave.open(str(path), "rb") as file:
            shape = file.getnchannels(), file.getsampwidth() * 8, file.getframerate()
            expected_bytes = file.getnframes() * file.getnchannels() * file.getsampwidth()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as problem:
        raise RecipeError(
            f"{path} is not a wav file: {problem or 'it ends too early'}"
        ) from problem
    except OSError as problem:
        raise RecipeError(f"{path} cannot be read: {problem.strerror}") from problem
    if shape != (1, 16, rate):
        channels, bits, seen = shape
        raise RecipeError(
            f"{path} has {channels} channels of {bits} bits at {seen} Hz, expected 1 of 16 bits "
            f"at {rate} Hz: convert it, or set rate={seen} if all files are so"
        )
    if not data:
        raise RecipeError(f"{path} has length 0")
    if len(data) != expected_bytes:
        raise RecipeError(
            f"{path} is truncated: it announces {expected_bytes} bytes of sound and holds "
            f"{len(data)}"
        )
    return np.asarray(np.frombuffer(data, "<i2").astype(np.float32) / 32768.0)


# --------------------------------------------------------------------------------------------------
# common


def check_labels(utterances: Sequence[Utterance], outputs: int) -> None:
    """Every frame's label must be one of the outputs."""
    for utterance in utterances:
        if utterance.labels is None:
            raise RecipeError(
                f"{utterance.source} has no frame labels: use loss=ctc, or add labels/ID.npy"
            )
        low = int(utterance.labels.min())
        high = int(utterance.labels.max())
        if low < 0 or high >= outputs:
            bad = low if low < 0 else high
            raise RecipeError(
                f"{utterance.source}: frame label {bad} is out of range, expected 0..{outputs - 1}"
            )


def _read_labels(path: Path, frames: int) -> Labels:
    try:
        labels = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise RecipeError(f"{path} cannot be read as frame labels: {problem}") from problem
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or len(labels) != frames:
        raise RecipeError(
            f"{path}: expected {frames} whole numbers, one a frame, got {labels.dtype} "
            f"{labels.shape}"
        )
    return np.asarray(labels, np.int64)


def _checked_text(raw: str, where: str) -> str:
    text = units.normalise(raw)
    if not text:
        raise RecipeError(f"{where}: the transcript is empty")
    if unknown := units.unknown_characters(text):
        raise RecipeError(
            f"{where}: unknown character {unknown[0]!r} in {text!r}; known are {units.ALPHABET!r}"
        )
    return text


def _lines(path: Path) -> list[str]:
    try:
        return _bytes(path).decode().splitlines()
    except UnicodeDecodeError as problem:
        raise RecipeError(f"{path} is not UTF-8 text: {problem}") from problem


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise RecipeError(f"{path} cannot be read: {problem.strerror}") from problem
