"""The contract of a mailbox: the same facts hold for the real, the virtual and the replayed one."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from loosestep import Topology, simulate
from loosestep.core.gossip.contract import GossipMailbox
from loosestep.core.gossip.mailbox import Mailbox
from loosestep.core.gossip.peer import Timing
from loosestep.core.gossip.replayed_mailbox import ReplayedMailbox
from loosestep.core.world import open_world
from loosestep.record.format import Recording
from loosestep.record.player import Player
from loosestep.record.recorder import NoTape, Recorder, Tape, digest_of, make_header
from loosestep.record.values import StoreValues
from loosestep.topology.graphs import GossipGraph

SIZE = 300
SOON = timedelta(seconds=20)


@dataclass
class Peer:
    """One rank of a scenario."""

    rank: int
    world: int
    box: GossipMailbox
    params: list[torch.Tensor]
    store: Any
    die: Callable[[], None]
    tape: Tape = field(default_factory=NoTape)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def meet(self, name: str) -> None:
        """Wait until every rank has come here."""
        self.store.set(f"{name}/{self.rank}", "1")
        self.store.wait([f"{name}/{rank}" for rank in range(self.world)], SOON)

    def step(self, mode: str = "due", learned: float = 0.0) -> Any:
        self.params[0] += learned
        self.tape.step()
        self.box.step()
        fold = self.box.cross(self.params, mode)
        self.tape.stepped(0, lambda: digest_of(self.params))
        return fold

    def averages(self, peer: int, weight: float = 0.5) -> str:
        """Exchange with a peer and wait for the end of it."""
        pending = self.box.exchange(peer, weight)
        assert pending.wait(20)
        return pending.outcome

    @property
    def x(self) -> np.ndarray:
        return self.params[0].numpy().copy()


Scenario = Callable[[Peer], Any]


def start(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def on_threads(opens: Callable[..., Peer], scenario: Scenario, world: int) -> list[Any]:
    store = HashStore()

    def live(rank: int) -> Any:
        peer = opens(rank, store)
        try:
            peer.meet("attached")
            return scenario(peer)
        finally:
            peer.box.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(live, range(world)))


def real(
    scenario: Scenario, world: int, gradients: dict[int, int] | None, folder: Path | None = None
) -> list[Any]:
    def opens(rank: int, store: HashStore) -> Peer:
        params = [start(rank)]
        events = []
        header = {"rank": rank, "nodes": [[r] for r in range(world)], "strategy": "", "layout": []}
        tape = NoTape() if folder is None else Recorder(folder, rank, make_header(**header))
        box = Mailbox(
            store,
            rank,
            world=range(world),
            params=params,
            layout=b"layout",
            timing=Timing(beat=0.05, suspend=0.3, retry=0.1, deadline=3.0),
            emit=lambda kind, **fields: events.append((kind, fields)),
            tape=tape.writer,
            gradients=gradients,
        )

        def die() -> None:
            def kill(header: Any) -> bool:
                raise RuntimeError("killed here")

            box._courier._lose = kill
            box._thread.join(10)

        return Peer(rank, world, box, params, store, die, tape, events)

    return on_threads(opens, scenario, world)


def virtual(scenario: Scenario, world: int, gradients: dict[int, int] | None) -> list[Any]:
    def live(rank: int) -> Any:
        params = [start(rank)]
        events = []
        around: Any = open_world(None, deadline=20)
        box = around.mailbox(
            range(world),
            params=params,
            gradients=gradients,
            emit=lambda kind, **fields: events.append((kind, fields)),
        )

        def die() -> None:
            box._network.lose(rank)

        try:
            peer = Peer(rank, world, box, params, around.store, die, events=events)
            peer.meet("attached")
            return scenario(peer)
        finally:
            box.close()

    return simulate(live, ranks=world, topology=Topology([[r] for r in range(world)])).results


class Threads:
    """What a replay needs of its world."""

    def __init__(self, rank: int, store: HashStore) -> None:
        self.rank = rank
        self._store = store

    def values(self) -> StoreValues:
        return StoreValues(lambda: self._store, self.rank)

    condition = staticmethod(threading.Condition)

    def spawn(self, function: Callable[[], None], name: str) -> Callable[[], None]:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread.join


def replayed(scenario: Scenario, world: int, gradients: dict[int, int] | None) -> list[Any]:
    """Record it on real mailboxes, then repeat it; every parameter is the same, bit for bit."""

    def opens(rank: int, store: HashStore) -> Peer:
        params = [start(rank)]
        player = Player(Recording.read(folder, rank), Threads(rank, store))
        box = ReplayedMailbox(player, range(world), params=params, gradients=gradients)
        return Peer(rank, world, box, params, store, lambda: None, player)

    with TemporaryDirectory() as name:
        folder = Path(name) / "recording"
        ends: list[tuple[int, np.ndarray]] = []

        def noting(peer: Peer) -> Any:
            result = scenario(peer)
            ends.append((peer.rank, peer.x))
            return result

        real(noting, world, gradients, folder)
        recorded = dict(ends)
        ends = []
        results = on_threads(opens, noting, world)
        for rank, end in ends:
            np.testing.assert_array_equal(end, recorded[rank])
    return results


@pytest.fixture(params=[real, virtual, replayed], ids=["real", "virtual", "replayed"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    def go(scenario: Scenario, world: int, gradients: dict[int, int] | None = None) -> list[Any]:
        return request.param(scenario, world, gradients)

    return go


def starts(world: int) -> np.ndarray:
    return np.stack([start(rank).numpy() for rank in range(world)])


def wander(peer: Peer) -> np.ndarray:
    """Steps and exchanges without order; what is learned adds up to 40 steps of 1/8."""
    choose = random.Random(peer.rank)
    for _ in range(40):
        peer.box.exchange((peer.rank + choose.randrange(1, peer.world)) % peer.world)
        peer.step(learned=0.125)
    peer.box.finish(peer.params, 30)
    return peer.x


def test_the_mean_is_kept_and_the_end_is_the_same_everywhere(run: Any) -> None:
    ends = run(wander, 3)
    for end in ends:
        np.testing.assert_array_equal(end, ends[0])
        np.testing.assert_allclose(end, starts(3).mean(0) + 5.0, rtol=0, atol=1e-12)


def test_the_mean_that_is_kept_weighs_a_learner_by_its_gradients(run: Any) -> None:
    ends = run(wander, 3, {0: 3, 1: 1, 2: 2})
    mean = np.average(starts(3), axis=0, weights=[3, 1, 2]) + 5.0
    for end in ends:
        np.testing.assert_allclose(end, mean, rtol=0, atol=1e-12)


def land(peer: Peer) -> tuple[np.ndarray, Any]:
    if peer.rank == 0:
        assert peer.averages(1, 1 / 4) == "exchanged"
    peer.meet("exchanged")
    fold = peer.step("whole")
    x = peer.x
    peer.box.finish(peer.params, 20)
    return x, fold


@pytest.mark.parametrize("heavy", [1, 3])
def test_a_boundary_lands_everything(run: Any, heavy: int) -> None:
    (a, first), (b, second) = run(land, 2, {0: heavy, 1: 1})
    old = starts(2)
    np.testing.assert_allclose(a, old[0] + (old[1] - old[0]) / 4 / heavy)
    np.testing.assert_allclose(b, old[1] + (old[0] - old[1]) / 4)
    for fold in (first, second):
        assert not fold.skipped
        assert fold.chunks == 1
        assert fold.staleness_max == 1


def lift(peer: Peer) -> tuple[np.ndarray, int]:
    """A copy crosses in the parameters' place, which learn on meanwhile."""
    if peer.rank == 0:
        assert peer.averages(1) == "exchanged"
    peer.meet("exchanged")
    peer.box.step()
    copy = [peer.params[0].clone()]
    peer.params[0] += 1.0
    peer.box.cross(copy, "lift", step=1)
    peer.params[0] += copy[0]
    x = peer.x
    peer.box.finish(peer.params, 20)
    return x


@pytest.mark.parametrize("kind", [real, virtual], ids=["real", "virtual"])
def test_a_copy_that_crosses_becomes_what_the_parameters_lack(kind: Any) -> None:
    for x in kind(lift, 2, None):
        np.testing.assert_allclose(x, starts(2).mean(0) + 1.0)


def leave_early(peer: Peer) -> tuple[np.ndarray, list[str]]:
    outcomes = []
    if peer.rank != 1:
        for _ in range(5):
            outcomes.append(peer.averages(1))
            peer.step(learned=0.5)
    peer.box.finish(peer.params, 30)
    return peer.x, outcomes


def test_a_peer_that_has_finished_still_answers(run: Any) -> None:
    results = run(leave_early, 3)
    mean = (starts(3).sum(0) + 5.0) / 3
    for end, outcomes in results:
        assert set(outcomes) <= {"exchanged"}
        np.testing.assert_allclose(end, mean, rtol=0, atol=1e-12)


def look(peer: Peer) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Rank 0 alone asks for the consensus."""
    before = peer.x
    mean = None
    if peer.rank == 0:
        mean = peer.box.consensus(20)
    after = peer.x
    peer.meet("looked")
    peer.box.finish(peer.params, 20)
    return mean, before, after


def test_a_consensus_is_the_mean_and_touches_nothing(run: Any) -> None:
    results = run(look, 3, {0: 1, 1: 2, 2: 1})
    mean = np.average(starts(3), axis=0, weights=[1, 2, 1])
    np.testing.assert_allclose(results[0][0], mean, rtol=0, atol=1e-12)
    for _, before, after in results:
        np.testing.assert_array_equal(before, after)


def in_lockstep(peer: Peer) -> list[np.ndarray]:
    seen = []
    ring = GossipGraph("ring", range(peer.world), seed=0)
    for number in range(4):
        peer.step("whole", learned=peer.rank)
        peer.box.lockstep_round(number, ring.round(peer.rank, number, set(range(peer.world))))
        peer.box.cross(peer.params, "whole")
        seen.append(peer.x)
    peer.meet("made")
    peer.box.finish(peer.params, 20)
    return seen


def test_a_round_in_lockstep_is_exactly_the_mixing_matrix(run: Any) -> None:
    x = starts(4)
    ring = GossipGraph("ring", range(4), seed=0)
    seen = run(in_lockstep, 4)
    for number in range(4):
        x = np.asarray(ring.matrix(number)) @ (x + np.arange(4)[:, None])
        for rank in range(4):
            np.testing.assert_allclose(seen[rank][number], x[rank], rtol=0, atol=1e-12)


def lose_one(peer: Peer) -> tuple[np.ndarray, set[int], set[int], str] | None:
    """Rank 2 dies before anything was exchanged with it."""
    if peer.rank == 2:
        peer.die()
        return None
    for _ in range(2000):
        if 2 not in peer.box.alive():
            break
        peer.store.set(f"look/{peer.rank}", "1")
        try:
            peer.store.wait(["never"], timedelta(milliseconds=20))
        except RuntimeError:
            continue
    outcome = peer.averages(2)
    if peer.rank == 0:
        assert peer.averages(1) == "exchanged"
    peer.step("whole", learned=1.0)
    peer.box.finish(peer.params, 30)
    return peer.x, peer.box.alive(), peer.box.lost(), outcome


@pytest.mark.parametrize("kind", [real, virtual], ids=["real", "virtual"])
def test_a_dead_peer_costs_its_own_edges_only(kind: Any) -> None:
    first, second, _ = kind(lose_one, 3, None)
    for end, alive, lost, outcome in (first, second):
        np.testing.assert_allclose(end, starts(2).mean(0) + 1.0, rtol=0, atol=1e-12)
        assert 2 not in alive
        assert lost == {2}
        assert outcome == "skipped"


def count(peer: Peer) -> tuple[list[int], dict[str, Any]]:
    for _ in range(3):
        peer.step()
        peer.averages((peer.rank + 1) % peer.world)
    peer.meet("counted")
    steps = peer.box.steps
    peer.box.finish(peer.params, 20)
    assert peer.box.cpu_seconds() >= 0
    assert peer.box.consensus_distance >= 0
    return steps, peer.box.counters


def test_what_is_counted_goes_by_the_same_names(run: Any) -> None:
    names = {
        "exchanges",
        "bytes_sent",
        "chunks",
        "folds",
        "fold_seconds",
        "fold_cpu_seconds",
        "rejected",
    }
    for steps, counters in run(count, 2):
        assert steps == 3
        assert names <= counters.keys()
        assert counters["chunks"] > 0
