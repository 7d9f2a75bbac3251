"""Means in codes: nothing moves the mean, everybody agrees, and the formulas are the written
ones.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from loosestep.codecs import BF16, QSGD, Codec, Int8
from loosestep.core.collectives import coded as coded_means
from loosestep.core.collectives.coded import (
    Scratch,
    Sums,
    average_row,
    average_through_nodes,
    begin_codes,
    seed_of,
)
from loosestep.core.collectives.gloo import Channel, ordered_sum
from loosestep.core.contracts import Coded

CODECS = [BF16(), Int8(block=64), QSGD(block=64)]


@dataclass(frozen=True, kw_only=True)
class Whole(Codec):
    """Nothing is lost: eight bytes a value."""

    name: ClassVar[str] = "whole"
    summary: ClassVar[str] = "nothing is lost"

    def size(self, count: int) -> int:
        return 8 * count

    def encode(self, values: torch.Tensor, codes: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        codes.view(torch.float64).copy_(values)
        return codes

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(codes.view(torch.float64))


class Table:
    """Where the members of a group put things for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.things: list[torch.Tensor] = [torch.empty(0)] * size

    def meet(self, index: int, thing: torch.Tensor) -> list[torch.Tensor]:
        self.things[index] = thing.clone()
        self.barrier.wait()
        all_ = list(self.things)
        self.barrier.wait()
        return all_


class TableChannel(Channel):
    """A group of threads."""

    def __init__(self, ranks: list[int], rank: int, table: Table) -> None:
        super().__init__(ranks, rank, name="", store=None, pulse=None, nodes=ranks)
        self._table = table

    def swap(self, chunks: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows[self.index] for rows in self._table.meet(self.index, chunks)])

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._table.meet(self.index, mine))


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What every member's thread gives."""
    results: list[Any] = [None] * size
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results


def walk(rank: int, step: int, count: int) -> torch.Tensor:
    """What a replica learns in a step: heavy-tailed."""
    chance = torch.Generator().manual_seed(rank * 100_003 + step)
    return 0.01 * torch.randn(count, dtype=torch.float64, generator=chance).pow(3)


def start(codec: Codec, x: torch.Tensor, members: int) -> Coded:
    reference = [x.clone()]
    return Coded(codec, begin_codes(reference, members), reference)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_means, "UNIT", 256)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("weights", [None, [1, 3, 2, 1]], ids=["even", "weighted"])
def test_a_thousand_late_exchanges_conserve_the_sum_with_what_owners_owe(
    codec: Codec, weights: list[int] | None
) -> None:
    size = 4
    count = 300  # two units, the second one shorter
    rounds = 1000
    table = Table(size)
    tail = [1, 1, 1, 1] if weights is None else weights
    origin = walk(9, 9, count)

    def learner(rank: int) -> tuple[torch.Tensor, torch.Tensor, Coded, list[float]]:
        x = origin.clone()
        learned = torch.zeros(count, dtype=torch.float64)
        distances = []
        coded = start(codec, x, size)
        sums = Sums(
            coded,
            0,
            TableChannel(list(range(size)), rank, table),
            weights=weights,
            total=sum(tail),
            scratch=Scratch(),
        )
        for step in range(rounds):
            x += walk(rank, 2 * step, count)
            flat = x.clone()
            late = walk(rank, 2 * step + 1, count)  # learned while it is in flight
            x += late
            learned += walk(rank, 2 * step, count) + late
            distances.append(average_row(flat, sums, outer=None))
            coded.kept["rounds"] += 1
            x += flat
        return x, learned, coded, distances

    ends = together(size, learner)
    owed = torch.zeros(count, dtype=torch.float64)
    for rank, (_, _, coded, _) in enumerate(ends):
        for first in range(0, count, 256):
            unit = min(256, count - first)
            chunk = unit // size
            owed[first + rank * chunk :][:chunk] = coded.kept["owed"][0][first // size :][:chunk]
    kept = sum(weight * x for weight, (x, *_) in zip(tail, ends, strict=True)) + sum(tail) * owed
    given = sum(
        weight * (origin + learned) for weight, (_, learned, *_) in zip(tail, ends, strict=True)
    )
    assert torch.allclose(kept, given, rtol=0, atol=1e-12 * rounds)
    assert owed.abs().max() > 0  # the way back does lose something
    references = [coded.reference[0] for _, _, coded, _ in ends]
    assert all(torch.equal(other, references[0]) for other in references)
    assert max(sum(distances[-10:]) for *_, distances in ends) < 10 * count  # they stay together


@pytest.mark.parametrize("through", [False, True], ids=["members", "through nodes"])
def test_codes_that_lose_nothing_give_the_plain_mean(through: bool) -> None:
    size = 4
    count = 504

    def learner(rank: int) -> torch.Tensor:
        flat = values[rank].clone()
        coded = start(
            Whole(), origin if not through else origin.view(2, -1)[rank % 2], 2 if through else size
        )
        if through:
            sums = Sums(
                coded,
                0,
                TableChannel([rank % 2, rank % 2 + 2], rank, lanes[rank % 2]),
                weights=None,
                total=size,
                scratch=Scratch(),
            )
            node = TableChannel([rank // 2 * 2, rank // 2 * 2 + 1], rank, nodes[rank // 2])
            average_through_nodes(
                flat, sums, node=node, lanes=2, members=2, outer=None, scratch=Scratch()
            )
        else:
            sums = Sums(
                coded,
                0,
                TableChannel(list(range(size)), rank, world),
                weights=None,
                total=size,
                scratch=Scratch(),
            )
            average_row(flat, sums, outer=None)
        return flat

    origin = walk(7, 7, count)
    values = [walk(rank, 0, count) for rank in range(size)]
    world = Table(size)
    lanes = [Table(2), Table(2)]
    nodes = [Table(2), Table(2)]
    mean = ordered_sum(values) / size
    for value, delta in zip(values, together(size, learner), strict=True):
        assert torch.allclose(value + delta, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_through_nodes_what_codes_lose_stays_with_their_replicas_in_equal_shares(
    codec: Codec,
) -> None:
    size = 5
    count = 960
    rounds = 300
    homes = [[0, 1], [2, 3, 4]]  # uneven: rank 4 has no lane
    tables = [Table(2), Table(3)], [Table(2), Table(2)]
    origin = walk(9, 9, count)

    def learner(rank: int) -> tuple[torch.Tensor, torch.Tensor, Coded]:
        home = int(rank >= 2)
        lane = rank - homes[home][0]
        x = origin.clone()
        learned = torch.zeros(count, dtype=torch.float64)
        coded = start(codec, origin.view(2, -1)[min(lane, 1)], 2)
        node = TableChannel(homes[home], rank, tables[0][home])
        sums = None
        if lane < 2:
            sums = Sums(
                coded,
                0,
                TableChannel([lane, lane + 2], rank, tables[1][lane]),
                weights=None,
                total=size,
                scratch=Scratch(),
            )
        for step in range(rounds):
            x += walk(rank, step, count)
            learned += walk(rank, step, count)
            flat = x.clone()
            average_through_nodes(
                flat, sums, node=node, lanes=2, members=2, outer=None, scratch=Scratch()
            )
            coded.kept["rounds"] += 1
            x += flat
        return x, learned, coded

    ends = together(size, learner)
    owed = torch.zeros(2, count // 2, dtype=torch.float64)
    for rank, lane in ((0, 0), (1, 1), (2, 0), (3, 1)):
        for first in range(0, count // 2, 128):
            chunk = min(128, count // 2 - first) // 2
            place = first + (rank >= 2) * chunk
            owed[lane, place : place + chunk] = ends[rank][2].kept["owed"][0][first // 2 :][:chunk]
    kept = sum(x for x, *_ in ends) + size * owed.view(-1)
    given = sum(origin + learned for _, learned, _ in ends)
    assert torch.allclose(kept, given, rtol=0, atol=1e-12 * rounds)
    assert torch.equal(ends[0][2].reference[0], ends[2][2].reference[0])
    assert torch.equal(ends[1][2].reference[0], ends[3][2].reference[0])
    mates = [ends[rank][0] - ends[rank][1] for rank in homes[1]]
    assert max(float((mate - mates[0]).norm()) for mate in mates) > 0


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_in_silence_what_is_left_over_arrives(codec: Codec) -> None:
    size = 4
    count = 512
    table = Table(size)

    def learner(rank: int) -> tuple[torch.Tensor, Coded]:
        x = walk(rank, 0, count)
        coded = start(codec, torch.zeros_like(x), size)
        sums = Sums(
            coded,
            0,
            TableChannel(list(range(size)), rank, table),
            weights=None,
            total=size,
            scratch=Scratch(),
        )
        for _ in range(12):
            flat = x.clone()
            average_row(flat, sums, outer=None)
            coded.kept["rounds"] += 1
            x += flat
        return x, coded

    ends = together(size, learner)
    mean = sum(walk(rank, 0, count) for rank in range(size)) / size
    for x, coded in ends:
        assert (x - coded.reference[0]).norm() < 1e-6 * mean.norm()
        assert (x - mean).norm() < 1e-6 * mean.norm() + max(
            float(c.kept["owed"][0].norm()) for _, c in ends
        )


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_an_outer_step_follows_the_written_formula(codec: Codec, late: bool) -> None:
    """q = C(theta - s); g = mean q, coded again with what is owed; theta' = theta - lr g; x <- x
    + theta' - (theta - q).
    """
    size = 2
    count = 256
    rate = 0.7
    table = Table(size)
    origin = walk(5, 5, count)
    steps = 20

    def learner(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = origin.clone()
        coded = start(codec, origin, size)

        def outer(span: slice, mean: torch.Tensor) -> torch.Tensor:
            theta = coded.reference[0][span]
            return theta.sub_(theta - mean, alpha=rate)

        sums = Sums(
            coded, 0, TableChannel([0, 1], rank, table), weights=None, total=size, scratch=Scratch()
        )
        for step in range(steps):
            x += walk(rank, 2 * step, count)
            flat = x.clone()
            if late:
                x += walk(rank, 2 * step + 1, count)
            average_row(flat, sums, outer=outer)
            coded.kept["rounds"] += 1
            x += flat
        return x, coded.reference[0]

    ends = together(size, learner)

    def code(values: torch.Tensor, seed: int) -> torch.Tensor:
        rows = values.view(1, -1)
        return codec.decode(
            codec.encode(rows, codec.memory(1, len(values), values.device), seed=seed), rows.clone()
        )[0]

    xs = [origin.clone(), origin.clone()]
    theta = origin.clone()
    owed = torch.zeros_like(origin)
    for step in range(steps):
        snapshots = [x + walk(rank, 2 * step, count) for rank, x in enumerate(xs)]
        sent = [
            torch.cat(list(code_rows(codec, (s - theta).view(2, -1), seed_of(step, 0, 0, rank))))
            for rank, s in enumerate(snapshots)
        ]
        mean = (sent[0] + sent[1]) / 2 + owed
        back = torch.cat(
            [
                code(half, seed_of(step, 0, 0, 2 + owner))
                for owner, half in enumerate(mean.view(2, -1))
            ]
        )
        owed = mean - back
        moved = rate * back
        theta = theta + moved
        for rank in range(size):
            xs[rank] = (
                snapshots[rank]
                + (walk(rank, 2 * step + 1, count) if late else 0)
                + moved
                - sent[rank]
            )
    for (x, agreed), expected in zip(ends, xs, strict=True):
        assert torch.allclose(x, expected, rtol=0, atol=1e-12)
        assert torch.allclose(agreed, theta, rtol=0, atol=1e-12)


def code_rows(codec: Codec, rows: torch.Tensor, seed: int) -> torch.Tensor:
    return codec.decode(
        codec.encode(rows, codec.memory(*rows.shape, rows.device), seed=seed),
        torch.empty_like(rows),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_agree_in_float32(dtype: torch.dtype) -> None:
    size = 2
    table = Table(2)

    def learner(rank: int) -> Coded:
        x = walk(rank, 0, 64).to(dtype)
        reference = coded_means.widened([torch.zeros(64, dtype=dtype)])
        coded = Coded(Int8(block=8), begin_codes(reference, size), reference)
        sums = Sums(
            coded, 0, TableChannel([0, 1], rank, table), weights=None, total=size, scratch=Scratch()
        )
        average_row(x, sums, outer=None)
        return coded

    first, second = together(size, learner)
    assert first.reference[0].dtype == torch.float32
    assert torch.equal(first.reference[0], second.reference[0])
    assert first.reference[0].to(dtype).float().ne(first.reference[0]).any()
