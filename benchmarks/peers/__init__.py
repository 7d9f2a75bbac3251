"""The line-up: what is measured side by side. One small file a peer, each used as its own
documentation says.

A peer's file has one function, `prepare(model, work, **options) -> Trainer` (base.py). `LINEUP`
names them with the settings they run with; a peer that is not installed stays in the tables, with
the reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One row. `period`: steps between exchanges, so that a timed window covers whole ones."""

    name: str
    file: str
    options: dict[str, Any] = field(default_factory=dict)
    period: int = 1
    needs: str | None = None
    """A distribution that must be installed; None: torch or this package."""
    ours: bool = False
    full_only: bool = False
    """Starts too slowly for the quick benchmarks."""
    rare: bool = False
    """Exchanges too rarely for a timed window: only measured where a whole training is."""
    imports: tuple[str, ...] = ()
    """What it imports when it is prepared: neither that time nor that memory is its
    communication's.
    """
    launcher: str = "fork"
    """"mpirun": needs processes that MPI started."""

    @property
    def label(self) -> str:
        return f"`{self.name}`" if self.ours else self.name

    def missing(self) -> str | None:
        """Why it cannot be measured here, if it cannot."""
        if self.needs is None:
            return None
        try:
            importlib.metadata.version(self.needs)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.needs} is not installed (make peers)"
        return None


def _ours(strategy: str, period: int = 1, *, rare: bool = False) -> Peer:
    """A row of ours; where nothing else is said, every rank is a learner."""
    exact = strategy
    if strategy.startswith(RANKS_BY_DEFAULT) and "replica=" not in strategy:
        exact += ("," if ":" in strategy else ":") + "replica=rank"
    return Peer(strategy, "ours", {"strategy": exact}, period=period, ours=True, rare=rare)


RANKS_BY_DEFAULT = ("localsgd", "diloco", "delay-by-one")


FREE = "no communication"
DDP = "torch DDP"
TORCHFT = ("torchft", "torchft.coordination", "torchft.local_sgd")
LINEUP: list[Peer] = [
    Peer(FREE, "nothing"),
    Peer(DDP, "ddp"),
    Peer("torch DDP, bf16 hook", "ddp", {"hook": "bf16"}),
    Peer("torch DDP, PowerSGD rank 1", "ddp", {"hook": "powersgd"}),
    Peer("torch PostLocalSGD, period 4", "averagers", {"period": 4}, period=4),
    Peer("torch PostLocalSGD, period 16", "averagers", {"period": 16}, period=16),
    Peer("torch PostLocalSGD, period 64", "averagers", {"period": 64}, period=64, rare=True),
    Peer(
        "torch hierarchical averager, 4 and 16",
        "averagers",
        {"period": 16, "node_period": 4},
        period=16,
    ),
    Peer(
        "torchft LocalSGD, period 8",
        "torchft_peer",
        {"period": 8},
        period=8,
        needs="torchft-nightly",
        imports=TORCHFT,
    ),
    Peer(
        "torchft DiLoCo, period 16",
        "torchft_peer",
        {"period": 16, "outer": True},
        period=16,
        needs="torchft-nightly",
        imports=TORCHFT,
    ),
    Peer(
        "torchft DiLoCo, period 16, delay 4",
        "torchft_peer",
        {"period": 16, "outer": True, "delay": 4},
        period=16,
        needs="torchft-nightly",
        imports=TORCHFT,
    ),
    Peer(
        "torchft DiLoCo, period 64",
        "torchft_peer",
        {"period": 64, "outer": True},
        period=64,
        needs="torchft-nightly",
        rare=True,
        imports=TORCHFT,
    ),
    Peer(
        "torchft DiLoCo, period 64, delay 16",
        "torchft_peer",
        {"period": 64, "outer": True, "delay": 16},
        period=64,
        needs="torchft-nightly",
        rare=True,
        imports=TORCHFT,
    ),
    Peer(
        "decent-dp, ring",
        "decent_peer",
        {"topology": "ring"},
        needs="decent-dp",
        imports=("decent_dp.ddp", "loguru"),
    ),
    Peer(
        "decent-dp, complete",
        "decent_peer",
        {"topology": "complete"},
        needs="decent-dp",
        imports=("decent_dp.ddp", "loguru"),
    ),
    Peer(
        "accelerate LocalSGD, period 8",
        "accelerate_peer",
        {"period": 8},
        period=8,
        needs="accelerate",
        imports=("accelerate", "accelerate.local_sgd"),
    ),
    Peer(
        "hivemind, period 8",
        "hivemind_peer",
        {"period": 8},
        period=8,
        needs="hivemind",
        full_only=True,
    ),
    Peer(
        "Heat DASO, 4 and 1", "heat_peer", period=4, needs="heat", full_only=True, launcher="mpirun"
    ),
    _ours("allreduce"),
    _ours("localsgd:period=4", 4),
    _ours("daso:period=4,delay=1", 4),
    _ours("daso:period=8,delay=4", 8),
    _ours("daso-paper:period=4", 4),
    _ours("delay-by-one"),
    _ours("delay-by-one:replica=node"),
    _ours("diloco:period=16,delay=4", 16),
    _ours("diloco:period=64,delay=16", 64, rare=True),
    _ours("adpsgd:graph=ring"),
    _ours("adpsgd:graph=random-ring"),
    _ours("adpsgd:graph=random-ring,slowdown=1.0"),
    _ours("adpsgd:graph=pairs"),
]
NOT_MEASURED = {
    "lightning post-local": "its strategy hands the same PostLocalSGD hook and averager of torch to its own loop; see "
    "the torch rows",
}
_extra: dict[str, Peer] = {}


def register(peer: Peer) -> None:
    """One more row, for tests and for your own."""
    _extra[peer.name] = peer


def find(name: str) -> Peer:
    """The peer of this name, or a loosestep strategy that is not in the line-up."""
    for peer in (*LINEUP, *_extra.values()):
        if peer.name == name:
            return peer
    if name.startswith("module:"):
        _, file, *period = name.split(":")
        return Peer(name, file, period=int(period[0]) if period else 1)
    return _ours(name)


def load(name: str) -> ModuleType:
    """The file of the peer, imported; a name with a dot is a module outside of this folder."""
    file = find(name).file
    return importlib.import_module(file if "." in file else f"peers.{file}")


def choose(names: Sequence[str] = (), *, full: bool = True, rare: bool = False) -> list[Peer]:
    """The whole line-up, or those whose names contain one of `names` (no communication is always
    first).
    """
    chosen = [peer for peer in LINEUP if (full or not peer.full_only) and (rare or not peer.rare)]
    if names:
        chosen = [
            peer for peer in chosen if peer.name == FREE or any(name in peer.name for name in names)
        ]
    return chosen
