"""The acoustic recipe: options, presets, and the task that trains and judges the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..base import (
    OPTIMIZERS,
    Example,
    Option,
    Progress,
    Quality,
    Task,
    Training,
    list_options,
    no_progress,
    option,
    parse_options,
)
from ..cache import cache_folder
from ..errors import RecipeError, require
from ..order import Order, mix
from ..schedules import NAMES
from . import decode, units
from .augment import Augmentation
from .batches import PADDING, Batch, collate
from .corpus import Corpus, Utterance, prepare
from .data import check_labels, read_folder
from .model import AcousticModel, ctc_loss, frame_loss
from .synth import Speech, synthesise


@dataclass(frozen=True)
class AcousticOptions:
    """What `--set` can change."""

    preset: str = option(
        "small", "size of the model and how long it is trained", ("tiny", "small", "paper")
    )
    layers: int = option(3, "bidirectional LSTM layers")
    cells: int = option(256, "cells per layer and direction")
    bottleneck: int = option(0, "linear units before the output, 0 for none")
    outputs: int = option(0, "output classes, 0 for as many as the labels need")
    dropout: float = option(0.2, "after every LSTM layer")
    loss: str = option("ctc", "transcripts, or a class for every frame", ("ctc", "frames"))
    units: str = option(
        "characters", "what CTC writes: letters, or frequent words whole", ("characters", "pieces")
    )
    batch: int = option(16, "utterances per gradient")
    stack: int = option(3, "neighbouring frames taken as one")
    deltas: bool = option(True, "append first and second time derivatives")
    normalise: str = option(
        "speaker", "zero mean, unit variance over", ("utterance", "speaker", "none")
    )
    noise: float = option(0.3, "standard deviation of Gaussian noise on the normalised features")
    speed: float = option(0.1, "training speech is this fraction slower to faster")
    time_masks: int = option(2, "stretches of time blanked out in training")
    time_width: int = option(20, "widest stretch, in frames")
    bin_masks: int = option(2, "mel bands blanked out in training (spectral features only)")
    bin_width: int = option(6, "widest band, in bins")
    utterances: int = option(600, "synthesised training utterances, when no data is given")
    test_utterances: int = option(120, "synthesised test utterances, when no data is given")
    rate: int = option(16000, "sampling rate of wav files")
    cepstra: int = option(13, "values per frame in Sphinx feature files")
    optimizer: str = option("adamw", "what steps; sgd needs a larger lr", OPTIMIZERS)
    lr: float = option(3e-3, "learning rate of one learner")
    momentum: float = option(0.9, "of SGD")
    weight_decay: float = option(0.01, "of matrices")
    schedule: str = option("one-cycle", "learning-rate rule", NAMES)
    epochs: float = option(60.0, "how long to train when nothing else is said")

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "cells",
            "batch",
            "stack",
            "utterances",
            "test_utterances",
            "rate",
            "cepstra",
        ):
            require(
                getattr(self, name) >= 1,
                f"option {name} must be at least 1, got {getattr(self, name)}",
            )
        for name in (
            "bottleneck",
            "outputs",
            "noise",
            "time_masks",
            "time_width",
            "bin_masks",
            "bin_width",
        ):
            require(
                getattr(self, name) >= 0,
                f"option {name} must be at least 0, got {getattr(self, name)}",
            )
        for name in ("dropout", "speed"):
            require(
                0.0 <= getattr(self, name) < 1.0,
                f"option {name} must be in [0, 1), got {getattr(self, name)}",
            )
        for name in ("lr", "epochs"):
            require(
                getattr(self, name) > 0,
                f"option {name} must be positive, got {getattr(self, name)}",
            )


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "layers": 2,
        "cells": 64,
        "dropout": 0.1,
        "noise": 0.1,
        "time_masks": 0,
        "bin_masks": 0,
        "lr": 8e-3,
        "batch": 8,
        "epochs": 16.0,
        "utterances": 500,
        "test_utterances": 100,
    },
    "small": {},
    "paper": {"layers": 6, "cells": 512, "bottleneck": 256, "outputs": 32000, "lr": 1e-3},
}


class AcousticRecipe:
    name = "acoustic"

    def options(
        self, given: Mapping[str, Any] | None = None, *, data: Path | None = None
    ) -> list[Option]:
        return list_options(parse_options(AcousticOptions, given or {}, PRESETS))

    def build(
        self,
        options: Mapping[str, Any],
        *,
        data: Path | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress = no_progress,
    ) -> AcousticTask:
        """A task on the corpus in `data`, or on synthesised speech."""
        chosen = parse_options(AcousticOptions, options, PRESETS)
        aligned = chosen.loss == "frames"
        if data is None:
            speech = Speech(train=chosen.utterances, test=chosen.test_utterances)
            corpus = synthesise(speech, cache_folder(), progress)
        else:
            corpus = read_folder(
                Path(data),
                rate=chosen.rate,
                cepstra=chosen.cepstra,
                aligned=aligned,
                progress=progress,
            )
        return AcousticTask(chosen, corpus, seed=seed, device=torch.device(device))


class AcousticTask(Task[Batch]):
    """Speech to text by CTC (judged by word error rate), or frame classification (by frame error
    rate).
    """

    name = "acoustic"

    def __init__(
        self, options: AcousticOptions, corpus: Corpus, *, seed: int, device: torch.device
    ) -> None:
        self.options = options
        self.seed = seed
        self.device = device
        self.corpus = prepare(corpus, deltas=options.deltas, normalisation=options.normalise)  # type: ignore[arg-type]
        self.quality = Quality("wer" if options.loss == "ctc" else "fer", "lower")
        self.training = Training(
            optimizer=options.optimizer,  # type: ignore[arg-type]
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            clip=5.0,
            schedule=options.schedule,
            epochs=options.epochs,
        )
        lengths = [len(u.frames) for u in corpus.train]
        self.order = Order(len(lengths), batch=options.batch, seed=seed, lengths=lengths)
        self.units = self._choose_units()
        self._texts = {u.name: self.units.encode(u.text) for u in (*corpus.train, *corpus.test)}
        self.outputs = self._count_outputs()
        self._augment = Augmentation(
            speed=options.speed,
            time_masks=options.time_masks,
            time_width=options.time_width,
            bin_masks=options.bin_masks,
            bin_width=options.bin_width,
            bins=corpus.bins,
            phase=options.stack,
        )

    def build_model(self) -> AcousticModel:
        inputs = self.corpus.train[0].frames.shape[1] * self.options.stack
        return AcousticModel(
            inputs,
            layers=self.options.layers,
            cells=self.options.cells,
            bottleneck=self.options.bottleneck,
            outputs=self.outputs,
            dropout=self.options.dropout,
        )

    def load(self, number: int) -> Batch:
        draw = np.random.default_rng(mix(self.seed, "augment", number))
        return self._batch([self.corpus.train[i] for i in self.order[number]], draw)

    def batch_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = self.options.noise
        frames = batch.frames + noise * torch.randn_like(batch.frames) if noise else batch.frames
        return self._loss(model(frames, batch.lengths), batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`wer`, `cer` and `loss`, or `fer` (the fraction of frames in the wrong class) and
        `loss`.
        """
        utterances = self.corpus.test
        total = 0.0
        wrong = 0
        frames = 0
        found = []
        for batch, scores in self._answers(model, utterances):
            total += float(self._loss(scores, batch)) * len(batch.lengths)
            if self.options.loss == "frames":
                counted = batch.targets != PADDING
                wrong += int(((scores.argmax(-1) != batch.targets) & counted).sum())
                frames += int(counted.sum())
            else:
                found += self._write(scores, batch)
        rates = (
            decode.error_rates([u.text for u in utterances], found)
            if found
            else {"fer": wrong / frames}
        )
        return {**rates, "loss": total / len(utterances)}

    def examples(self, model: nn.Module, count: int = 10) -> list[Example]:
        if self.options.loss == "frames":
            return []
        utterances = self.corpus.test[:: max(1, len(self.corpus.test) // count)][:count]
        found = [
            text
            for batch, scores in self._answers(model, utterances)
            for text in self._write(scores, batch)
        ]
        return [Example(u.name, u.text, text) for u, text in zip(utterances, found, strict=True)]

    def describe(self) -> dict[str, str | int | float]:
        return {
            "data": self.corpus.name,
            "training utterances": len(self.corpus.train),
            "training minutes": round(self.corpus.seconds / 60, 1),
            "test utterances": len(self.corpus.test),
            "outputs": self.outputs,
        }

    def _batch(self, utterances: Sequence[Utterance], draw: np.random.Generator | None) -> Batch:
        ctc = self.options.loss == "ctc"
        pairs = [(u.frames, None if ctc else u.labels) for u in utterances]
        if draw is not None:
            pairs = [self._augment(frames, labels, draw) for frames, labels in pairs]
        return collate(
            [frames for frames, _ in pairs],
            units=[self._texts[u.name] for u in utterances] if ctc else None,
            labels=None if ctc else [labels for _, labels in pairs if labels is not None],
            stack=self.options.stack,
            device=self.device,
        )

    def _loss(self, scores: Tensor, batch: Batch) -> Tensor:
        if self.options.loss == "frames":
            return frame_loss(scores, batch.targets)
        return ctc_loss(scores, batch.lengths, batch.targets, batch.target_lengths)

    def _answers(
        self, model: nn.Module, utterances: Sequence[Utterance], size: int = 32
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Batches with the model's scores, in the order of the utterances, one at a time (32,000
        outputs are large).
        """
        training = model.training
        model.eval()
        try:
            for i in range(0, len(utterances), size):
                batch = self._batch(utterances[i : i + size], None)
                with torch.no_grad():
                    scores = model(batch.frames, batch.lengths)
                yield batch, scores
        finally:
            model.train(training)

    def _write(self, scores: Tensor, batch: Batch) -> list[str]:
        best = decode.greedy(scores[..., : len(self.units)], batch.lengths)
        return [self.units.decode(sequence) for sequence in best]

    def _choose_units(self) -> units.Units:
        if self.options.units == "characters":
            return units.characters()
        return units.pieces(u.text for u in self.corpus.train)

    def _count_outputs(self) -> int:
        """Checks every utterance against the labels it needs; says which one is wrong."""
        every = (*self.corpus.train, *self.corpus.test)
        given = self.options.outputs
        if self.options.loss == "frames":
            known = given or len(self.corpus.label_names)
            if not known:
                known = 1 + max(int(u.labels.max()) for u in every if u.labels is not None)
            check_labels(every, known)
            return known
        if given and given < len(self.units):
            raise RecipeError(
                f"option outputs must be at least {len(self.units)} for these labels, got {given}"
            )
        for utterance in every:
            frames = -(-len(utterance.frames) // self.options.stack)
            needed = units.needed_frames(self._texts[utterance.name])
            if frames < needed:
                raise RecipeError(
                    f"{utterance.source} is too short for its transcript: {frames} frames after "
                    f"stacking, CTC needs {needed}; lower stack, or remove it"
                )
        return given or len(self.units)
