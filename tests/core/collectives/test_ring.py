"""The ring's order is gloo's, the check of it finds another one, and numbers ride unharmed."""

import pytest
import torch

from loosestep.core.collectives.ring import OrderCheck, ring_sum, segment_length
from loosestep.core.collectives.rows import read_rows, room_for, write_rows


def test_segments_begin_with_the_rank_before_them() -> None:
    parts = [torch.tensor([value]).repeat(8) for value in (1.0, 2.0**30, -(2.0**30), 4.0)]
    # float32 forgets 1 and 4 beside 2^30 unless both large ones are added first
    begun_by = {0: 3, 1: 0, 2: 1, 3: 2}
    expected = []
    for segment in range(4):
        total = torch.zeros(1)
        for step in range(4):
            total = total + parts[(begun_by[segment] - step) % 4][:1]
        expected += [float(total)] * 2
    assert ring_sum(parts).tolist() == expected


@pytest.mark.parametrize(
    ("length", "width", "ranks", "segment"),
    [(1000, 4, 4, 250), (1001, 4, 4, 252), (7, 4, 4, 2), (3145733, 4, 3, 1048580), (8, 8, 2, 4)],
)
def test_a_segment_is_made_of_equal_pieces(
    length: int, width: int, ranks: int, segment: int
) -> None:
    assert segment_length(length, width, ranks) == segment


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("length", [1, 13, 5000, 1_000_003])
def test_the_check_takes_the_ring_and_nothing_else(ranks: int, length: int) -> None:
    check = OrderCheck(ranks, torch.float32)
    values = [check.values(rank, length) for rank in range(ranks)]
    assert check.holds(ring_sum(values))
    if length > 100:
        in_order = values[0].clone()
        for other in values[1:]:
            in_order += other
        assert not check.holds(in_order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_ride_on_a_sum_bit_for_bit(dtype: torch.dtype) -> None:
    rows = torch.tensor(
        [[0.1, -0.0, float("nan"), 1e300], [2.0**53 - 1, -1e-310, float("inf"), 7.0]],
        dtype=torch.float64,
    )
    rooms = [torch.randn(room_for(2, 4)).to(dtype) for _ in range(2)]
    for place, room in enumerate(rooms):
        write_rows(room, rows[place : place + 1], place=place, places=2)
    read = read_rows(rooms[0] + rooms[1], 4)
    assert read.view(torch.int64).tolist() == rows.view(torch.int64).tolist()
