"""What a CTC model writes: characters, or pieces (frequent words whole, the rest spelled). Unit
0 is the blank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'- "
START = "_"
"""Marks the first character of a word in pieces; never part of a transcript."""

Kind = Literal["characters", "pieces"]


@dataclass(frozen=True)
class Units:
    """A fixed list of symbols; texts must be normalised (see `normalise`)."""

    kind: Kind
    symbols: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        index = {symbol: i for i, symbol in enumerate(self.symbols)}
        if self.kind == "characters":
            return [index[character] for character in text]
        pieces = [self._pieces(word, index) for word in text.split()]
        return [piece for word in pieces for piece in word]

    def _pieces(self, word: str, index: dict[str, int]) -> list[int]:
        whole = START + word
        return (
            [index[whole]]
            if whole in index
            else [index[whole[:2]], *(index[character] for character in word[1:])]
        )

    def decode(self, units: Iterable[int]) -> str:
        text = "".join(self.symbols[unit] for unit in units)
        return " ".join(text.replace(START, " ").split())


def characters(alphabet: str = ALPHABET) -> Units:
    return Units("characters", ("", *alphabet))


def pieces(texts: Iterable[str], *, alphabet: str = ALPHABET, at_least: int = 10) -> Units:
    """Words seen `at_least` times are units of their own; every other word can still be spelled.

    A spelled letter and the same letter inside a word sound nothing alike ("W", "WHY"): with pieces
    the model need not learn the spelling of the words it hears all the time.
    """
    counts = Counter(word for text in texts for word in text.split())
    letters = [character for character in alphabet if character != " "]
    words = sorted(word for word, count in counts.items() if count >= at_least and len(word) > 1)
    return Units(
        "pieces",
        ("", *(START + letter for letter in letters), *letters, *(START + word for word in words)),
    )


def normalise(text: str) -> str:
    """Upper case, single spaces."""
    return " ".join(text.upper().split())


def unknown_characters(text: str, alphabet: str = ALPHABET) -> list[str]:
    """The characters of a normalised text that cannot be written, in order of appearance."""
    return list(dict.fromkeys(character for character in text if character not in alphabet))


def needed_frames(units: Sequence[int]) -> int:
    """The shortest input CTC can align: one frame a unit, and a blank between equal neighbours."""
    return len(units) + sum(a == b for a, b in itertools.pairwise(units))
