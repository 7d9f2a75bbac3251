"""Where the ranks of a process's runs have met: torch's group, and the sealed store that all of
these runs share.

Torch's group is used as it is, or initialised from what started this process; then it, and the
store that rank 0 hosts for it, live as long as the last run. A later run of the same processes
meets anew.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from loosestep.core.errors import LostPeer
from loosestep.core.keys import key_bytes
from loosestep.core.messages.address import interface_of, is_loopback, route_to
from loosestep.core.messages.contact import (
    TELL,
    TELL_AGAIN,
    Contact,
    FirstContact,
    OtherRunError,
    Party,
)
from loosestep.core.messages.sealed_store import SealedStore
from loosestep.core.store import host_store
from loosestep.topology.launchers import (
    Launch,
    Rendezvous,
    detect_launch,
    find_master,
    require_company,
)

log = logging.getLogger("loosestep")

START = 300.0  # seconds that processes may take to start: imports, queues
THOROUGH = (
    # seconds after which a rank looks for the store at all ports of its run, not just up to the
    # first free one
    3.0
)
ANSWER = 3.0  # seconds that a store may take to answer
CALLED = 3.0  # seconds after which nobody calls in a store that may be another run's
# every rank makes its contacts in the same order, so the numbers agree
_numbers = itertools.count()
_keyless = itertools.count()  # gatherings that had to do without a run key
_current: Gathering | None = None


@dataclass
class Gathering:
    """The ranks that have met. `store` holds nothing but what they wrote."""

    store: SealedStore
    token: str
    group: Any  # torch's default group
    owned: bool  # we initialised it, so we end it
    meeting: Any = None  # the group's store, which torch does not keep alive from Python's side
    runs: int = 0

    def enter(self, deadline: float) -> SealedStore:
        """The part of the store for one more run, on a connection of its own."""
        self.runs += 1
        store = self.store.within(str(next(self._attachments))).clone()
        store.set_timeout(timedelta(seconds=deadline))
        return store

    def __post_init__(self) -> None:
        self._attachments = itertools.count()  # in the same order on every rank

    def leave(self) -> None:
        """A run has ended; after the last one give back what was created here."""
        global _current
        self.runs -= 1
        if self.runs == 0 and self.owned and _current is self:
            _current = None
            dist.destroy_process_group()


def gather(key: str | bytes | None, *, deadline: float) -> Gathering:
    """The ranks of this process's run, met now or before. Without a key rank 0 makes one up when
    the addresses are known.
    """
    global _current
    if _current is None or not dist.is_initialized() or _current.group is not dist.group.WORLD:
        secret = key_bytes(key if key is not None else os.environ.get("LOOSESTEP_KEY") or None)
        _current = (
            _use_group(secret, deadline) if dist.is_initialized() else _open_group(secret, deadline)
        )
    return _current


def _use_group(key: bytes | None, deadline: float) -> Gathering:
    """Torch is initialised: meet in its store."""
    launch = detect_launch()
    rank = dist.get_rank()
    world = dist.get_world_size()
    default: Any = dist.distributed_c10d._get_default_store()
    raw = default.clone()
    raw.set_timeout(timedelta(seconds=deadline))
    # started by hand: its launcher knows nothing of the others
    run = launch.job if launch.world == world else ""
    party = Party(rank, world, run, key, next(_numbers), "the store of torch.distributed")
    contact = FirstContact(raw, party, patience=deadline).meet()
    secret = contact.secret or _hand_out_secret(rank, deadline)
    return Gathering(
        _sealed(raw, contact, secret, rank, deadline),
        contact.token,
        dist.group.WORLD,
        owned=False,
    )


def _open_group(key: bytes | None, deadline: float) -> Gathering:
    """Initialise torch from what started this process."""
    launch = detect_launch()
    require_company(launch)
    rank = launch.rank
    world = launch.world
    # A launcher that tells who will never come lets the others be as late as they like.
    patience = max(deadline, START) if launch.tells else deadline
    if world == 1:
        raw: Any = dist.HashStore()
        contact = Contact(secrets.token_hex(8), secrets.token_bytes(32), ("",))
    else:
        raw, contact = _come(launch, find_master(launch), key, patience)
    name = f"loosestep/{contact.token}/torch"
    store: dist.Store = dist.PrefixStore(name, raw)
    if world > 1 and contact.secret is not None:
        store = _sealed(raw, contact, contact.secret, rank, patience).within("torch")
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=deadline)
        )
        # The deadline was for meeting; what the script itself does with the group may take longer.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=max(deadline, START)))
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {rank} is at the store, but torch's gloo cannot connect it to the others, "
            f"which came from {', '.join(filter(None, contact.addresses)) or 'this host'} "
            f"({error}). Where the host's name leads to another interface, set GLOO_SOCKET_IFNAME"
        ) from error
    secret = contact.secret or _hand_out_secret(rank, deadline)
    shared = _sealed(raw, contact, secret, rank, deadline)
    return Gathering(shared, contact.token, dist.group.WORLD, owned=True, meeting=store)


def _sealed(raw: Any, contact: Contact, secret: bytes, rank: int, timeout: float) -> SealedStore:
    return SealedStore(raw, secret, rank=rank, prefix=f"loosestep/{contact.token}", timeout=timeout)


def _hand_out_secret(rank: int, deadline: float) -> bytes:
    """Without a run key: rank 0 makes a secret and sends it through torch's group, whose
    addresses are all that was read.
    """
    if rank == 0 and next(_keyless) == 0:
        log.warning(
            "no LOOSESTEP_KEY: the addresses of the ranks are taken from a store that whoever "
            "reaches it can write to; nothing else is. With a key, the same on every rank, they "
            "are checked too"
        )
    group: Any = dist.group.WORLD
    kinds = {device.type for device in group._device_types}
    device = (
        torch.device("cpu")
        if "cpu" in kinds
        else torch.device(kinds.pop(), torch.cuda.current_device())
    )
    secret = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.uint8, device=device)
    work = dist.broadcast(secret, 0, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=deadline))
    return bytes(secret.tolist())


# ---- the way to the store


def _come(
    launch: Launch, rendezvous: Rendezvous, key: bytes | None, patience: float
) -> tuple[Any, Contact]:
    """Host the store (rank 0, where the launcher does not) or find it, and meet the others
    there.
    """

    def party(where: str, address: str) -> Party:
        return Party(
            launch.rank,
            launch.world,
            launch.job,
            key,
            number,
            where,
            "" if is_loopback(address) else address,
        )

    number = next(_numbers)
    if launch.rank == 0 and not rendezvous.hosted:
        store, port = _host(rendezvous)
        _name_master(rendezvous.hosts[0], port)
        contact = FirstContact(
            store, party(f"{rendezvous.hosts[0]}:{port}", "127.0.0.1"), patience=patience
        ).meet()
        here = "127.0.0.1"
    else:
        store, contact, here = _find(rendezvous, party, patience)
    _face_the_others(here, contact)
    return store, contact


def _host(rendezvous: Rendezvous) -> tuple[Any, int]:
    """The store, on the first port that is free; on loopback only where the others look for it
    there.
    """
    for port in rendezvous.ports:
        with contextlib.suppress(OSError):
            return host_store(_listen(rendezvous.hosts[0], port)), port
    raise OSError(
        f"rank 0 cannot listen at {rendezvous}: in use, by another run or another program; set "
        "MASTER_PORT to a free port, the same on every rank"
    )


def _listen(host: str, port: int) -> socket.socket:
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", port))
    # A name may lead to loopback on its own host, and to an interface from elsewhere: listen on all
    # of them.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _find(
    rendezvous: Rendezvous, party: Callable[[str, str], Party], patience: float
) -> tuple[Any, Contact, str]:
    """The run's store, wherever rank 0 could host it; and the address of this process on the way
    there.
    """
    begun = time.monotonic()
    tell = begun + TELL
    pause = 0.01
    why = ""
    only = len(rendezvous.ports) * len(rendezvous.hosts) == 1
    shut: set[str] = set()
    while time.monotonic() - begun < patience:
        shut.clear()
        for port, host in itertools.product(rendezvous.ports, rendezvous.hosts):
            if host in shut and time.monotonic() - begun < THOROUGH:
                continue  # rank 0 takes the first port that is free
            where = f"{host}:{port}"
            try:
                with socket.create_connection((host, port), timeout=1.0) as probe:
                    address = str(probe.getsockname()[0])
            except OSError as error:
                shut.add(host)
                why = why or f"{where}: {error}"
                continue
            rest = patience - (time.monotonic() - begun)
            try:
                store = _connect(host, port, min(rest, ANSWER))
                store.set_timeout(timedelta(seconds=patience))
                called = patience if only else CALLED
                contact = FirstContact(
                    store, party(where, address), patience=rest, called=called
                ).meet()
            except LostPeer:
                raise
            except OtherRunError as error:
                if only:
                    raise
                why = str(error)
            except RuntimeError as error:  # of torch's stores: it is no store, or gone again
                why = f"{where}: {str(error).splitlines()[0]}"
            else:
                _name_master(host, port)
                return store, contact, address
        if time.monotonic() > tell:
            tell = time.monotonic() + TELL_AGAIN
            log.warning("%s waits for rank 0 at %s (%s)", socket.gethostname(), rendezvous, why)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
    raise TimeoutError(
        f"rank(s) 0 did not call loosestep.attach within {patience:.2g} s, at {rendezvous} ({why}). "
        "Did it start, and does MASTER_ADDR name its host as this one can reach it?"
    )


def _connect(host: str, port: int, seconds: float) -> Any:
    """A connection to a store. Torch waits forever for a program that accepts and says nothing, so
    that is left to a thread.
    """

    answer: Future[Any] = Future()
    limit = timedelta(seconds=seconds)

    def connect() -> None:
        try:
            answer.set_result(
                dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            )
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=connect, name="loosestep-connect", daemon=True).start()
    try:
        return answer.result(2 * seconds)
    except FutureTimeoutError:
        raise RuntimeError("what listens there is no store") from None


def _name_master(host: str, port: int) -> None:
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))


def _face_the_others(here: str, contact: Contact) -> None:
    """Where the own host's name leads to loopback, as Debian's installer has it, and other ranks
    are on other hosts: say by which interface and address they reach this one, to gloo and to
    whoever asks for MASTER_ADDR.
    """
    elsewhere = [address for address in contact.addresses if address]
    if not elsewhere:
        return
    address = route_to(elsewhere[0]) if is_loopback(here) else here
    if is_loopback(os.environ["MASTER_ADDR"]):
        os.environ["MASTER_ADDR"] = address
    name = interface_of(address)
    if name is not None and _leads_home(socket.gethostname()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _leads_home(host: str) -> bool:
    """Whether a name leads to loopback, among other places, or nowhere: gloo takes what is first."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return True
    return any(is_loopback(str(entry[4][0])) for entry in found)
