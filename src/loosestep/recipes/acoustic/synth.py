"""The embedded corpus: spelled and spoken alphanumerics, synthesised offline and kept in a cache.

In the manner of AN4: names and addresses spelled, numbers, dates, a few commands; many voices,
speeds and pitches, noise on top. The voices of the test set are not heard in training. The same
arguments always give the same corpus.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..base import Progress, no_progress
from ..cache import cached
from ..errors import RecipeError
from ..order import mix
from .corpus import Corpus, Labels, Utterance
from .features import BINS, log_mel

VERSION = 1
"""Raised whenever the same arguments give other speech."""


def _each(words: str) -> tuple[str, ...]:
    return tuple(words.split())


TRAIN_VOICES = _each(
    "f1 f3 f4 f5 m1 m2 m4 m5 m6 m8 Alex Alicia Andrea Andy Denis Gene Hugo Jacky Lee Mario Mike "
    "Reed adam benjamin caleb david ed edward linda max rob robert steph travis zac"
)
TEST_VOICES = _each("f2 m3 m7 Annie Michael belinda paul victor")

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
DIGITS = _each("ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE")
TENS = _each("TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY")
MONTHS = _each(
    "JANUARY FEBRUARY MARCH APRIL MAY JUNE JULY AUGUST SEPTEMBER OCTOBER NOVEMBER DECEMBER"
)
COMMANDS = _each("YES NO GO STOP HELP START ENTER ERASE REPEAT RUBOUT")


@dataclass(frozen=True)
class Speech:
    """How much, and how noisy: the signal-to-noise ratio is drawn between the two bounds (in
    dB).
    """

    train: int = 600
    test: int = 120
    quietest: float = 35.0
    noisiest: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            if getattr(self, name) < 1:
                raise RecipeError(
                    f"{name} utterances must be at least 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class _Line:
    """One utterance to be spoken."""

    text: str
    voice: str
    speed: int
    pitch: int
    noise: float


def synthesise(speech: Speech, cache: Path, progress: Progress = no_progress) -> Corpus:
    """The corpus, from the cache or made now (some seconds). A damaged cache is made again."""
    state = cached(cache / f"speech-{_digest(speech)}", lambda: _make(speech, progress))
    return _from_state(state, speech)


def _digest(speech: Speech) -> str:
    parts = {
        "version": VERSION,
        "speech": dataclasses.asdict(speech),
        "espeak": _installed("espeakng-loader"),
        "fbank": _installed("kaldi-native-fbank"),
    }
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as problem:
        raise RecipeError(
            f"synthesised speech needs {package}: pip install 'loosestep[speech]', or give a data "
            "folder"
        ) from problem


# --------------------------------------------------------------------------------------------------
# writing


def _make(speech: Speech, progress: Progress) -> dict[str, Any]:
    draw = np.random.default_rng(mix(speech.seed, "speech"))
    lines = [_line(draw, TRAIN_VOICES, speech) for _ in range(speech.train)]
    lines += [_line(draw, TEST_VOICES, speech) for _ in range(speech.test)]
    frames = []
    labels = []
    names = {"": 0}
    for done, (line, (samples, rate, phonemes)) in enumerate(
        zip(lines, _speak(lines), strict=True)
    ):
        progress("synthesising speech", done, len(lines))
        energies = log_mel(_with_noise(samples, line.noise, draw), rate)
        frames.append(energies)
        labels.append(_align(phonemes, len(energies), rate, names))
    progress("synthesising speech", len(lines), len(lines))
    return {
        "frames": torch.from_numpy(np.concatenate(frames)),
        "labels": torch.from_numpy(np.concatenate(labels)),
        "lengths": [len(f) for f in frames],
        "texts": [line.text for line in lines],
        "voices": [line.voice for line in lines],
        "phonemes": list(names),
    }


def _from_state(state: dict[str, Any], speech: Speech) -> Corpus:
    ends = np.cumsum(state["lengths"])[:-1]
    frames = np.split(state["frames"].numpy(), ends)
    labels = np.split(state["labels"].numpy(), ends)
    utterances = [
        Utterance(f"speech-{i:05d}", voice, text, f, f"synthesised utterance {i} ({text})", label)
        for i, (voice, text, f, label) in enumerate(
            zip(state["voices"], state["texts"], frames, labels, strict=True)
        )
    ]
    train = tuple(utterances[: speech.train])
    test = tuple(utterances[speech.train :])
    return Corpus(
        "synthesised speech", train, test, bins=BINS, label_names=tuple(state["phonemes"])
    )


def _line(draw: np.random.Generator, voices: tuple[str, ...], speech: Speech) -> _Line:
    return _Line(
        text=" ".join(_words(draw)),
        voice=f"en-us+{draw.choice(voices)}",
        speed=int(draw.integers(130, 200)),
        pitch=int(draw.integers(30, 70)),
        noise=float(draw.uniform(speech.noisiest, speech.quietest)),
    )


def _words(draw: np.random.Generator) -> list[str]:
    """A spelled name, digits, a date, a number, a plate, or a command."""

    def some(words: tuple[str, ...], least: int, most: int) -> list[str]:
        return [str(word) for word in draw.choice(words, int(draw.integers(least, most + 1)))]

    kind = int(draw.integers(10))
    if kind < 3:
        return some(LETTERS, 3, 6)
    if kind < 6:
        return some(DIGITS, 3, 6)
    if kind == 6:
        return [*some(MONTHS, 1, 1), *some(TENS, 1, 1), *some(DIGITS, 1, 1)]
    if kind == 7:
        return [*some(TENS, 1, 1), *some(DIGITS, 1, 2)]
    if kind == 8:
        return [*some(LETTERS, 2, 3), *some(DIGITS, 2, 3)]
    return [*some(COMMANDS, 1, 1), *some(LETTERS, 0, 2)]


# --------------------------------------------------------------------------------------------------
# speaking


def _speak(lines: list[_Line]) -> Iterator[tuple[NDArray[np.float32], int, list[tuple[int, str]]]]:
    """Samples, rate and phonemes of every line, from a fresh synthesiser (see espeak.py for
    why).
    """
    jobs = [(_spoken(line.text), line.voice, line.speed, line.pitch) for line in lines]
    command = [sys.executable, str(Path(__file__).with_name("espeak.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(json.dumps(jobs).encode())
            process.stdin.close()
            rate = _number(process.stdout)
            for _ in lines:
                samples = np.frombuffer(
                    _exactly(process.stdout, 2 * _number(process.stdout)), "<i2"
                )
                phonemes = json.loads(_exactly(process.stdout, _number(process.stdout)))
                yield samples.astype(np.float32) / 32768.0, rate, phonemes
        except (EOFError, BrokenPipeError) as problem:
            said = process.stderr.read().decode(errors="replace").strip().splitlines()
            reason = said[-1] if said else f"exit status {process.wait()}"
            raise RecipeError(
                f"speech synthesis failed: {reason}; give a data folder instead"
            ) from problem
        finally:
            process.kill()


def _spoken(text: str) -> str:
    """The letter A alone would be read as the article."""
    return " ".join(
        "[[eI]]" if word == "A" else word if len(word) == 1 else word.lower()
        for word in text.split()
    )


def _number(stream: IO[bytes]) -> int:
    return int(struct.unpack("<i", _exactly(stream, 4))[0])


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _with_noise(
    samples: NDArray[np.float32], decibels: float, draw: np.random.Generator
) -> NDArray[np.float32]:
    """Noise between white and pink, `decibels` below the speech; espeak's full scale is brought
    down to make room.
    """
    size = 1 << len(samples).bit_length()  # a power of two: other sizes take several times as long
    spectrum = np.fft.rfft(draw.standard_normal(size))
    spectrum /= np.maximum(np.arange(len(spectrum)), 1.0) ** draw.uniform(0.0, 0.5)
    noise = np.fft.irfft(spectrum, size)[: len(samples)]
    power = float(np.mean(samples**2)) or 1e-8
    noise *= np.sqrt(power / max(float(np.mean(noise**2)), 1e-12) * 10.0 ** (-decibels / 10.0))
    return np.asarray(0.5 * (samples + noise), np.float32)


def _align(
    phonemes: list[tuple[int, str]], frames: int, rate: int, names: dict[str, int]
) -> Labels:
    """The phoneme at the middle of every frame; stress marks dropped, pauses are class 0."""
    middles = (np.arange(frames) * 0.010 + 0.0125) * rate
    classes = [names.setdefault(name.strip("',%=_:|"), len(names)) for _, name in phonemes]
    which = np.searchsorted([first for first, _ in phonemes], middles, side="right") - 1
    return np.asarray([classes[i] if i >= 0 else 0 for i in which], np.int64)
