from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loosestep.recipes import RecipeError
from loosestep.recipes.acoustic import synth
from loosestep.recipes.acoustic.corpus import Corpus
from loosestep.recipes.acoustic.synth import TEST_VOICES, TRAIN_VOICES, Speech, synthesise
from loosestep.recipes.acoustic.units import unknown_characters

SPEECH = Speech(train=12, test=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speech")


@pytest.fixture(scope="module")
def corpus(cache: Path) -> Corpus:
    return synthesise(SPEECH, cache)


def same(a: Corpus, b: Corpus) -> bool:
    pairs = list(zip((*a.train, *a.test), (*b.train, *b.test), strict=True))
    return all(np.array_equal(x.frames, y.frames) and x.text == y.text for x, y in pairs)


def test_speech_is_sound_with_a_text(corpus: Corpus) -> None:
    assert (len(corpus.train), len(corpus.test)) == (12, 4)
    for utterance in (*corpus.train, *corpus.test):
        assert 20 < len(utterance.frames) < 1000
        assert np.isfinite(utterance.frames).all()
        assert utterance.frames.std() > 0.5
        assert unknown_characters(utterance.text) == []


def test_every_frame_has_a_phoneme(corpus: Corpus) -> None:
    for utterance in corpus.train:
        assert utterance.labels is not None
        assert len(utterance.labels) == len(utterance.frames)
        assert utterance.labels.max() < len(corpus.label_names)
        assert len(set(utterance.labels.tolist())) > 2


def test_voices_of_the_test_set_are_not_heard_in_training(corpus: Corpus) -> None:
    assert not set(TRAIN_VOICES) & set(TEST_VOICES)
    assert {u.speaker for u in corpus.test} <= {f"en-us+{voice}" for voice in TEST_VOICES}
    assert {u.speaker for u in corpus.train} <= {f"en-us+{voice}" for voice in TRAIN_VOICES}


def test_the_same_arguments_give_the_same_speech(corpus: Corpus, tmp_path: Path) -> None:
    assert same(synthesise(SPEECH, tmp_path), corpus)


def test_another_seed_gives_other_speech(corpus: Corpus, tmp_path: Path) -> None:
    other = synthesise(Speech(train=12, test=4, seed=1), tmp_path)
    assert [u.text for u in other.train] != [u.text for u in corpus.train]


def test_the_second_time_it_comes_from_the_cache(
    corpus: Corpus, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth, "_speak", None)
    assert same(synthesise(SPEECH, cache), corpus)


def test_a_damaged_cache_is_made_again(corpus: Corpus, cache: Path) -> None:
    file = next(cache.glob("speech-*/tensors.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    assert same(synthesise(SPEECH, cache), corpus)


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    synthesise(Speech(train=2, test=1), tmp_path, lambda *what: seen.append(what))
    assert [done for _, done, _ in seen] == [0, 1, 2, 3]


def test_a_failing_synthesiser_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth, "TRAIN_VOICES", ("nobody",))
    with pytest.raises(
        RecipeError, match=r"speech synthesis failed: RuntimeError: espeak-ng: there is no voice"
    ):
        synthesise(SPEECH, tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_utterances_are_refused() -> None:
    with pytest.raises(RecipeError, match="test utterances must be at least 1, got 0"):
        Speech(test=0)
