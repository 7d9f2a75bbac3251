"""Codecs by name."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches

from loosestep.codecs.base import Codec
from loosestep.codecs.bf16 import BF16
from loosestep.codecs.int8 import Int8
from loosestep.codecs.qsgd import QSGD

CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (BF16, Int8, QSGD)}


def codec(text: str | Codec) -> Codec:
    """The codec that `NAME` or `NAME:field=value,field=value` describes; brackets around it are allowed."""
    if isinstance(text, Codec):
        return text
    if not isinstance(text, str):
        raise ValueError(f"a codec is a name, one of {', '.join(CODECS)}, or a Codec; got {text!r}")
    name, _, rest = text.strip().removeprefix("(").removesuffix(")").strip().partition(":")
    if name not in CODECS:
        close = get_close_matches(name, list(CODECS), n=1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown codec {name!r}{guess}; the codecs are {', '.join(CODECS)}")
    valid = [field.name for field in fields(CODECS[name])]
    chosen: dict[str, int] = {}
    for part in filter(None, map(str.strip, rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value.lstrip("-").isdigit():
            raise ValueError(
                f"expected field=whole number in {text!r}, got {part!r}, as in 'int8:block=256'"
            )
        if key not in valid:
            raise ValueError(
                f"{name} has no field {key!r}; its fields are: {', '.join(valid) or 'none'}"
            )
        if key in chosen:
            raise ValueError(f"{key} is given twice in {text!r}")
        chosen[key] = int(value)
    return CODECS[name](**chosen)
