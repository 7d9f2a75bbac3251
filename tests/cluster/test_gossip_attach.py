"""ADPSGD attached on real processes: how it starts, what it keeps secret, what its log says."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import errors, ranks
from torch import nn

import loosestep
from loosestep import Topology

KEY = "0123456789abcdef" * 2
APART = Topology([[0], [1], [2]])


def attach(spec="adpsgd", **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loosestep.attach(
        model, optimizer, spec, **{"topology": APART, "deadline": 20, **options}
    )


def train(run, target, steps=10):
    (optimizer,) = run.optimizers
    for _ in range(steps):
        optimizer.zero_grad()
        (run.model(torch.ones(2, 4)) - target).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)


def start_badly(rank: int, fault: str):
    """Rank 1 cannot start; all are to see why, soon, and to leave nothing behind."""
    threads = threading.active_count()
    begun = time.monotonic()
    options = {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if "port" in fault and rank == 1:
            os.environ["LOOSESTEP_PORT"] = str(taken.getsockname()[1])
        if fault == "port of a node":  # of which rank 2 needs no mailbox
            options = {"topology": Topology([[0], [1, 2]])}
        if fault == "no key":
            options = {"encrypt": True, "key": None if rank == 1 else KEY}
        if fault == "wrong key":
            options = {"key": KEY[::-1] if rank == 1 else KEY}
        try:
            attach("adpsgd:replica=node" if "node" in fault else "adpsgd", **options)
        except (OSError, RuntimeError, ValueError) as error:
            seconds = time.monotonic() - begun
            assert seconds < 10, f"{seconds:.1f} s"  # the deadline is 20
            assert threading.active_count() <= threads, threading.enumerate()
            raise RuntimeError(str(error)) from None
        finally:
            os.environ.pop("LOOSESTEP_PORT", None)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("port", "LOOSESTEP_PORT"),
        ("port of a node", "LOOSESTEP_PORT"),
        ("no key", "encrypt=True needs a run key"),
        ("wrong key", "run key"),
    ],
)
def test_a_rank_that_cannot_start_lets_all_fail_at_once_with_its_reason(fault, reason):
    seen = errors(3, start_badly, fault=fault)
    assert all(reason in message for message in seen), seen
    if fault != "wrong key":  # which the others see for themselves
        assert all("rank 1 could not attach" in seen[rank] for rank in (0, 2)), seen


def sealed(rank: int, **options):
    with attach(**options) as run:
        ids = run._engine._mailbox._courier.wire._run_id
        train(run, rank)
    return ids, run.model.weight.detach().clone(), run.stats["rejected"]


@pytest.mark.parametrize(
    "options", [{}, {"key": KEY}, {"key": KEY, "encrypt": True}], ids=["clear", "key", "curve"]
)
def test_a_run_with_a_key_or_encrypted_ends_like_one_in_the_clear(options):
    results = ranks(3, sealed, **options)
    assert all(torch.equal(weight, results[0][1]) for _, weight, _ in results)
    assert all(not rejected for _, _, rejected in results)


def mechanism(address) -> str:
    """What the socket at an address wants its connections to speak: ZMTP says it in the 64 bytes
    of its greeting.
    """
    with socket.create_connection(tuple(address), timeout=5) as stranger:
        # as much of ours as it takes to see all of theirs
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        greeting = b""
        while len(greeting) < 64:
            greeting += stranger.recv(64) or pytest.fail(f"hung up after {greeting!r}")
    return greeting[12:32].rstrip(b"\0").decode()


def spoken(rank: int, **options):
    with attach(**options) as run:
        courier = run._engine._mailbox._courier
        return mechanism(courier.transport.address), [
            key is not None for key in courier.wire._outgoing.values()
        ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("PLAIN", False)),
        ({"key": KEY}, ("PLAIN", True)),
        ({"key": KEY, "encrypt": True}, ("CURVE", True)),
    ],
    ids=["clear", "key", "curve"],
)
def test_a_key_signs_the_frames_of_every_edge_and_encrypt_is_what_the_socket_demands(
    options, expected
):
    mechanism, signed = expected
    assert ranks(3, spoken, **options) == [(mechanism, [signed, signed])] * 3


def seldom(run):
    """Leave next to no time for folding."""
    run._engine._mailbox._fold_share = 1e-9


def hasty(rank: int):
    """Steps that are too fast for their folds: in lockstep, and with a batch norm."""
    with attach("adpsgd:lockstep=true") as run:
        seldom(run)
        train(run, rank, steps=5)
        weight = run.model.weight.detach().clone()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loosestep.attach(
        model, optimizer, "adpsgd:rate=0.001", topology=APART, deadline=20
    ) as run:
        seldom(run)
        train(run, rank)
        folds = run._engine._mailbox.counters["folds"]
    return weight, folds


def test_a_round_in_lockstep_is_never_skipped_and_a_batch_norm_does_not_make_folding_dearer():
    results = ranks(3, hasty)
    for weight, folds in results:
        torch.testing.assert_close(weight, results[0][0])  # a ring of three averages all of them
        assert folds == 1  # the first, whose cost is not known before


def bounded(rank: int, staleness: int) -> int:
    """The folds of ten steps that are too fast for more than the first."""
    with attach(f"adpsgd:max_staleness={staleness},rate=0.001") as run:
        seldom(run)
        train(run, rank)
        return run._engine._mailbox.counters["folds"]


@pytest.mark.parametrize(("staleness", "folds"), [(2, 5), (4, 3)])
def test_a_bound_on_the_staleness_folds_as_often_as_it_takes(staleness: int, folds: int) -> None:
    """After the steps 1, 3, 5, 7, 9; or 1, 5, 9."""
    assert ranks(3, bounded, staleness=staleness) == [folds] * 3


def beside_a_silent_peer(rank: int) -> tuple[float, list[int]]:
    """Seconds that ten steps take while nobody hears of rank 1; the deadline is 20."""
    with attach("adpsgd:max_staleness=1") as run:
        courier = run._engine._mailbox._courier
        if rank == 1:
            courier._lose = lambda header: True
        dist.barrier()
        begun = time.monotonic()
        train(run, rank, steps=0 if rank == 1 else 10)
        seconds = time.monotonic() - begun
        dist.barrier()
        courier._lose = None
    return seconds, run.stats["lost"]


def test_a_bound_on_the_staleness_does_not_wait_for_a_peer_that_is_silent() -> None:
    for seconds, lost in ranks(3, beside_a_silent_peer):
        assert seconds < 10
        assert lost == []


def in_the_shadow(rank: int):
    """What a partner meets when an exchange begins although folds are put off."""
    with attach("adpsgd:rate=0.5") as run:
        box = run._engine._mailbox
        box._fold_share = 1e-9
        train(run, rank, steps=1)  # its fold is the first, which is not put off
        met = []
        begin = box.exchange
        box.exchange = lambda *peer: (
            met.append((box._shadow.published, box._shadow.steps)),
            begin(*peer),
        )[1]
        train(run, rank, steps=25)
        folds = box.counters["folds"]
    return met, folds


def test_an_exchange_publishes_the_parameters_of_its_step_and_other_steps_need_not():
    for met, folds in ranks(3, in_the_shadow):
        assert len(met) >= 1
        assert all(published == step for published, step in met)
        assert folds <= 1 + len(met)


def twice(rank: int):
    return [sealed(rank)[0] for _ in range(2)]


def test_every_run_has_a_name_of_its_own():
    first, *others = ranks(3, twice)
    assert first[0] != first[1]
    assert all(other == first for other in others)
    assert len(first[0].split("/")[1]) == 16  # not only a count: two jobs count alike


def logged(rank: int):
    with attach() as run:
        train(run, rank)
        before = run.stats
    kinds = [event for event in run.trace.events if event.kind in ("sent", "distance")]
    return kinds, before, run.stats


def test_bytes_and_consensus_distance_are_in_the_log():
    for events, before, after in ranks(3, logged):
        # the first: the first model
        gossiped = [event.fields["bytes"] for event in events if event.kind == "sent"][1:]
        assert sum(gossiped) >= after["bytes_sent"] > 0
        assert [event.fields["value"] for event in events if event.kind == "distance"][-1] > 0
        assert before["exchanges_per_second"] > 0
        assert len(events) < 20


def evaluate_gathered(rank: int):
    """A consensus right after a forward without a backward, for which `fully_shard` keeps what
    it gathered.
    """
    from torch.distributed.fsdp import fully_shard

    topology = Topology([[0], [1], [2]])
    x = torch.ones(2, 4)
    torch.manual_seed(0)
    model = fully_shard(
        nn.Linear(4, 3), mesh=loosestep.node_mesh(topology=topology), reshard_after_forward=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        loosestep.attach(
            model, optimizer, "adpsgd:rate=0.01", topology=topology, deadline=20
        ) as run,
        torch.no_grad(),
    ):
        with torch.enable_grad():
            train(run, rank**2, steps=3)
        before = model(x)
        with run.consensus():
            inside = model(x)
        after = model(x)
    return before, inside, after, model(x).detach()


def test_sharded_models_of_one_rank_are_evaluated_with_the_mean_and_trained_without():
    results = ranks(3, evaluate_gathered)
    for before, inside, after, end in results:
        assert torch.equal(after, before)
        assert not torch.allclose(inside, before, atol=0.01)
        assert not torch.allclose(end, before, atol=0.01)
        assert torch.equal(end, results[0][3])
