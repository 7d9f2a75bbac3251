"""What the lab's options say: rates, durations, faults. Every error shows the grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loosestep.units import NUMBER, duration, rate


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a rank, `at` seconds after the start."""

    rank: int
    at: float


@dataclass(frozen=True)
class Stop:
    """SIGSTOP to a rank at a time, SIGCONT `lasts` seconds later."""

    rank: int
    at: float
    lasts: float


@dataclass(frozen=True)
class Partition:
    """Groups of nodes that do not reach each other for a while; the nodes that are not named
    form one more group.
    """

    groups: tuple[frozenset[int], ...]
    at: float
    lasts: float


Fault = Kill | Stop | Partition


def link_rate(text: str, *, what: str = "--bandwidth") -> int:
    """A rate that a token bucket can keep."""
    bits = rate(text, what=what)
    if not 1_000 <= bits <= 32_000_000_000:
        raise ValueError(
            f"{what} {text!r}: a link of the lab has between 1kbit and 32gbit; leave it out for "
            "no limit"
        )
    return bits


def share(text: str, *, what: str = "--loss") -> float:
    """The probability `1%`."""
    match = re.fullmatch(NUMBER + "%", text.strip())
    if match is None or not 0 <= float(match[1]) < 100:
        raise ValueError(
            f"{what} {text!r}: expected a share of the packets such as 1% or 0.1%, below 100%"
        )
    return float(match[1]) / 100


def link(text: str) -> tuple[tuple[int, int], str]:
    """((2, 3), "50mbit") of `2-3=50mbit`, the rate checked."""
    match = re.fullmatch(r"(\d+)-(\d+)=(.+)", text.strip())
    if match is None or match[1] == match[2]:
        raise ValueError(
            f"--link {text!r}: expected NODE-NODE=RATE, two different nodes, for example 2-3=50mbit"
        )
    link_rate(match[3], what=f"--link {match[1]}-{match[2]}=")
    return (int(match[1]), int(match[2])), match[3]


def links(texts: list[str]) -> dict[tuple[int, int], str]:
    """By pair of nodes, each named once."""
    found: dict[tuple[int, int], str] = {}
    for (one, other), text in map(link, texts):
        if (one, other) in found or (other, one) in found:
            raise ValueError(
                f"--link {one}-{other}: this pair has two rates; a link has one, for both ways"
            )
        found[one, other] = text
    return found


def slow(text: str) -> tuple[int, float]:
    """(5, 10.0) of `5:10x`."""
    match = re.fullmatch(rf"(\d+):{NUMBER}x", text.strip().lower())
    if match is None or float(match[2]) < 1:
        raise ValueError(
            f"--slow {text!r}: expected RANK:FACTORx with a factor of at least 1, for example 5:10x"
        )
    return int(match[1]), float(match[2])


def slow_ranks(texts: list[str]) -> dict[int, float]:
    """By rank, each named once."""
    found: dict[int, float] = {}
    for rank, factor in map(slow, texts):
        if rank in found:
            raise ValueError(
                f"--slow {rank}: this rank has two factors, {found[rank]:g}x and {factor:g}x; "
                "name it once"
            )
        found[rank] = factor
    return found


def kill(text: str) -> Kill:
    """`3@20s`: rank 3, 20 seconds after the start."""
    match = re.fullmatch(r"(\d+)@([^:]+)", text.strip())
    if match is None:
        raise ValueError(f"--kill {text!r}: expected RANK@TIME, for example 3@20s")
    return Kill(int(match[1]), duration(match[2], what=f"--kill {text!r}, time"))


def stop(text: str) -> Stop:
    """`2@10s:5s`: rank 2, stopped after 10 seconds for 5 seconds."""
    match = re.fullmatch(r"(\d+)@([^:]+):([^:]+)", text.strip())
    if match is None:
        raise ValueError(f"--stop {text!r}: expected RANK@TIME:DURATION, for example 2@10s:5s")
    what = f"--stop {text!r}, time"
    return Stop(int(match[1]), duration(match[2], what=what), duration(match[3], what=what))


def partition(text: str) -> Partition:
    """`0,1/2,3@15s:10s`: nodes 0 and 1 cut off from 2 and 3 after 15 seconds for 10 seconds."""
    match = re.fullmatch(r"([\d,/]+)@([^:]+):([^:]+)", text.strip())
    if match is None or not re.fullmatch(r"\d+(,\d+)*(/\d+(,\d+)*)*", match[1]):
        raise ValueError(
            f"--partition {text!r}: expected NODES/NODES@TIME:DURATION, for example 0,1/2,3@15s:10s"
        )
    groups = tuple(
        frozenset(int(node) for node in group.split(",")) for group in match[1].split("/")
    )
    if sum(len(group) for group in groups) != len(frozenset().union(*groups)):
        raise ValueError(
            f"--partition {text!r}: a node is in two groups; each node may be named once"
        )
    what = f"--partition {text!r}, time"
    return Partition(groups, duration(match[2], what=what), duration(match[3], what=what))


def complete(groups: tuple[frozenset[int], ...], nodes: int) -> tuple[frozenset[int], ...]:
    """The groups, with the nodes that none names as one more; at least two, or nothing would be
    cut.
    """
    named = [node for group in groups for node in group]
    shown = "/".join(",".join(map(str, sorted(group))) for group in groups)
    for node in named:
        if not 0 <= node < nodes:
            raise ValueError(
                f"partition {shown}: there is no node {node}; the nodes are 0 to {nodes - 1}"
            )
    if len(named) != len(set(named)):
        raise ValueError(f"partition {shown}: a node is in two groups; each node may be named once")
    rest = frozenset(range(nodes)).difference(named)
    found = (*groups, rest) if rest else groups
    if len(found) < 2 or not all(found):
        raise ValueError(
            f"partition {shown} of {nodes} nodes cuts nothing: expected two groups of nodes or "
            "more, as in 0/1"
        )
    return found
