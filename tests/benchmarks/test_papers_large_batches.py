"""Which trainings of the large-batch grid are asked for, and that a second call goes on where
the first ended.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from test_papers_learners import arrays_of_speech

import papers_large_batches as script
from papers.learners import RULES
from papers.speech import Speech, collapsed, edits


def test_edits_count_substitutions_deletions_and_insertions() -> None:
    assert edits(["A", "B", "C"], ["A", "X", "C", "D"]) == 2
    assert edits("KITTEN", "SITTING") == 3
    assert edits([], ["A", "B"]) == 2


def test_a_path_loses_repetitions_and_blanks() -> None:
    assert collapsed(np.array([0, 3, 3, 0, 3, 5])) == [3, 3, 5]
    assert collapsed(np.array([2, 2, 0, 0])) == [2]


def test_all_strategies_get_the_same_rates_and_seeds() -> None:
    for name in script.PLANS:
        asked = {cell for stage in script.stages(name) for cell in stage if cell.batch > 32}
        each = [{cell[2:] for cell in asked if cell.strategy == strategy} for strategy in RULES]
        assert all(own == each[0] for own in each)


def test_a_second_call_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "an4.npz", rings=np.tile(np.arange(16), (5, 200, 1)), **arrays_of_speech(5))
    plan = script.Plan(Speech, "wer", 100, ((16, (0.1, 0.2), (0,)), (32, (0.1,), (0, 1))))
    monkeypatch.setattr(script, "PLANS", {"an4": plan})
    lines = tmp_path / "lines.jsonl"
    chosen = argparse.Namespace(
        task="an4",
        arrays=tmp_path,
        device="cpu",
        seconds=60.0,
        epochs=1.2,
        together=None,
        lines=lines,
    )
    script.run(chosen)
    first = script.read(lines)
    cells = [script.cell_of(result) for result in first]
    assert len(cells) == len(set(cells)) == 24
    assert all(result["curve"] and result["cer"] >= 0 for result in first)
    lines.write_text("".join(line + "\n" for line in lines.read_text().splitlines()[:-3]))
    script.run(chosen)
    assert [script.cell_of(result) for result in script.read(lines)] == cells
