"""Codecs by name: `codec("int8:block=256")`."""

from __future__ import annotations

from typing import Any

from loosestep.registry import Registry

CODECS: Registry[Any] = Registry("codec", "codecs", package=__package__, example="int8:block=256")
