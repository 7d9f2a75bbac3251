from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.recipes.acoustic.decode import collapse, error_rates
from loosestep.recipes.acoustic.units import (
    ALPHABET,
    characters,
    needed_frames,
    normalise,
    pieces,
    unknown_characters,
)

TEXTS = ["RUBOUT G M E", "RUBOUT ONE", "ONE TWO", "W H Y"]
texts = st.text(ALPHABET, min_size=1).map(normalise).filter(bool)


@given(text=texts)
def test_every_text_can_be_written_and_read_back(text: str) -> None:
    for units in (characters(), pieces(TEXTS, at_least=2)):
        encoded = units.encode(text)
        assert units.decode(encoded) == text
        assert 0 not in encoded


def test_frequent_words_are_one_unit_and_others_are_spelled() -> None:
    units = pieces(TEXTS, at_least=2)
    assert len(units.encode("RUBOUT ONE")) == 2
    assert len(units.encode("TWO G")) == 4


def test_a_piece_begins_a_word_wherever_it_stands() -> None:
    units = pieces(TEXTS, at_least=2)
    assert units.decode(units.encode("G") + units.encode("ONE")) == "G ONE"


@given(text=texts)
def test_collapsing_a_path_with_repetitions_gives_the_units_back(text: str) -> None:
    units = characters()
    encoded = units.encode(text)
    path = [frame for unit in encoded for frame in (unit, unit, 0)]
    assert units.decode(collapse(path)) == text
    assert needed_frames(encoded) <= len(path)


def test_equal_neighbours_need_a_blank_between() -> None:
    assert needed_frames([1, 2, 2, 2, 3]) == 7
    assert collapse([0, 3, 3, 0, 3, 5]) == [3, 3, 5]


def test_unknown_characters_are_found() -> None:
    assert unknown_characters(normalise("straße & co")) == ["&"]
    assert unknown_characters("Ä B Ä É") == ["Ä", "É"]


def test_error_rates_count_substitutions_deletions_and_insertions() -> None:
    rates = error_rates(["ONE TWO THREE", "A"], ["ONE TEN", "A B"])
    assert rates["wer"] == pytest.approx(3 / 4)
    assert error_rates(["AB"], [""]) == {"wer": 1.0, "cer": 1.0}
