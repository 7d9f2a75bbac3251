from __future__ import annotations

import pytest
import torch

from loosestep.recipes import RecipeError, schedules
from loosestep.recipes.vision import VisionRecipe

NARROW = {"width": "0.25", "batch": "32"}


def test_the_default_settings_are_the_authors_of_daso() -> None:
    training = VisionRecipe().build({}).training
    assert (training.optimizer, training.momentum, training.weight_decay, training.schedule) == (
        "sgd",
        0.9,
        1e-4,
        "plateau",
    )


def test_a_narrow_network_learns_the_digits() -> None:
    task = VisionRecipe().build(NARROW, seed=1)
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    cycle = schedules.OneCycle(120)
    stream = task.stream()
    before = task.evaluate(model)["accuracy"]
    for step in range(120):
        schedules.apply(cycle, optimizer, lr=0.2, gradients=step)
        optimizer.zero_grad()
        task.loss(model, next(stream)).backward()
        optimizer.step()
    assert task.evaluate(model)["accuracy"] > 0.8 > before
    examples = task.examples(model, 20)
    assert len(examples) == 20
    assert sum(e.expected == e.found for e in examples) > 10


def test_batches_are_the_same_for_the_same_seed_and_number() -> None:
    options = {**NARROW, "crop": "2", "flip": "true"}
    a, b, other = (VisionRecipe().build(options, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.load(5).images, b.load(5).images)
    assert not torch.equal(a.load(5).images, a.load(6).images)
    assert not torch.equal(a.load(5).images, other.load(5).images)


def test_digits_have_the_size_that_was_asked_for() -> None:
    sizes = [
        VisionRecipe().build({**NARROW, **given}).load(0).images.shape[-1]
        for given in ({}, {"size": "12"})
    ]
    assert sizes == [8, 12]


def test_images_are_normalised() -> None:
    task = VisionRecipe().build({**NARROW, "batch": "1437"})
    images = task.load(0).images
    assert abs(images.mean().item()) < 1e-4
    assert images.std().item() == pytest.approx(1.0, abs=1e-3)


def test_evaluation_leaves_the_mode_and_the_statistics_alone() -> None:
    task = VisionRecipe().build({**NARROW, "norm": "batch"})
    model = task.make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task.evaluate(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "vgg"}, "option model must be one of resnet8, resnet20, resnet18, resnet50"),
        ({"batch": "0"}, "option batch must be at least 1, got 0"),
        ({"width": "-1"}, "option width must be positive"),
        ({"crop": "-1"}, "option crop must be at least 0"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        VisionRecipe().build(options)
