"""What the links carried and the ranks cost, as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from loosestep.lab.emulation import Lab
from loosestep.launch import Result, describe


def closing_table(lab: Lab, result: Result) -> RenderableType:
    """Bytes and use of each node's cable and of each pair with a limit, each way; CPU time and
    end of each rank.
    """
    tables = [] if lab.network is None else [_links(lab, result.seconds)]
    return Group(*tables, _ranks(lab, result))


def _links(lab: Lab, seconds: float) -> Table:
    table = Table(title=f"links in {seconds:.1f} s", title_justify="left")
    for name in ("", "rate Mbit/s", "sent MB", "received MB", "use sending", "use receiving"):
        table.add_column(name, justify="right")
    assert lab.network is not None
    for node, (sent, received) in enumerate(lab.bytes()):
        table.add_row(f"node {node}", *_cells(lab.network.rate(node), sent, received, seconds))
    for (a, b), (rate, there, back) in lab.network.pairs().items():
        table.add_row(f"{a} to {b}", *_cells(rate, there, back, seconds))
    return table


def _cells(rate: int | None, sent: int, received: int, seconds: float) -> list[str]:
    uses = [
        "-" if rate is None else f"{8 * count / rate / seconds:.1%}" for count in (sent, received)
    ]
    return [
        "no limit" if rate is None else f"{rate / 1e6:g}",
        f"{sent / 1e6:.2f}",
        f"{received / 1e6:.2f}",
        *uses,
    ]


def _ranks(lab: Lab, result: Result) -> Table:
    table = Table(
        title="ranks" if lab.launcher == "loosestep" else "agents of torchrun", title_justify="left"
    )
    for name in ("", "CPU s", "of one core", "end"):
        table.add_column(name, justify="right")
    assert lab.job is not None
    for rank in lab.job.ranks:
        code = result.returncodes[rank.number]
        end = "ok" if code == 0 else f"[red]{describe(code)}[/]"
        note = lab.slow.get(rank.number)
        label = rank.place.label if note is None else f"{rank.place.label} ({note:g}x slower)"
        table.add_row(
            label, f"{rank.cpu_seconds:.2f}", f"{rank.cpu_seconds / result.seconds:.0%}", end
        )
    return table
