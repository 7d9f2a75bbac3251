from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.recipes.acoustic.augment import Augmentation
from loosestep.recipes.acoustic.batches import PADDING, collate


def frames_of(count: int, bins: int = 4) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(1, count + 1, dtype=np.float32)[:, None] * np.ones((1, 3 * bins), np.float32)


@given(count=st.integers(1, 50), speed=st.floats(0.0, 0.5), seed=st.integers(0, 9))
def test_another_speed_keeps_the_ends_and_the_order(count: int, speed: float, seed: int) -> None:
    labels = np.arange(count)
    frames, moved = Augmentation(speed=speed)(frames_of(count), labels, np.random.default_rng(seed))
    assert moved is not None
    assert len(frames) == len(moved)
    assert abs(len(frames) - count) <= 1 + count * speed / (1 - speed)
    assert (np.diff(frames[:, 0]) >= 0).all()
    assert frames[0, 0] == 1
    np.testing.assert_allclose(frames[:, 0] - 1, moved, atol=0.51)


@given(count=st.integers(1, 50), seed=st.integers(0, 20))
def test_masks_blank_out_part_and_leave_the_original_alone(count: int, seed: int) -> None:
    original = frames_of(count)
    augment = Augmentation(time_masks=2, time_width=10, bin_masks=1, bin_width=2, bins=4)
    masked, _ = augment(original, None, np.random.default_rng(seed))
    assert np.array_equal(original, frames_of(count))
    assert ((masked == 0) | (masked == original)).all()
    blank_rows = (masked == 0).all(axis=1).sum()
    assert blank_rows <= 2 * min(10, count // 5)
    blank_columns = (masked == 0).all(axis=0).reshape(3, 4)
    assert (blank_columns == blank_columns[0]).all()


def test_bands_are_masked_only_where_there_is_a_spectrum() -> None:
    frames, _ = Augmentation(bin_masks=5, bin_width=4)(frames_of(9), None, np.random.default_rng(0))
    assert np.array_equal(frames, frames_of(9))


def test_a_batch_is_padded_and_keeps_its_lengths() -> None:
    batch = collate(
        [frames_of(4), frames_of(7)],
        units=[[1, 2], [3]],
        labels=None,
        stack=3,
        device=torch.device("cpu"),
    )
    assert batch.frames.shape == (2, 3, 36)
    assert batch.lengths.tolist() == [2, 3]
    assert batch.frames[0, 2].abs().sum() == 0
    assert batch.targets.tolist() == [1, 2, 3]
    assert batch.target_lengths.tolist() == [2, 1]


def test_a_stacked_frame_has_the_label_of_its_middle() -> None:
    labels = [np.array([0, 1, 2, 3]), np.arange(7)]
    batch = collate(
        [frames_of(4), frames_of(7)], units=None, labels=labels, stack=3, device=torch.device("cpu")
    )
    assert batch.targets.tolist() == [[1, 3, PADDING], [1, 4, 6]]
