"""What every benchmark needs: its machine and versions, spreads, tables, ranks to run on, a section
of RESULTS.md.

A benchmark is one script: started by hand it starts itself once per rank and collects what rank 0
says with `say`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
SIMULATED = Path(__file__).with_name("SIMULATED.md")
TITLE = (
    "# {}\n\nEvery section is written by its script, on the machine and with the versions it "
    "names.\n"
)
USUAL_CORES = "2"
MARK = "@benchmark "
DONE = "@benchmark-done"


# Figures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing; nan stands for one that failed, and is counted but not
    averaged.
    """

    values: tuple[float, ...]

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if not math.isnan(value)]

    @property
    def median(self) -> float:
        return statistics.median(self.known) if self.known else math.nan

    @property
    def mean(self) -> float:
        return statistics.mean(self.known) if self.known else math.nan

    def text(self, form: str = ".2f", *, centre: str = "median") -> str:
        """`3.10 (2.95-3.20)`: the median or mean, the least and the most; one run alone has no
        spread. And how many failed.
        """
        if not self.known:
            return "failed"
        middle = getattr(self, centre)
        least = min(self.known)
        most = max(self.known)
        lost = len(self.values) - len(self.known)
        failed = f", {lost} of {len(self.values)} failed" if lost else ""
        spread = f" ({least:{form}}-{most:{form}})" if len(self.known) > 1 else ""
        return f"{middle:{form}}{spread}{failed}"


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Of measurements made side by side: each is divided by the one of its own round."""
    return Spread(tuple(value / other for value, other in zip(values, base, strict=True)))


def with_share(values: Sequence[float], base: Sequence[float], form: str) -> str:
    """`12.5 (12.1-13.0), 50%`: the spread and, round by round, the share of the base."""
    share = ratios(values, base).median
    return Spread(tuple(values)).text(form) + ("" if math.isnan(share) else f", {share:.0%}")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column to the left, the others to the right, padded so that it reads
    as plain text too.
    """
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(headers), f"|{rule}|", *map(line, rows)])


# Options ------------------------------------------------------------------------------------------


def options(doc: str | None, *, quick: str) -> argparse.ArgumentParser:
    """With `--quick`, which every benchmark has; `quick` says what it leaves out."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{quick}, nothing written")
    return parser


# The machine --------------------------------------------------------------------------------------


def machine() -> str:
    """One line: processor, cores, memory, load, versions."""
    import torch

    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release().split('-')[0]}, load before the run {load}; "
        f"Python {platform.python_version()}, torch {torch.__version__} (gloo, "
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'})"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# Ranks --------------------------------------------------------------------------------------------


def is_rank() -> bool:
    """Whether this process is one of the ranks that `run_ranks` started."""
    return "LOOSESTEP_BENCHMARK" in os.environ


def leave() -> None:
    """The end of a rank's work: let go of everything that holds the process group, then of the
    group itself.
    """
    import gc

    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    print(DONE, flush=True)


def say(**fields: Any) -> None:
    """Tell the process that collects; rank 0 only, so call it anywhere."""
    if os.environ.get("RANK", "0") == "0":
        print(MARK + json.dumps(fields), flush=True)


def run_ranks(
    script: str,
    settings: Mapping[str, Any],
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    bandwidth: str | None = None,
    show: Callable[[dict[str, Any]], str] = str,
    timeout: float = 3600.0,
) -> list[dict[str, Any]]:
    """Run `script` once per rank, with `settings` for `settings_of_rank`; what rank 0 said. `show`
    makes progress lines.

    With `bandwidth` every node is a network namespace with a cable of that rate; without, all share
    the loopback.
    """
    from loosestep.lab import Lab
    from loosestep.launch import Rank

    said: list[dict[str, Any]] = []
    done: set[int] = set()

    def hear(rank: Rank, line: str) -> None:
        if line == DONE:
            done.add(rank.number)
        if rank.number == 0 and line.startswith(MARK):
            said.append(json.loads(line.removeprefix(MARK)))
            print(f"  {show(said[-1])}", flush=True)

    with Lab(nodes, ranks_per_node, bandwidth=bandwidth, network=bandwidth is not None) as lab:
        env = {"LOOSESTEP_BENCHMARK": json.dumps(settings), "OMP_NUM_THREADS": "1"}
        with lab.start([sys.executable, script], env=env, output=hear) as job:
            result = job.wait(timeout)
        if result.first_failure is not None:
            last = "\n".join(job.ranks[result.first_failure].output[-20:])
            if len(done) < nodes * ranks_per_node:
                raise RuntimeError(f"rank {result.first_failure} failed:\n{last}")
            print(
                f"rank {result.first_failure} ended badly after its last measurement:\n{last}",
                flush=True,
            )
    return said


def settings_of_rank() -> dict[str, Any]:
    """What `run_ranks` was given."""
    settings: dict[str, Any] = json.loads(os.environ["LOOSESTEP_BENCHMARK"])
    return settings


# RESULTS.md ---------------------------------------------------------------------------------------


def write_section(name: str, text: str, *, path: Path = RESULTS) -> None:
    """Replace the section `name`, or append it; everything else stays as it is."""
    begin = f"<!-- begin {name} -->"
    end = f"<!-- end {name} -->"
    before = (
        path.read_text()
        if path.exists()
        else TITLE.format("Simulated" if path == SIMULATED else "Measured")
    )
    section = f"{begin}\n{text.strip()}\n{end}"
    head, found, rest = before.partition(begin)
    if found:
        _, closed, tail = rest.partition(end)
        if not closed:
            raise ValueError(
                f"{path} has '{begin}' without '{end}'; put the end mark back or remove the section"
            )
        path.write_text(head + section + tail)
    else:
        path.write_text(f"{before.rstrip()}\n\n{section}\n")


def here(name: str, where: str) -> str:
    """A section of its own for a machine (a line of `machine()`) of another size than the one
    that most tables come from.
    """
    cores = where.partition(" cores")[0].rpartition(" ")[2]
    return name if cores == USUAL_CORES else f"{name}-{cores}-cores"


def publish(name: str, text: str, *, quick: bool, path: Path = RESULTS) -> None:
    """Print the section; a full run also writes it down."""
    print(f"\n{text}")
    if not quick:
        write_section(name, text, path=path)
        print(f"\nwritten to {path.name}, section {name}")
