"""Codecs: what travels instead of float32. By name: `codec("int8:block=256")`."""

from loosestep.codecs.base import Codec, codec
from loosestep.codecs.bf16 import BF16
from loosestep.codecs.int8 import Int8
from loosestep.codecs.qsgd import QSGD

__all__ = ["BF16", "QSGD", "Codec", "Int8", "codec"]
