"""What every benchmark script shares: options, the line-up, progress, plots, sections of
RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from common import here, machine, publish
from peers import FREE, NOT_MEASURED, Peer, choose

PLOTS = Path(__file__).resolve().parents[1] / "plots"
RAW = Path(__file__).resolve().parents[1] / "results" / "bench"
"""Raw figures of the last full runs: what the tables and claims were made of."""
LIMITS = (
    "Limits: one machine; all ranks share its cores, nodes are network namespaces, links are "
    "token buckets, sleeping stands for an accelerator at work. Ratios between rows carry over to "
    "a cluster as far as its compute and link times resemble these; absolute speeds do not."
)
T = TypeVar("T")


def parser(doc: str | None, *, in_time: bool = False) -> argparse.ArgumentParser:
    """With the options that all have, and what `progress_in_time` asks for."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="a small version that shows that it works; nothing written",
    )
    made.add_argument("--rounds", type=int, help="repetitions; in each, every peer runs once")
    made.add_argument(
        "--peers",
        nargs="*",
        default=[],
        metavar="NAME",
        help="only peers whose names contain one of these",
    )
    if in_time:
        made.add_argument(
            "--seconds",
            type=float,
            default=math.inf,
            help="begin no round that would end later, but for the first",
        )
    made.add_argument("--dry", action="store_true", help="print the section, write nothing")
    return made


def lineup(
    options: argparse.Namespace,
    names: Sequence[str] = (),
    *,
    forked_only: bool = False,
    rare: bool = False,
) -> list[Peer]:
    """The peers to measure and, printed, those that cannot be."""
    chosen = choose(options.peers or names, full=not options.quick, rare=rare)
    usable = [
        peer
        for peer in chosen
        if peer.missing() is None and not (forked_only and peer.launcher != "fork")
    ]
    for peer in chosen:
        if peer.missing() is not None:
            print(f"{peer.name}: {peer.missing()}")
    return usable


def absent(measured: Sequence[Peer], *, network: bool, rare: bool) -> str:
    """A line about the peers that are not in the table, each with its reason; `rare`: the table
    could have had those too.
    """
    reasons = dict(NOT_MEASURED)
    for peer in choose(full=True, rare=True):
        if peer not in measured and not peer.ours and peer.name != FREE:
            if peer.rare and not rare:
                reasons[peer.name] = "exchanges too rarely to be timed here"
                continue
            alone = peer.launcher == "mpirun" and not network
            left_out = (
                "mpirun needs nodes with a network, here all share the loopback"
                if alone
                else "left out for time"
            )
            reasons[peer.name] = peer.missing() or left_out
    return (
        "Not in the table: "
        + "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
        + "."
    )


def versions() -> str:
    """Of the peers that are installed."""
    found = []
    for name in ("torchft-nightly", "decent-dp", "hivemind", "heat", "accelerate"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "no peers installed"


def progress(items: Sequence[T], describe: Callable[[T], str]) -> Iterator[T]:
    """Each item, with a line that says how far and how long still."""
    return progress_in_time(items, describe, lambda item: 0, math.inf)


def progress_in_time(
    items: Sequence[T], describe: Callable[[T], str], round_of: Callable[[T], int], seconds: float
) -> Iterator[T]:
    """The same, round by round; none is begun that would end later than after `seconds` if it is
    like those before.
    """
    begun = time.monotonic()
    rounds = 0
    for number, item in enumerate(items):
        passed = time.monotonic() - begun
        if round_of(item) > rounds:
            rounds = round_of(item)
            if passed / rounds * (rounds + 1) > seconds:
                print(f"no time for round {rounds}", flush=True)
                break
        left = f", about {passed / number * (len(items) - number):.0f} s left" if number else ""
        print(f"[{number + 1}/{len(items)}{left}] {describe(item)}", flush=True)
        yield item
    print(f"took {time.monotonic() - begun:.0f} s", flush=True)


def keep(name: str, lines: Iterable[Mapping[str, object]], options: argparse.Namespace) -> None:
    """The raw figures of a full run, one JSON object a line, for the table of claims."""
    if not partial(options):
        file_name = raw(name)
        file_name.parent.mkdir(parents=True, exist_ok=True)
        with file_name.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def raw(name: str) -> Path:
    """Where the figures of a section are kept, by the size of this machine."""
    return RAW / f"{here(name, machine())}.jsonl"


def partial(options: argparse.Namespace) -> bool:
    """Whether the run was made smaller, or only to look: then nothing is written."""
    return bool(
        options.quick or options.dry or options.peers or getattr(options, "bandwidth", None)
    )


def finish(
    name: str,
    text: str,
    options: argparse.Namespace,
    *,
    where: str,
    measured: Sequence[Peer],
    network: bool = True,
    rare: bool = False,
) -> None:
    """Limits, machine and versions below the text; printed, and written unless it was quick or a
    part only.
    """
    name = here(name, where)
    others = absent(measured, network=network, rare=rare)
    whole = (
        f'<a id="{name}"></a>\n\n{text.strip()}\n\n{others}\n\n{LIMITS}\n\n{where}; {versions()}.'
    )
    publish(name, whole, quick=partial(options))


def plot(
    name: str, draw: Callable[[object], None], options: argparse.Namespace, *, title: str
) -> str:
    """A picture beside RESULTS.md, and the line that shows it; nothing where matplotlib is
    missing or nothing is written.
    """
    if partial(options):
        return ""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot")
        return ""
    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    draw(axes)
    axes.set_title(title)
    PLOTS.mkdir(exist_ok=True)
    name = here(name, machine())
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"![{title}](plots/{name}.svg)\n"


def require_root() -> None:
    """Links need network namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit(
            "limited links need Linux and root: run it as root, or see stragglers.py and kill.py, "
            "which do without"
        )


__all__ = [
    "RAW",
    "absent",
    "finish",
    "keep",
    "lineup",
    "machine",
    "parser",
    "partial",
    "plot",
    "progress",
    "raw",
    "require_root",
    "versions",
]
