"""Segmentation: generated scenes, a small U-Net, mean intersection over union."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loosestep.recipes import RecipeError, schedules
from loosestep.recipes.vision import VisionRecipe
from loosestep.recipes.vision.recipe import mean_iou
from loosestep.recipes.vision.scenes import CLASSES, scenes
from loosestep.recipes.vision.unet import UNet

SCENES = {"preset": "scenes"}


def test_scenes_are_the_same_every_time_and_hold_every_class() -> None:
    one = scenes(16, train=40, test=10)
    other = scenes(16, train=40, test=10)
    assert torch.equal(one.train.images, other.train.images)
    assert torch.equal(one.test.labels, other.test.labels)
    assert not torch.equal(one.train.images[:10], one.test.images)
    assert set(one.train.labels.unique().tolist()) == set(range(len(CLASSES)))
    assert one.train.images.shape == (40, 3, 16, 16)
    assert one.train.labels.shape == (40, 16, 16)


def test_iou_is_the_mean_over_classes_of_both_over_either() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert mean_iou(labels, labels, 2) == 1.0
    assert mean_iou(torch.tensor([0, 1, 1, 1]), labels, 2) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert mean_iou(torch.tensor([0, 0, 2, 2]), labels, 4) == pytest.approx(1 / 3)


def test_scores_have_the_pixels_of_the_picture_whatever_its_size() -> None:
    model = UNet(channels=3, classes=5, width=4)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5, 32, 32)
    assert model(torch.randn(2, 3, 18, 21)).shape == (2, 5, 18, 21)
    assert any(isinstance(part, torch.nn.BatchNorm2d) for part in model.modules())


def test_a_small_network_learns_to_segment() -> None:
    task = VisionRecipe().build({**SCENES, "size": "16"}, seed=1)
    assert task.quality.name == "iou"
    model = task.make_model()
    optimizer = task.training.make_optimizer(model)
    cycle = schedules.OneCycle(160)
    stream = task.stream()
    before = task.evaluate(model)["iou"]
    for step in range(160):
        schedules.apply(cycle, optimizer, lr=0.1, gradients=step)
        optimizer.zero_grad()
        task.loss(model, next(stream)).backward()
        optimizer.step()
    assert task.evaluate(model)["iou"] > 0.25 > before
    assert task.examples(model) == []


def test_what_does_not_fit_scenes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="leave data out"):
        VisionRecipe().build(SCENES, data=tmp_path)
    with pytest.raises(RecipeError, match="crop=0"):
        VisionRecipe().build({**SCENES, "crop": "2"})
    with pytest.raises(RecipeError, match="takes preset scenes"):
        VisionRecipe().build({"model": "unet"})
