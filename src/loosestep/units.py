"""Rates and durations as people write them: "10gbit", "20ms"."""

from __future__ import annotations

import re

NUMBER = r"(\d+(?:\.\d+)?)"
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}


def rate(text: str, *, what: str = "--bandwidth") -> int:
    """Bits per second of `500mbit`."""
    match = re.fullmatch(NUMBER + "(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{what} {text!r}: expected a rate such as 500mbit, 2.5gbit or 800kbit")
    return round(float(match[1]) * _BITS[match[2]])


def duration(text: str, *, what: str = "--delay") -> float:
    """Seconds of `20ms`."""
    match = re.fullmatch(NUMBER + "(us|ms|s|m|min)", text.strip().lower())
    if match is None:
        raise ValueError(f"{what} {text!r}: expected a duration such as 20ms, 1.5s or 2min")
    return float(match[1]) * _SECONDS[match[2]]
