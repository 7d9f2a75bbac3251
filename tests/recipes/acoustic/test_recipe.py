from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loosestep.recipes import RecipeError, schedules
from loosestep.recipes.acoustic import (
    PRESETS,
    AcousticModel,
    AcousticOptions,
    AcousticRecipe,
    AcousticTask,
)
from loosestep.recipes.acoustic.corpus import Corpus, Utterance
from loosestep.recipes.base import parse_options

TINY = {"preset": "tiny", "layers": 1, "cells": 32}


def made_up(words: int = 4, count: int = 24) -> Corpus:
    """Every word is its own constant vector for ten frames: easy to recognise, quick to learn."""
    names = ["ONE", "TWO", "GO", "STOP"][:words]
    draw = np.random.default_rng(0)
    utterances = []
    for i in range(count):
        chosen = draw.integers(0, words, 3)
        frames = np.concatenate(
            [np.eye(8, dtype=np.float32)[c] * np.ones((10, 1), np.float32) for c in chosen]
        )
        frames += 0.1 * draw.standard_normal(frames.shape).astype(np.float32)
        text = " ".join(names[c] for c in chosen)
        utterances.append(
            Utterance(f"u{i}", "nobody", text, frames, f"made up {i}", np.repeat(chosen, 10))
        )
    return Corpus("made up", tuple(utterances[4:]), tuple(utterances[:4]), label_names=tuple(names))


def a_task(seed: int = 0, **changes: Any) -> AcousticTask:
    options = {
        "layers": 1,
        "cells": 24,
        "dropout": 0.1,
        "noise": 0.1,
        "time_masks": 0,
        "batch": 4,
        "units": "pieces",
        **changes,
    }
    return AcousticTask(
        AcousticOptions(**options), made_up(), seed=seed, device=torch.device("cpu")
    )


def train(task: AcousticTask, steps: int, lr: float = 0.02) -> AcousticModel:
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    schedule = schedules.OneCycle(steps)
    stream = task.stream()
    for step in range(steps):
        schedules.apply(schedule, optimizer, lr=lr, gradients=step)
        optimizer.zero_grad()
        task.loss(model, next(stream)).backward()
        optimizer.step()
    assert isinstance(model, AcousticModel)
    return model


def test_ctc_learns_words_and_shows_them() -> None:
    task = a_task()
    untrained = task.evaluate(task.make_model())
    model = train(task, 120)
    metrics = task.evaluate(model)
    assert set(metrics) == {"wer", "cer", "loss"}
    assert metrics["loss"] < 0.3 * untrained["loss"]
    assert metrics["wer"] < 0.3
    examples = task.examples(model, 2)
    assert [e.expected for e in examples] == [task.corpus.test[i].text for i in (0, 2)]
    assert model.training


def test_frames_learn_classes() -> None:
    task = a_task(loss="frames")
    assert task.quality.name == "fer"
    assert task.outputs == 4
    before = task.evaluate(task.make_model())["fer"]
    metrics = task.evaluate(train(task, 30))
    assert set(metrics) == {"fer", "loss"}
    assert metrics["fer"] < 0.1 < before


def test_batches_and_losses_are_the_same_for_the_same_seed_and_number() -> None:
    a = a_task(time_masks=2)
    b = a_task(time_masks=2)
    other = a_task(seed=1, time_masks=2)
    first = a.load(7)
    second = b.load(7)
    assert torch.equal(first.frames, second.frames)
    assert torch.equal(first.targets, second.targets)
    model = a.make_model()
    assert a.loss(model, (7, first)).item() == b.loss(model, (7, second)).item()
    assert a.loss(model, (7, first)).item() != a.loss(model, (8, first)).item()
    assert other.load(7).frames.shape != first.frames.shape or not torch.equal(
        other.load(7).frames, first.frames
    )


def test_evaluation_is_not_augmented() -> None:
    task = a_task()
    model = task.make_model()
    assert task.evaluate(model) == task.evaluate(model)


def test_more_outputs_than_units_are_allowed_and_fewer_are_not() -> None:
    task = a_task(outputs=500)
    assert math.isfinite(task.evaluate(task.make_model())["wer"])
    with pytest.raises(RecipeError, match="option outputs must be at least"):
        a_task(outputs=5)


def test_optimizer_and_schedule_can_be_chosen() -> None:
    usual = a_task().training
    chosen = a_task(optimizer="sgd", schedule="plateau", momentum=0.8).training
    assert (usual.optimizer, usual.schedule) == ("adamw", "one-cycle")
    assert chosen.schedule == "plateau"
    optimizer = chosen.make_optimizer(torch.nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.8


def test_a_label_out_of_range_is_named() -> None:
    with pytest.raises(
        RecipeError, match=r"made up \d+: frame label 3 is out of range, expected 0\.\.2"
    ):
        a_task(loss="frames", outputs=3)


def test_an_utterance_too_short_for_its_text_is_named() -> None:
    with pytest.raises(
        RecipeError, match=r"made up 4 is too short for its transcript: 2 frames after stacking"
    ):
        a_task(stack=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": "0"}, "option cells must be at least 1, got 0"),
        ({"dropout": "1.5"}, r"option dropout must be in \[0, 1\), got 1.5"),
        ({"optimizer": "adam"}, "option optimizer must be one of sgd, adamw, got 'adam'"),
        (
            {"schedule": "cosine"},
            "option schedule must be one of constant, warm-up, one-cycle, plateau, got 'cosine'",
        ),
        ({"loss": "mmi"}, "option loss must be one of ctc, frames, got 'mmi'"),
        ({"preset": "huge"}, "preset must be one of tiny, small, paper"),
        ({"cell": "1"}, "unknown option cell, did you mean cells?"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("?", r"\?")):
        AcousticRecipe().build(options)


@pytest.mark.processes
def test_the_recipe_runs_on_synthesised_speech() -> None:
    said: list[str] = []
    options = {**TINY, "utterances": "16", "test_utterances": "4"}
    task = AcousticRecipe().build(
        options, seed=3, progress=lambda what, done, total: said.append(what)
    )
    assert said[0] == "synthesising speech"
    assert task.describe()["training utterances"] == 16
    model = task.make_model()
    loss = task.loss(model, next(task.stream()))
    loss.backward()
    assert math.isfinite(loss.item())
    aligned = AcousticRecipe().build({**options, "loss": "frames"})
    assert math.isfinite(aligned.evaluate(aligned.make_model())["fer"])


def test_the_recipe_runs_on_an4(an4: Path) -> None:
    task = AcousticRecipe().build(TINY, data=an4)
    assert task.order.batches_per_epoch == -(-948 // 8)
    model = task.make_model()
    assert math.isfinite(task.loss(model, next(task.stream())).item())


def test_the_papers_preset_is_the_papers_model() -> None:
    options = parse_options(AcousticOptions, {"preset": "paper", "units": "pieces"}, PRESETS)
    task = AcousticTask(options, made_up(), seed=0, device=torch.device("meta"))
    with torch.device("meta"):
        model = task.build_model()
    assert (len(model.lstms), model.output.out_features, model.output.in_features) == (
        6,
        32000,
        256,
    )
