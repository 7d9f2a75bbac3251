from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loosestep.recipes.acoustic.features import log_mel, normalise, stack, with_deltas


def test_log_mel_gives_forty_bins_a_hundred_times_a_second_and_finds_a_tone() -> None:
    seconds = np.arange(16000) / 16000
    low, high = (
        log_mel(np.sin(2 * np.pi * f * seconds).astype(np.float32), 16000) for f in (300.0, 4000.0)
    )
    assert low.shape == high.shape == (98, 40)
    assert low.mean(axis=0).argmax() < high.mean(axis=0).argmax()


def test_log_mel_is_deterministic() -> None:
    samples = np.random.default_rng(0).standard_normal(8000).astype(np.float32) / 10
    assert np.array_equal(log_mel(samples, 16000), log_mel(samples, 16000))


def test_log_mel_of_less_than_a_window_is_empty() -> None:
    assert log_mel(np.zeros(100, np.float32), 16000).shape == (0, 40)


def test_deltas_of_a_line_are_its_slope() -> None:
    line = np.arange(20, dtype=np.float32)[:, None] * np.array([[1.0, -3.0]], np.float32)
    full = with_deltas(line)
    assert full.shape == (20, 6)
    np.testing.assert_allclose(full[4:-4, 2:4], np.tile([1.0, -3.0], (12, 1)), atol=1e-5)
    np.testing.assert_allclose(full[4:-4, 4:], 0.0, atol=1e-5)


def test_normalised_features_have_no_mean_and_unit_variance_together() -> None:
    draw = np.random.default_rng(0)
    given_frames = [draw.normal(5, 3, (n, 4)).astype(np.float32) for n in (10, 30)]
    together = np.concatenate(normalise(given_frames))
    np.testing.assert_allclose(together.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(together.std(axis=0), 1, atol=1e-4)


def test_a_constant_feature_does_not_explode() -> None:
    assert np.isfinite(normalise([np.ones((5, 2), np.float32)])[0]).all()


@given(frames=st.integers(1, 20), size=st.integers(1, 5))
def test_stacking_keeps_every_frame_in_order(frames: int, size: int) -> None:
    counted = np.arange(frames, dtype=np.float32)[:, None]
    stacked = stack(counted, size)
    assert stacked.shape == (-(-frames // size), size)
    assert stacked.ravel()[:frames].tolist() == counted.ravel().tolist()
    assert (stacked.ravel()[frames:] == frames - 1).all()
