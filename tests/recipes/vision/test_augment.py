from __future__ import annotations

import torch

from loosestep.recipes.vision.augment import random_crop, random_flip


def test_a_crop_is_a_shifted_image_with_repeated_edges() -> None:
    images = torch.arange(2 * 3 * 6 * 6).reshape(2, 3, 6, 6).to(torch.uint8)
    cropped = random_crop(images, 2, torch.Generator().manual_seed(0))
    assert cropped.shape == images.shape
    assert cropped.dtype == torch.uint8
    for image, crop in zip(images, cropped, strict=True):
        padded = image[:, torch.arange(-2, 8).clamp(0, 5)][:, :, torch.arange(-2, 8).clamp(0, 5)]
        shifts = [padded[:, r : r + 6, c : c + 6] for r in range(5) for c in range(5)]
        assert any(torch.equal(crop, shift) for shift in shifts)


def test_images_are_shifted_each_its_own_way() -> None:
    images = torch.randn(1, 1, 8, 8).expand(50, 1, 8, 8)
    assert (
        len(
            {tuple(image.flatten().tolist()) for image in random_crop(images, 2, torch.Generator())}
        )
        > 10
    )


def test_no_padding_is_no_crop() -> None:
    images = torch.randn(2, 1, 4, 4)
    assert random_crop(images, 0, torch.Generator()) is images


def test_about_half_the_images_are_mirrored() -> None:
    images = torch.randn(1, 2, 3, 4).expand(200, 2, 3, 4)
    flipped = random_flip(images, torch.Generator().manual_seed(0))
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert bool((same ^ mirrored).all())
    assert 70 < int(same.sum()) < 130
