"""The figures of the closing table."""

from __future__ import annotations

import dataclasses
import io
import sys

from rich.console import Console

from loosestep.lab import Lab
from loosestep.lab.report import _cells, closing_table


def test_use_is_what_a_link_carried_of_what_it_could_have() -> None:
    assert _cells(100_000_000, 25_000_000, 1_250_000, 4.0) == [
        "100",
        "25.00",
        "1.25",
        "50.0%",
        "2.5%",
    ]
    assert _cells(None, 3_000_000, 0, 4.0) == ["no limit", "3.00", "0.00", "-", "-"]


def test_ranks_have_their_cpu_time_their_share_of_a_core_and_how_they_ended() -> None:
    with Lab(2, network=False, slow={1: 2}) as lab:
        result = lab.run([sys.executable, "-c", "import os; os._exit(int(os.environ['RANK']) * 3)"])
        assert lab.job is not None
        for rank, seconds in zip(lab.job.ranks, (1.25, 0.5), strict=True):
            rank.cpu_seconds = seconds
        output = io.StringIO()
        Console(file=output, width=100).print(
            closing_table(lab, dataclasses.replace(result, seconds=5.0))
        )
    rows = [
        line.replace("│", " ").split() for line in output.getvalue().splitlines() if "│" in line
    ]
    assert rows == [
        ["n0", "r0", "1.25", "25%", "ok"],
        ["n1", "r1", "(2x", "slower)", "0.50", "10%", "exit", "code", "3"],
    ]
