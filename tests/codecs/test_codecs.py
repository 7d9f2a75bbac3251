"""Codecs for themselves: sizes, errors, extremes, names."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loosestep
from loosestep.codecs import BF16, QSGD, Codec, Int8, codec

ALL = [BF16(), Int8(), Int8(block=256), Int8(block=8), QSGD(), QSGD(levels=100, block=64)]


def encode(way: Codec, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return way.encode(values, way.memory(*values.shape, values.device), seed=seed)


def there_and_back(way: Codec, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return way.decode(encode(way, values, seed), torch.empty_like(values))


@pytest.mark.parametrize("way", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    count=st.integers(1, 1100),
    seed=st.integers(0, 99),
    scale=st.floats(1e-20, 1e20),
)
def test_a_row_takes_the_bytes_that_its_length_says_and_comes_back_within_its_error(
    way: Codec, dtype: torch.dtype, rows: int, count: int, seed: int, scale: float
) -> None:
    values = (
        torch.randn(rows, count, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * scale
    )
    codes = encode(way, values, seed)
    back = way.decode(codes, torch.empty_like(values))
    assert codes.shape == (rows, way.size(count))
    assert codes.dtype == torch.uint8
    assert back.dtype == dtype
    # Worst cases: half an ulp of 8 bits; half a step of 1/127 of the maximum for each value of a
    # block.
    error = (back - values).double().norm(dim=1) / values.double().norm(dim=1)
    bound = {
        "bf16": 2.0**-8,
        "int8": math.sqrt(min(count, getattr(way, "block", 1))) / 254,
        "qsgd": 1.0001 * math.sqrt(getattr(way, "block", 1)) / getattr(way, "levels", 1),
    }
    assert (error <= bound[way.name] * (1 + 1e-5)).all()


@pytest.mark.parametrize("way", ALL, ids=str)
def test_every_row_is_coded_for_itself_and_by_the_same_seed_alike(way: Codec) -> None:
    values = torch.randn(3, 777)
    assert torch.equal(encode(way, values, 5), encode(way, values, 5))
    if not isinstance(way, QSGD):
        assert torch.equal(encode(way, values)[1:2], encode(way, values[1:2]))
    parts = values.view(1, -1).expand(2, -1)  # rows that share memory
    assert there_and_back(way, parts.contiguous()).shape == parts.shape


def test_a_long_vector_is_coded_as_its_blocks_are() -> None:
    values = torch.randn(2, 400_000)
    way = Int8(block=256)
    whole = there_and_back(way, values)
    pieces = [there_and_back(way, piece) for piece in values.split(25_600, 1)]
    assert torch.equal(whole, torch.cat(pieces, 1))


@pytest.mark.parametrize("way", ALL, ids=str)
def test_zeros_stay_zeros_and_a_huge_value_costs_no_other_block(way: Codec) -> None:
    assert there_and_back(way, torch.zeros(2, 9000)).count_nonzero() == 0
    tiny = torch.full((1, 5), 1e-42)
    assert there_and_back(way, tiny).abs().max() <= tiny.max()
    values = torch.randn(1, 9000)
    calm = there_and_back(way, values)
    values[0, 100] = 3e38
    back = there_and_back(way, values)
    assert back.isfinite().all()
    assert back[0, 100] == pytest.approx(3e38, rel=0.01)
    assert torch.equal(back[0, 8192:], calm[0, 8192:])


@pytest.mark.parametrize("way", ALL, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [3, 8999])
def test_what_is_not_finite_never_becomes_a_number(way: Codec, bad: float, place: int) -> None:
    values = torch.randn(1, 9000)
    values[0, place] = bad
    assert not there_and_back(way, values)[0, place].isfinite()


@pytest.mark.parametrize("way", ALL, ids=str)
def test_a_coded_vector_that_is_sent_again_and_again_with_what_is_left_over_arrives(
    way: Codec,
) -> None:
    target = torch.randn(1, 3000, dtype=torch.float64).pow(3)
    got = torch.zeros_like(target)
    rest = []
    for step in range(12):
        got += there_and_back(way, target - got, seed=step)
        rest.append(float((target - got).norm() / target.norm()))
    assert all(later < earlier or later < 1e-30 for earlier, later in pairwise(rest))
    assert rest[-1] < 1e-6


def test_qsgd_has_no_bias() -> None:
    values = torch.randn(1, 1024, dtype=torch.float64)
    trials = 1500
    way = QSGD(levels=25)
    mean = torch.cat([there_and_back(way, values, seed=seed) for seed in range(trials)]).mean(dim=0)
    step = values.view(2, 512).norm(dim=1).repeat_interleave(512) / 25
    above = (values[0] / step) % 1.0  # the probability of rounding up
    sigma = step * (above * (1 - above) / trials).sqrt()
    assert ((mean - values[0]).abs() <= 5 * sigma + 2.0**-16 * step).all()
    assert (
        (mean - values[0]) / sigma
    ).abs().mean() > 0.6  # .8 if it is chance: the probabilities are these


@pytest.mark.parametrize(
    ("way", "most"), [(BF16(), 2.0), (Int8(), 1.001), (Int8(block=256), 1.016), (QSGD(), 1.008)]
)
def test_bytes_a_value(way: Codec, most: float) -> None:
    assert most - 0.01 < way.bytes_per_value <= most


@pytest.mark.parametrize("way", ALL, ids=str)
def test_a_name_reads_back(way: Codec) -> None:
    assert codec(str(way)) == way
    assert codec(f"({way})") == way
    assert codec(way) is way


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int9", "did you mean 'int8'.*the codecs are bf16, .*int8, qsgd"),
        ("", "the codecs are bf16, .*int8, qsgd"),
        ("bf16:block=3", "bf16 has no field 'block'; its fields are: none"),
        ("int8:block=4", "block must be a whole number from 8"),
        ("int8:block=many", "block must be a whole number"),
        ("int8:block=16,block=32", "given twice"),
        ("qsgd:levels=16", "levels must be above the square root of block"),
        ("qsgd:levels=128", "from 1 to 127"),
        (7, "a codec is a name"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        codec(text)


def test_a_codec_of_ones_own_has_a_name_everywhere() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Half(loosestep.codecs.Codec):
        name: ClassVar[str] = "half"
        summary: ClassVar[str] = "float16"

        def size(self, count: int) -> int:
            return -(-2 * count // 4) * 4

        def encode(
            self, values: torch.Tensor, codes: torch.Tensor, *, seed: int = 0
        ) -> torch.Tensor:
            codes.view(torch.float16)[:, : values.shape[1]] = values
            return codes

        def decode(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return values.copy_(codes.view(torch.float16)[:, : values.shape[1]])

    assert loosestep.strategy("daso:codec=half").codec == Half()
    values = torch.arange(7.0).view(1, 7)
    assert torch.equal(there_and_back(codec("half"), values), values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("daso-paper:codec=int8", "cannot have codec=int8 .* can have are: bf16"),
        ("daso:lanes=rotating,codec=bf16", "can have are: none"),
        ("adpsgd:codec=int8", "can have are: bf16"),
        ("adpsgd:codec=qsgd", "can have are: bf16"),
        ("delay-by-one:older_gradient=true,codec=bf16", "can have are: none"),
        ("localsgd:codec=int9", "did you mean 'int8'"),
    ],
)
def test_a_codec_that_a_strategy_cannot_have_is_refused_with_those_that_it_can(
    text: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        loosestep.strategy(text)


@pytest.mark.parametrize("name", ["daso", "localsgd", "diloco", "delay-by-one", "allreduce"])
def test_a_strategy_with_a_codec_reads_back(name: str) -> None:
    chosen = loosestep.strategy(f"{name}:codec=(qsgd:levels=64,block=128)")
    assert chosen.codec == QSGD(levels=64, block=128)
    assert loosestep.strategy(str(chosen)) == chosen
