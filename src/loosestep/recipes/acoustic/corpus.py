"""What every source of speech gives: utterances with features, a transcript and perhaps a label
for every frame.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from . import features
from .features import Frames

Labels = NDArray[np.int64]
Normalisation = Literal["utterance", "speaker", "none"]


@dataclass(frozen=True)
class Utterance:
    """`source` is the file to name when something is wrong with it; `labels` holds one class for
    each frame.
    """

    name: str
    speaker: str
    text: str
    frames: Frames
    source: str
    labels: Labels | None = None


@dataclass(frozen=True)
class Corpus:
    """Utterances to learn from and utterances to be judged by. `bins`: mel bins; 0 if the
    features are no spectrum.
    """

    name: str
    train: tuple[Utterance, ...]
    test: tuple[Utterance, ...]
    bins: int = 0
    label_names: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(len(u.frames) for u in self.train) / 100.0


def prepare(corpus: Corpus, *, deltas: bool, normalisation: Normalisation) -> Corpus:
    """The corpus with derivatives appended and every feature normalised."""

    def prepared(utterances: Sequence[Utterance]) -> tuple[Utterance, ...]:
        frames = [features.with_deltas(u.frames) if deltas else u.frames for u in utterances]
        for group in _groups(utterances, normalisation):
            for i, normal in zip(
                group, features.normalise([frames[i] for i in group]), strict=True
            ):
                frames[i] = normal
        return tuple(
            dataclasses.replace(u, frames=f) for u, f in zip(utterances, frames, strict=True)
        )

    return dataclasses.replace(corpus, train=prepared(corpus.train), test=prepared(corpus.test))


def _groups(utterances: Sequence[Utterance], normalisation: Normalisation) -> list[list[int]]:
    """Which utterances are normalised together."""
    if normalisation == "none":
        return []
    groups: dict[str, list[int]] = defaultdict(list)
    for i, utterance in enumerate(utterances):
        groups[utterance.speaker if normalisation == "speaker" else str(i)].append(i)
    return list(groups.values())
