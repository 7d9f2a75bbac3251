"""Greedy CTC decoding, and error rates by jiwer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import RecipeError


def greedy(scores: Tensor, lengths: Tensor) -> list[list[int]]:
    """The best unit of every frame, repetitions merged, blanks (0) dropped. `scores`: [batch,
    frames, units].
    """
    best = scores.argmax(dim=-1).tolist()
    return [collapse(row[:length]) for row, length in zip(best, lengths.tolist(), strict=True)]


def collapse(path: Sequence[int]) -> list[int]:
    """[0, 3, 3, 0, 3, 5] -> [3, 3, 5]"""
    before = [0, *path]
    return [unit for last, unit in zip(before, path, strict=False) if unit not in (0, last)]


def error_rates(expected: Sequence[str], found: Sequence[str]) -> dict[str, float]:
    """Word and character error rate: (substitutions + deletions + insertions) / length, over all
    texts together.
    """
    try:
        import jiwer
    except ImportError as problem:
        raise RecipeError(
            "word error rates need jiwer: pip install 'loosestep[speech]'"
        ) from problem
    words = jiwer.process_words(list(expected), list(found))
    letters = jiwer.process_characters(list(expected), list(found))
    return {"wer": float(words.wer), "cer": float(letters.cer)}
