"""The run's store, sealed: what is read from it was written by a rank of this run, whoever else can
write to it.

Every value carries its writer, a number that only grows, and HMAC-SHA256 over these, its name and
itself, with a secret of this run alone: so neither a stranger's value nor an old one of a rank is
taken. What does not fit is as good as not there, and said once. A stranger can still delete values
or fill the store: that can stop a run, loudly, and change nothing.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from loosestep.core.keys import derive

log = logging.getLogger("loosestep")

LOOK = 0.05  # seconds between two looks at a value that was not ours
_HEAD = struct.Struct("<32sIQ")  # proof, writer, number


@dataclass
class _Memory:
    """What all views of one store know together."""

    written: dict[str, int] = field(default_factory=dict)
    seen: dict[tuple[str, int], int] = field(default_factory=dict)
    told: bool = False


class SealedStore(dist.Store):
    """A view of a store: names lie under `prefix`. Of the same interface, so that torch's
    process groups meet in it too.
    """

    def __init__(
        self,
        raw: Any,
        secret: bytes,
        *,
        rank: int,
        prefix: str,
        timeout: float,
        memory: _Memory | None = None,
    ) -> None:
        """`raw`: a torch.distributed store, whose stubs do not know that it takes bytes."""
        super().__init__()
        self.raw = raw
        self.prefix = prefix
        self._secret = secret
        self._rank = rank
        self._patience = timeout
        self._memory = memory or _Memory()

    def within(self, name: str) -> SealedStore:
        """The part under `name`, on the same connection."""
        return self._view(self.raw, f"{self.prefix}/{name}")

    def clone(self) -> SealedStore:
        """A connection of its own, so that a long wait elsewhere delays nothing here."""
        raw = self.raw.clone()
        raw.set_timeout(timedelta(seconds=self._patience))
        return self._view(raw, self.prefix)

    def on(self, raw: Any, *, name: str, rank: int) -> SealedStore:
        """The part under `name`, with the same secret, in another store where this is `rank`."""
        prefix = f"{self.prefix}/{name}"
        return SealedStore(raw, self._secret, rank=rank, prefix=prefix, timeout=self._patience)

    def open(self, name: str) -> dist.Store:
        """The part under `name` without seals, for a backend that calls its store from threads
        that know no Python.
        """
        return dist.PrefixStore(f"{self.prefix}/{name}", self.raw)

    def secret_name(self, purpose: str) -> str:
        """A name that every rank of the run comes to by itself, and nobody else."""
        return derive(self._secret, "name", self.prefix, purpose)[:8].hex()

    def _view(self, raw: Any, prefix: str) -> SealedStore:
        return SealedStore(
            raw,
            self._secret,
            rank=self._rank,
            prefix=prefix,
            timeout=self._patience,
            memory=self._memory,
        )

    # ---- what a store can do

    def set(self, key: str, value: str | bytes) -> None:
        name = self._name(key)
        self.raw.set(name, self._seal(name, value))

    def get(self, key: str) -> bytes:
        """What a rank of the run has set, waited for."""
        until = time.monotonic() + self._patience
        while True:
            value = self._read(self._name(key), self.raw.get(self._name(key)))
            if value is not None:
                return value
            if time.monotonic() > until:
                raise dist.DistStoreError(
                    f"no rank of this run has written {key} within {self._patience:g} s"
                )
            time.sleep(LOOK)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [
            self.get(key) if value is None else value
            for key, value in zip(keys, self.peek(keys), strict=True)
        ]

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of keys that were set at some time; None for one that no rank of the run
        wrote.
        """
        names = [self._name(key) for key in keys]
        return [
            self._read(name, text)
            for name, text in zip(names, self.raw.multi_get(names), strict=True)
        ]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until the keys are set, by whomever: reading tells."""
        self.raw.wait(
            [self._name(key) for key in keys], timeout or timedelta(seconds=self._patience)
        )

    def check(self, keys: Sequence[str]) -> bool:
        """Whether ranks of the run have set the keys."""
        return bool(self.raw.check([self._name(key) for key in keys])) and None not in self.peek(
            keys
        )

    def add(self, key: str, amount: int) -> int:
        name = self._name(key)
        while True:
            before = self.raw.get(name) if self.raw.check([name]) else b""
            total = int(self._read(name, before) or 0) + amount
            after = self._seal(name, str(total))
            if self.raw.compare_set(name, before, after) == after:
                return total

    def delete_key(self, key: str) -> bool:
        return bool(self.raw.delete_key(self._name(key)))

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout.total_seconds()
        self.raw.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._patience)

    # ---- seals

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _seal(self, name: str, value: str | bytes) -> bytes:
        text = value.encode() if isinstance(value, str) else bytes(value)
        number = self._memory.written.get(name, 0) + 1
        self._memory.written[name] = number
        return _HEAD.pack(self._proof(name, self._rank, number, text), self._rank, number) + text

    def _read(self, name: str, text: bytes) -> bytes | None:
        if len(text) >= _HEAD.size:
            proof, writer, number = _HEAD.unpack_from(text)
            value = text[_HEAD.size :]
            fits = hmac.compare_digest(proof, self._proof(name, writer, number, value))
            if fits and number >= self._memory.seen.get((name, writer), 0):
                self._memory.seen[name, writer] = number
                return value
        if not self._memory.told:
            self._memory.told = True
            log.warning(
                "somebody who is no rank of this run writes to its store (%s): it is ignored, "
                "told once. Keep strangers off the network and the machine of rank 0",
                name,
            )
        return None

    def _proof(self, name: str, writer: int, number: int, value: bytes) -> bytes:
        return derive(self._secret, "store", name, writer, number, value)


def lonely_store(timeout: float = 60.0) -> SealedStore:
    """The store of a rank without peers."""
    return SealedStore(
        dist.HashStore(), secrets.token_bytes(32), rank=0, prefix="alone", timeout=timeout
    )
