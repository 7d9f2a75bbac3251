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
from papers.learners import RULES, Cell
from papers.speech import Speech, collapsed, edits


def test_edits_count_substitutions_deletions_and_insertions() -> None:
    assert edits(["A", "B", "C"], ["A", "X", "C", "D"]) == 2
    assert edits("KITTEN", "SITTING") == 3
    assert edits([], ["A", "B"]) == 2


def test_a_path_loses_repetitions_and_blanks() -> None:
    assert collapsed(np.array([0, 3, 3, 0, 3, 5])) == [3, 3, 5]
    assert collapsed(np.array([2, 2, 0, 0])) == [2]


def test_rates_grow_with_the_batch_from_the_best_at_the_smallest() -> None:
    known = [
        {"task": "an4", "strategy": "synchronous", "batch": 32, "rate": rate, "seed": 0, "wer": wer}
        for rate, wer in ((0.05, 0.5), (0.1, 0.3), (0.2, 0.4))
    ]
    asked = {cell for stage in script.stages("an4", known) for cell in stage}
    assert Cell("an4", "ring", 32, 0.2, 0) in asked
    assert {cell.rate for cell in asked if cell.batch == 256 and cell.seed == 0} == {
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
    }
    assert {cell.strategy for cell in asked if cell.batch == 256 and cell.seed == 2} == set(RULES)


def test_a_second_call_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "an4.npz", rings=np.tile(np.arange(16), (5, 200, 1)), **arrays_of_speech(5))
    plan = script.Plan(Speech, (16, 32), (0.1, 0.2), "wer", 100, False)
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
    assert len(cells) == len(set(cells)) > 20
    assert all(result["curve"] and result["cer"] >= 0 for result in first)
    lines.write_text("".join(line + "\n" for line in lines.read_text().splitlines()[:-3]))
    script.run(chosen)
    assert [script.cell_of(result) for result in script.read(lines)] == cells
