from __future__ import annotations

import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from loosestep.recipes import RecipeError
from loosestep.recipes.acoustic.data import read_folder, read_mfc, read_wav


def write_mfc(path: Path, frames: int = 5, order: str = ">") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.arange(13 * frames, dtype=f"{order}f4")
    path.write_bytes(struct.pack(f"{order}i", len(values)) + values.tobytes())


def write_wav(path: Path, samples: int = 4000, rate: int = 16000, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.zeros(samples * channels, "<i2").tobytes())


@pytest.fixture
def sphinx(tmp_path: Path) -> Path:
    for part, names in (("train", ("ann/a1", "bob/b1")), ("test", ("cyd/c1",))):
        for name in names:
            write_mfc(tmp_path / "feat" / f"{name}.mfc")
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / f"my_{part}.fileids").write_text("\n".join(names) + "\n")
        texts = [f"<s> yes  no </s> ({name.split('/')[1]})" for name in names]
        (tmp_path / "etc" / f"my_{part}.transcription").write_text("\n".join(texts) + "\n")
    return tmp_path


@pytest.fixture
def wavs(tmp_path: Path) -> Path:
    for name in ("ann/1.wav", "ann/2.wav", "bob/3.wav"):
        write_wav(tmp_path / name)
    (tmp_path / "transcripts.tsv").write_text(
        "ann/1.wav\tone\ttrain\nann/2.wav\ttwo\ttrain\nbob/3.wav\tthree\ttest\n"
    )
    return tmp_path


def test_a_sphinx_folder_is_read(sphinx: Path) -> None:
    corpus = read_folder(sphinx)
    assert [(u.name, u.speaker, u.text) for u in corpus.train] == [
        ("ann/a1", "ann", "YES NO"),
        ("bob/b1", "bob", "YES NO"),
    ]
    assert corpus.test[0].frames.shape == (5, 13)
    assert corpus.test[0].frames[1, 0] == 13.0


def test_an4_is_read(an4: Path) -> None:
    corpus = read_folder(an4)
    assert (len(corpus.train), len(corpus.test)) == (948, 130)
    assert corpus.train[0].text == "YES"
    assert not {u.speaker for u in corpus.train} & {u.speaker for u in corpus.test}
    assert 2400 < corpus.seconds < 2700


@pytest.mark.parametrize("order", [">", "<"])
def test_either_byte_order_is_read(tmp_path: Path, order: str) -> None:
    write_mfc(tmp_path / "a.mfc", order=order)
    assert read_mfc(tmp_path / "a.mfc")[4, 12] == 64.0


@pytest.mark.parametrize("keep", [0, 3, 4, 5, 100, 263])
def test_a_truncated_feature_file_is_named(sphinx: Path, keep: int) -> None:
    path = sphinx / "feat/bob/b1.mfc"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RecipeError, match=r"b1\.mfc is truncated or damaged"):
        read_folder(sphinx)


def test_features_of_another_width_are_refused(sphinx: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"a1\.mfc holds 65 values, expected a positive multiple of 12"
    ):
        read_folder(sphinx, cepstra=12)


def test_features_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    values = np.full(13, np.nan, ">f4")
    (tmp_path / "a.mfc").write_bytes(struct.pack(">i", 13) + values.tobytes())
    with pytest.raises(RecipeError, match=r"a\.mfc holds values that are not finite"):
        read_mfc(tmp_path / "a.mfc")


def test_a_missing_feature_file_is_named(sphinx: Path) -> None:
    (sphinx / "feat/ann/a1.mfc").unlink()
    with pytest.raises(RecipeError, match=r"a1\.mfc cannot be read: No such file"):
        read_folder(sphinx)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("YES (other)\n", r"my_test\.transcription has no transcript of c1"),
        ("YES c1\n", r"my_test\.transcription:1: expected 'TEXT \(ID\)', got 'YES c1'"),
        ("\nCAFÉ (c1)\n", r"my_test\.transcription:2: unknown character 'É' in 'CAFÉ'"),
        ("<s> </s> (c1)\n", r"my_test\.transcription:1: the transcript is empty"),
    ],
)
def test_a_wrong_transcript_is_named_with_its_line(sphinx: Path, text: str, message: str) -> None:
    (sphinx / "etc/my_test.transcription").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_folder(sphinx)


def test_frame_labels_are_read_and_checked(sphinx: Path) -> None:
    for name in ("ann/a1", "bob/b1", "cyd/c1"):
        (sphinx / "labels" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(sphinx / "labels" / f"{name}.npy", np.arange(5))
    labels = read_folder(sphinx, aligned=True).train[0].labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 2, 3, 4]
    np.save(sphinx / "labels/bob/b1.npy", np.arange(4))
    with pytest.raises(
        RecipeError, match=r"b1\.npy: expected 5 whole numbers, one a frame, got int64 \(4,\)"
    ):
        read_folder(sphinx, aligned=True)
    (sphinx / "labels/bob/b1.npy").unlink()
    with pytest.raises(RecipeError, match=r"b1\.npy cannot be read"):
        read_folder(sphinx, aligned=True)


def test_a_wav_folder_is_read(wavs: Path) -> None:
    corpus = read_folder(wavs)
    assert [(u.speaker, u.text) for u in corpus.train] == [("ann", "ONE"), ("ann", "TWO")]
    assert corpus.test[0].frames.shape == (23, 40)
    assert corpus.bins == 40


def test_without_a_third_column_a_tenth_is_held_out(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", 500)
    (tmp_path / "transcripts.tsv").write_text(
        "".join(f"./{'./' * i}a.wav\tyes\n" for i in range(60))
    )
    corpus = read_folder(tmp_path)
    assert 1 <= len(corpus.test) <= 15
    assert len(corpus.train) + len(corpus.test) == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rate": 8000},
            r"3\.wav has 1 channels of 16 bits at 8000 Hz, expected 1 of 16 bits at 16000 Hz",
        ),
        ({"channels": 2}, r"3\.wav has 2 channels"),
        ({"samples": 0}, r"3\.wav has length 0"),
        ({"samples": 100}, r"3\.wav is shorter than one frame"),
    ],
)
def test_an_unusable_wav_is_named(wavs: Path, arguments: dict[str, int], message: str) -> None:
    write_wav(wavs / "bob/3.wav", **arguments)
    with pytest.raises(RecipeError, match=message):
        read_folder(wavs)


def test_a_damaged_wav_is_named(wavs: Path) -> None:
    path = wavs / "bob/3.wav"
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with pytest.raises(RecipeError, match=r"3\.wav is truncated: it announces 8000 bytes"):
        read_wav(path, 16000)
    for content in (b"", b"not sound at all", whole[:20]):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"3\.wav is not a wav file"):
            read_wav(path, 16000)
    path.unlink()
    with pytest.raises(RecipeError, match=r"3\.wav cannot be read"):
        read_wav(path, 16000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"transcripts\.tsv is empty"),
        ("ann/1.wav one\n", r"transcripts\.tsv:1: expected FILE <tab> TEXT .*got 1 columns"),
        (
            "ann/1.wav\tone\tvalid\n",
            r"transcripts\.tsv:1: the third column must be train or test, got 'valid'",
        ),
        (
            "ann/1.wav\tone\ttrain\nann/2.wav\tsay: two!\n",
            r"transcripts\.tsv:2: unknown character ':'",
        ),
        ("ann/1.wav\tone\ttrain\n", "leaves nothing to test on"),
        (
            "ann/1.wav\tone\ttrain\nbob/3.wav\ttwo\ttest\nann/1.wav\ttwo\ttest\n",
            r"tsv:3: ann/1\.wav is listed already in line 1; remove one",
        ),
        (b"ann/1.wav\t\xff\n", r"transcripts\.tsv is not UTF-8"),
    ],
)
def test_a_wrong_listing_is_explained(wavs: Path, content: str | bytes, message: str) -> None:
    (wavs / "transcripts.tsv").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(RecipeError, match=message):
        read_folder(wavs)


def test_a_missing_empty_or_other_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="absent does not exist"):
        read_folder(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="file is a file"):
        read_folder(tmp_path / "file")
    (tmp_path / "file").unlink()
    with pytest.raises(RecipeError, match=r"is empty: expected transcripts\.tsv"):
        read_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(RecipeError, match="is not a speech corpus"):
        read_folder(tmp_path)
