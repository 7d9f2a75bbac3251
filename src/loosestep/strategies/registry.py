"""Strategies by name: `strategy("daso:period=8,delay=2")`."""

from __future__ import annotations

from typing import Any

from loosestep.registry import Registry

STRATEGIES: Registry[Any] = Registry(
    "strategy", "strategies", package=__package__, example="daso:period=8,delay=2"
)
