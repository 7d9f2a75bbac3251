"""Acoustic features: log-mel energies from samples, time derivatives, normalisation, frame
stacking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import RecipeError

Frames = NDArray[np.float32]
"""One utterance: [frames, features], 100 frames a second."""

BINS = 40


def log_mel(samples: NDArray[np.float32], rate: int, bins: int = BINS) -> Frames:
    """`bins` log-mel energies of 25 ms windows every 10 ms; `samples` in [-1, 1]."""
    try:
        import kaldi_native_fbank as fbank
    except ImportError as problem:
        raise RecipeError(
            "features need kaldi-native-fbank: pip install 'loosestep[speech]'"
        ) from problem
    options = fbank.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0.0  # random; the data brings its own noise
    options.mel_opts.num_bins = bins
    computer = fbank.OnlineFbank(options)
    computer.accept_waveform(rate, (samples * 32768.0).tolist())
    computer.input_finished()
    if computer.num_frames_ready == 0:
        return np.zeros((0, bins), np.float32)
    return np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)]).astype(
        np.float32
    )


def with_deltas(static: Frames, window: int = 2) -> Frames:
    """[static, delta, delta-delta], with  delta_t = sum_k k (x_{t+k} - x_{t-k}) / (2 sum_k k^2),
    edges repeated.
    """
    first = _delta(static, window)
    return np.concatenate([static, first, _delta(first, window)], axis=1)


def _delta(frames: Frames, window: int) -> Frames:
    padded = np.pad(frames, ((window, window), (0, 0)), mode="edge")
    count = len(frames)
    total = np.zeros_like(frames)
    for k in range(1, window + 1):
        total += k * (
            padded[window + k : window + k + count] - padded[window - k : window - k + count]
        )
    return np.asarray(total / (2 * sum(k * k for k in range(1, window + 1))), np.float32)


def normalise(utterances: Sequence[Frames]) -> list[Frames]:
    """Zero mean and unit variance of every feature over these utterances together."""
    together = np.concatenate(utterances)
    mean = together.mean(axis=0)
    deviation = together.std(axis=0)
    return [
        np.asarray((frames - mean) / np.maximum(deviation, 1e-5), np.float32)
        for frames in utterances
    ]


def stack(frames: Frames, size: int) -> Frames:
    """`size` neighbouring frames become one; the last frame is repeated to fill up."""
    fill = -len(frames) % size
    padded = np.pad(frames, ((0, fill), (0, 0)), mode="edge")
    return padded.reshape(len(padded) // size, size * frames.shape[1])
