"""The README's table of claims, out of the figures of the last full runs: what was measured,
whichever way it went.

    python benchmarks/claims.py

Reads what the benchmarks leave in results/bench/, on a machine of this size and on others; a claim
without raw figures keeps its row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Spread, here, machine, ratios, write_section
from harness.script import RAW
from peers import FREE, find
from time_to_accuracy import PLANS, TITLES

README = Path(__file__).resolve().parents[1] / "README.md"
Lines = list[dict[str, Any]]
WANTED = ("daso:period=4,delay=1", "delay-by-one", "delay-by-one:replica=node")


def best(figures: dict[str, float], *, ours: bool, least: bool = False) -> tuple[str, float]:
    """The best of ours or of the peers; no communication is neither."""
    known = {
        k: v for k, v in figures.items() if k != FREE and find(k).ours == ours and not math.isnan(v)
    }
    name = (min if least else max)(known, key=lambda key: known[key])
    return name, known[name]


def shares(lines: Lines, case: str, key: str = "speeds") -> dict[str, float]:
    """By peer: the median over the rounds of the share of no communication."""
    of_case = {
        line["peer"]: [_total(figure) for figure in line[key]]
        for line in lines
        if line["case"] == case
    }
    return {peer: ratios(values, of_case[FREE]).median for peer, values in of_case.items()}


def _total(figure: float | list[float]) -> float:
    return sum(figure) if isinstance(figure, list) else figure


def throughput(lines: Lines) -> str:
    found = shares(lines, "500 Mbit/s")
    fastest, _ = best(found, ours=True)
    mine = ", ".join(
        f"`{name}` {found[name]:.1%}" for name in dict.fromkeys((*WANTED, fastest)) if name in found
    )
    peer, share = best(found, ours=False)
    return (
        f"{mine} of the speed without communication; best peer: {peer}, {share:.1%}; torch DDP "
        f"{found['torch DDP']:.1%}"
    )


def beside(case: str) -> Callable[[Lines], str]:
    def sentence(lines: Lines) -> str:
        found = shares(lines, case)
        (mine, share) = best(found, ours=True)
        (peer, theirs) = best(found, ours=False)
        daso = "daso:period=8,delay=4"
        return (
            f"`{mine}` {share:.0%}, `{daso}` {found[daso]:.0%} of the speed without "
            f"communication; best peer: {peer}, {theirs:.0%}; torch DDP {found['torch DDP']:.0%}"
        )

    return sentence


def accuracy(task: str) -> Callable[[Lines], str]:
    def sentence(lines: Lines) -> str:
        told = []
        for rate in sorted({line["rate"] for line in lines}):
            reached = {
                line["peer"]: Spread(
                    tuple(
                        PLANS[task].reached(curve, line["target"]) if curve else math.nan
                        for curve in line["curves"]
                    )
                ).median
                for line in lines
                if line["rate"] == rate
            }
            (mine, ours), (peer, theirs) = (
                best(reached, ours=ours, least=True) for ours in (True, False)
            )
            if ours == theirs and math.isfinite(ours):
                told.append(f"{rate}: a tie, `{mine}` and {peer} {ours:.2f} s")
                continue
            sides = [
                f"`{mine}` {ours:.2f} s" if math.isfinite(ours) else "none of ours gets there",
                f"best peer: {peer}, {theirs:.2f} s"
                if math.isfinite(theirs)
                else "no peer gets there",
            ]
            told.append(f"{rate}: {'; '.join(sides)}")
        return "; ".join(told)

    return sentence


def stragglers(lines: Lines) -> str:
    found = shares(lines, "one 10x slower", "paces")
    (mine, share) = best(found, ours=True)
    (peer, theirs) = best(found, ours=False)
    return (
        f"`{mine}` {share:.0%} of the speed without communication; best peer: {peer}, "
        f"{theirs:.0%}; torch DDP {found['torch DDP']:.0%}"
    )


def kill(lines: Lines) -> str:
    worst = {
        line["peer"]: min(line["results"], key=lambda one: (one[0], -one[1])) for line in lines
    }
    going = {peer: found[1] for peer, found in worst.items() if found[0]}
    sides = []
    for ours in (True, False):
        mine = [
            f"{peer} ({gap:.2f} s)"
            for peer, gap in going.items()
            if find(peer).ours == ours and peer != FREE
        ]
        sides.append(", ".join(mine) or "none")
    return f"survivors go on (longest gap): {sides[0]}; peers: {sides[1]}"


def footprint(lines: Lines) -> str:
    sent = {
        line["peer"]: Spread(tuple(one["bytes"] / 1e6 for one in line["figures"])).median
        for line in lines
    }
    (mine, ours) = best(sent, ours=True, least=True)
    (peer, theirs) = best(sent, ours=False, least=True)
    daso = f"`{WANTED[0]}` {sent[WANTED[0]]:.2f} MB per gradient, torch DDP {sent['torch DDP']:.2f}"
    return f"{daso}; least of ours: `{mine}`, {ours:.2f}; least of the peers: {peer}, {theirs:.2f}"


def scaling(lines: Lines) -> str:
    most = max(line["nodes"] for line in lines)
    found = shares([{**line, "case": "most"} for line in lines if line["nodes"] == most], "most")
    (mine, share) = best(found, ours=True)
    (peer, theirs) = best(found, ours=False)
    return (
        f"{2 * most} ranks: `{mine}` {share:.0%} of the speed without communication; best peer: "
        f"{peer}, {theirs:.0%}"
    )


CLAIMS: list[tuple[str, str, Callable[[Lines], str]]] = [
    (
        "Slow links cost little: two nodes of two ranks, 500 Mbit/s, 4 MB",
        "throughput-main",
        throughput,
    ),
    ("The same at 50 Mbit/s", "throughput-bandwidth", beside("50 Mbit/s")),
    ("The same on four nodes of two ranks", "throughput-nodes", beside("4 nodes of 2 ranks")),
    ("The same with 16 MB", "throughput-size", beside("16 MB")),
    (
        "The same with 16 MB and real compute on the cores that communicate",
        "throughput-real",
        beside("16 MB"),
    ),
    *(
        (f"Time to accuracy, {TITLES[task]}", f"time-to-accuracy-{task}", accuracy(task))
        for task in PLANS
    ),
    ("One rank of four is ten times slower", "stragglers", stragglers),
    ("One rank of four is killed", "kill", kill),
    ("Traffic: two nodes of two ranks, 4 MB", "footprint", footprint),
    ("Many ranks, 500 Mbit/s, 1 MB", "scaling", scaling),
]


def measured_before(readme: str) -> dict[str, str]:
    """By section: what the README says now."""
    rows = re.findall(
        r"^\| [^|]* \| ([^|]*) \| \[table\]\(benchmarks/RESULTS\.md#([\w-]+)\) \|$",
        readme,
        re.MULTILINE,
    )
    return {name: sentence for sentence, name in rows}


def rounds(lines: Lines) -> str:
    """How often it was measured, at the most."""
    most = max(len(found) for line in lines for found in line.values() if isinstance(found, list))
    unit = "seed" if "curves" in lines[0] else "round"
    return f"one {unit}" if most == 1 else f"{most} {unit}s"


def rows_of(readme: str, raw: Path, where: str) -> list[list[str]]:
    """One row a claim and size of machine, from its raw figures; where this machine has none,
    what was measured before stands.
    """
    before = measured_before(readme)
    rows = []
    for what, name, sentence in CLAIMS:
        mine = here(name, where)
        if not (raw / f"{mine}.jsonl").exists():
            rows.append(
                [
                    what,
                    before.get(name, "not measured yet"),
                    f"[table](benchmarks/RESULTS.md#{name})",
                ]
            )
        for section in dict.fromkeys(
            (mine, *sorted(file.stem for file in raw.glob(f"{name}-*-cores.jsonl")))
        ):
            if (raw / f"{section}.jsonl").exists():
                lines = [
                    json.loads(line) for line in (raw / f"{section}.jsonl").read_text().splitlines()
                ]
                larger = (
                    ""
                    if section == mine
                    else f", on {section.removeprefix(name + '-').replace('-', ' ')}"
                )
                link = f"[table](benchmarks/RESULTS.md#{section})"
                rows.append([f"{what}{larger} ({rounds(lines)})", sentence(lines), link])
    return rows


def main() -> None:
    rows = rows_of(README.read_text(), RAW, machine())
    text = "\n".join(
        f"| {' | '.join(cells)} |" for cells in (["", "measured", ""], ["---"] * 3, *rows)
    )
    print(text)
    write_section("claims", text, path=README)


if __name__ == "__main__":
    main()
