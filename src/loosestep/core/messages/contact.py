"""The first contact of a run's ranks, in a store that may hold what an earlier attempt, another run
or a stranger wrote.

Rank 0 calls with a token that nobody has seen before; the others answer with a nonce each; rank 0
says go, with all of them. Who finds its own nonce there knows that the call was not an old one.
With a run key every note carries a proof, and the run's secret follows from the key, the token and
the nonces, so that nothing that was written on another day fits.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from loosestep.core.errors import LostPeer
from loosestep.core.keys import derive
from loosestep.core.store import who_ended

log = logging.getLogger("loosestep")

# seconds between two looks at what is awaited, and at everything else
QUICK = 0.002
SLOW = 0.05
# seconds after which a call of another run, or another key, is no passing stranger's any more
FOREIGN = 0.5
TRUST = 2.0
# seconds after which a wait says for whom, and then says so again
TELL = 10.0
TELL_AGAIN = 60.0


class OtherRunError(ConnectionError):
    """The store is another run's."""


@dataclass(frozen=True)
class Contact:
    """What all ranks know now: a `token` that no other run has, the run's `secret` where there is a
    key, and the address from which each rank reaches the others ("" where it does not know).
    """

    token: str
    secret: bytes | None
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Party:
    """Who a rank says it is. `run`: a name that only this run has, if any; `number`: how many
    contacts came before this one in the same processes; `where`: the store's place, for messages.
    """

    rank: int
    world: int
    run: str
    key: bytes | None
    number: int
    where: str
    address: str = ""


def missing_from(answers: Collection[int], world: int) -> list[int]:
    """The ranks after rank 0 that have not answered."""
    return [rank for rank in range(1, world) if rank not in answers]


class FirstContact:
    """One rank's way into a run: `meet` ends within `patience` seconds, or names those who are
    missing. `called`: seconds after which a store where nobody calls must be another run's.
    """

    def __init__(
        self, store: Any, party: Party, *, patience: float, called: float = math.inf
    ) -> None:
        self._store = store
        self._party = party
        self._patience = patience
        self._called = called
        self._begun = time.monotonic()
        self._tell = self._begun + TELL
        self._doubted = 0.0  # since when the call is not one to trust

    def meet(self) -> Contact:
        """Find the others."""
        return self._call() if self._party.rank == 0 else self._answer()

    def _call(self) -> Contact:
        token = secrets.token_hex(8)
        call = self._seal("call", token=token, run=self._party.run, world=self._party.world)
        answers: dict[int, dict[str, Any]] = {}
        while missing := missing_from(answers, self._party.world):
            self._write("call", call)
            heard = {
                rank: self._read(f"{token}/{rank}", f"answer {token} {rank}") for rank in missing
            }
            answers |= {rank: note for rank, note in heard.items() if note is not None}
            if len(answers) < self._party.world - 1:
                try:
                    missing = missing_from(answers, self._party.world)
                    self._pause(
                        partial(missing_from, answers, self._party.world),
                        [f"{token}/{rank}" for rank in missing],
                    )
                except TimeoutError as error:
                    self._write(f"{token}/go", self._seal(f"go {token}", refused=str(error)))
                    raise
        nonces = [token, *(answers[rank]["nonce"] for rank in sorted(answers))]
        addresses = [self._party.address, *(answers[rank]["address"] for rank in sorted(answers))]
        self._store.set(
            self._name(f"{token}/go"), self._seal(f"go {token}", nonces=nonces, addresses=addresses)
        )
        return self._contact(token, nonces, addresses)

    def _answer(self) -> Contact:
        rank = self._party.rank
        nonce = secrets.token_hex(8)
        answered = ""
        while True:
            try:
                token = self._listen() or answered
            except ConnectionError:
                if not answered:
                    raise
                token = answered  # whoever speaks now has come too late
            if token and (token == answered or not self._store.check([self._name(f"{token}/go")])):
                answered = token
                note = self._seal(
                    f"answer {token} {rank}", nonce=nonce, address=self._party.address
                )
                self._write(f"{token}/{rank}", note)
                go = self._read(f"{token}/go", f"go {token}")
                if go is not None and "refused" in go:
                    raise TimeoutError(go["refused"])
                if go is not None and go["nonces"][rank] != nonce:
                    raise OtherRunError(
                        f"another process has come to {self._party.where} as rank {rank}: two "
                        "runs use one address and port, or the launcher gave a rank twice. Give "
                        "each run a MASTER_PORT or a LOOSESTEP_KEY of its own"
                    )
                if go is not None:
                    return self._contact(token, go["nonces"], go["addresses"])
            self._pause(partial(self._absent, token), [f"{answered}/go" if answered else "call"])

    def _listen(self) -> str:
        """The token of rank 0's call; "" while there is none to trust."""
        note = self._parse(self._name("call"))
        mine = {"run": self._party.run, "world": self._party.world}
        if note is None:
            if time.monotonic() - self._begun > self._called:
                raise OtherRunError(f"nobody of this run has called at {self._party.where}")
            return ""
        theirs = {name: note.get(name) for name in mine}
        if theirs == mine and self._proven(note, "call"):
            self._doubted = 0.0
            return str(note["token"])
        self._doubted = self._doubted or time.monotonic()
        doubted = time.monotonic() - self._doubted
        if theirs != mine and doubted > FOREIGN:
            raise OtherRunError(
                f"the store at {self._party.where} belongs to another run: {theirs}; this is {mine}"
            )
        if doubted > TRUST:
            had = "a wrong run key" if self._party.key and note["proof"] else "no run key"
            had = had if self._party.key else "a run key, this one has none"
            raise ConnectionError(
                f"rank 0 has {had}: set LOOSESTEP_KEY (or key=) to the same secret on every rank"
            )
        return ""

    def _absent(self, token: str) -> list[int]:
        """Those who have not answered; rank 0 when it is the one."""
        ranks = range(1, self._party.world)
        return [
            r for r in ranks if token and not self._store.check([self._name(f"{token}/{r}")])
        ] or [0]

    def _pause(self, absent: Callable[[], list[int]], awaited: list[str]) -> None:
        """Until all that is awaited is there, or for a little while, to look after the rest; says
        whom it waits for, and gives up in the end.
        """
        ended = who_ended(
            self._store,
            key=os.environ.get("LOOSESTEP_KEY", ""),
            run=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        )
        if ended is not None:
            rank, how = ended
            raise LostPeer(
                rank, f"rank {rank} ended ({how}) before all ranks had called loosestep.attach"
            )
        now = time.monotonic()
        late = now - self._begun > self._patience
        ranks = f"rank(s) {', '.join(map(str, absent()))}" if late or now > self._tell else ""
        if late:
            raise TimeoutError(
                f"{ranks} did not call loosestep.attach within {self._patience:.2g} s, at "
                f"{self._party.where}; every rank must attach the same model, with the same key "
                "(raise deadline= if they only start late)"
            )
        if now > self._tell:
            self._tell = now + TELL_AGAIN
            log.warning("rank %s waits for %s at %s", self._party.rank, ranks, self._party.where)
        names = [self._name(name) for name in awaited]
        time.sleep(QUICK)
        while time.monotonic() - now < SLOW and not self._store.check(names):
            time.sleep(QUICK)

    # ---- notes

    def _name(self, name: str) -> str:
        return f"loosestep/{self._party.number}/{name}"

    def _write(self, name: str, text: str) -> None:
        """Write an own note, and again when somebody has overwritten it."""
        name = self._name(name)
        if not self._store.check([name]) or self._store.get(name) != text.encode():
            self._store.set(name, text)

    def _read(self, name: str, about: str) -> dict[str, Any] | None:
        """A note of a rank of this run, if there is one."""
        note = self._parse(self._name(name))
        return note if note is not None and self._proven(note, about) else None

    def _parse(self, name: str) -> dict[str, Any] | None:
        if not self._store.check([name]):
            return None
        try:
            note = json.loads(self._store.get(name))
            return {**note["said"], "proof": str(note["proof"])}
        except (ValueError, KeyError, TypeError):  # a stranger's
            return None

    def _seal(self, about: str, **said: Any) -> str:
        return json.dumps({"said": said, "proof": self._proof(about, said)})

    def _proven(self, note: dict[str, Any], about: str) -> bool:
        said = {name: value for name, value in note.items() if name != "proof"}
        return hmac.compare_digest(note["proof"].encode(), self._proof(about, said).encode())

    def _proof(self, about: str, said: dict[str, Any]) -> str:
        if self._party.key is None:
            return ""
        text = json.dumps(said, sort_keys=True)
        return derive(self._party.key, "contact", self._party.number, about, text).hex()

    def _contact(self, token: str, nonces: list[str], addresses: list[str]) -> Contact:
        secret = None if self._party.key is None else derive(self._party.key, "run", token, *nonces)
        return Contact(token, secret, tuple(addresses))
