from __future__ import annotations

import pytest
import torch

from loosestep.recipes.vision.resnet import resnet


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet8", 0.078), ("resnet20", 0.27), ("resnet18", 11.17), ("resnet50", 23.5)],
)
def test_sizes_are_the_published_ones(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = resnet(name, channels=3, classes=10)
    assert parameters(model) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("size", [8, 32])
def test_any_small_image_gives_scores(norm: str, size: int) -> None:
    model = resnet("resnet20", channels=1, classes=5, width=0.25, norm=norm)  # type: ignore[arg-type]
    scores = model(torch.randn(2, 1, size, size))
    assert scores.shape == (2, 5)
    scores.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_large_images_are_reduced_by_the_stem() -> None:
    with torch.device("meta"):
        model = resnet("resnet50", channels=3, classes=1000, norm="batch", large_images=True)
        assert parameters(model) == 25_557_032
        assert model.stages(model.stem(torch.empty(1, 3, 224, 224))).shape == (1, 2048, 7, 7)


def test_group_norm_keeps_no_statistics() -> None:
    assert not list(resnet("resnet20", channels=3, classes=10, width=0.25, norm="group").buffers())
    assert list(resnet("resnet20", channels=3, classes=10, width=0.25, norm="batch").buffers())


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model must be one of resnet8, resnet20, resnet18, resnet50, got 'vgg'"
    ):
        resnet("vgg", channels=3, classes=10)
