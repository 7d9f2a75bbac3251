"""Real processes: the mean over the ranks stays, and disagreement shrinks as the theory says."""

import signal

import ledger
import numpy as np
import pytest
from mailbox_gang import gang, said
from mailbox_worker import start_vector

SIZE = 140_000  # float64: two chunks
CHUNK = (1 << 20) // 8


def starts(n, size=SIZE):
    return np.stack([start_vector(rank, size, "float64").numpy() for rank in range(n)])


QUICK = {"beat": 0.1, "suspend": 1.0, "retry": 0.1}


def test_mean_is_untouched_by_1000_exchanges_200_drops_late_messages_and_one_kill(tmp_path):
    """The mean over the survivors and the dead rank's last snapshot, once what only one side of an
    edge has applied is taken out: and that is in the log, pair by pair. The kill comes right before
    an answer leaves.
    """
    victim = 3
    survivors = [0, 1, 2, 4, 5, 6, 7]
    options = {
        "size": SIZE,
        "exchanges": 145,
        "drops": 29,
        "late": 15,
        "timing": QUICK,
        "victim": victim,
        "kill_at": 20,
    }
    with gang("free", 8, tmp_path, **options) as run:
        run.kill_store()  # nothing needs it after start-up
        reports = run.join(survivors)
        assert run.exit_code(victim) == -signal.SIGKILL
        for rank in survivors:
            np.testing.assert_array_equal(run.params(rank), run.params(0))
        total = starts(8).sum(axis=0)
        drift = 7 * run.params(0) + ledger.last_snapshot(tmp_path, victim) - total
    halves = 0
    for rank in survivors:
        (event,) = said(reports[rank], "peer_dead")
        assert event["peer"] == victim
        logged = {(chunk, q) for chunk, q in event["unanswered"] + event["unconfirmed"]}
        for (chunk, q), moved in ledger.one_sided(tmp_path, victim, rank).items():
            assert (chunk, q) in logged
            drift[chunk * CHUNK : (chunk + 1) * CHUNK] -= moved
            halves += 1
    print(
        "pairs that one side alone has applied",
        halves,
        "the rest of the drift",
        np.abs(drift).max(),
    )
    assert halves > 0  # the kill did hit an exchange
    assert np.abs(drift).max() < 1e-12 * np.abs(total).max()
    assert sum(report["counters"]["exchanges"] for report in reports.values()) >= 1000
    assert sum(report["counters"]["lost"] for report in reports.values()) >= 200
    assert sum(report["late"] for report in reports.values()) >= 100


def squared_distance(states):
    return ((states - states.mean(axis=0)) ** 2).sum(axis=(0, 2))


def test_the_fixed_ring_contracts_by_the_eigenvalue(tmp_path):
    with gang("lockstep", 8, tmp_path, size=2000, topology="ring", rounds=20) as run:
        run.join()
        states = np.stack([run.params(rank, "states") for rank in range(8)])
    distance = squared_distance(states)
    factor = (distance[19] / distance[9]) ** (1 / 10)
    print("fixed ring", factor)
    assert factor == pytest.approx(0.648, rel=0.05)
    np.testing.assert_allclose(states.mean(axis=0)[-1], starts(8, 2000).mean(axis=0), atol=1e-13)


def test_the_randomized_ring_contracts_by_the_eigenvalue(tmp_path):
    with gang(
        "lockstep", 8, tmp_path, size=2000, topology="random-ring", rounds=100, fresh=True
    ) as run:
        run.join()
        states = np.stack([run.params(rank, "states") for rank in range(8)])
    distance = squared_distance(states)
    factor = np.mean(distance[1::2] / distance[0::2])
    print("randomized ring", factor)
    assert factor == pytest.approx(0.238, rel=0.05)


def test_free_running_exchanges_reach_consensus(tmp_path):
    with gang("free", 8, tmp_path, size=2000, exchanges=60) as run:
        run.join()
        shadows = np.stack([run.params(rank, "shadow") for rank in range(8)])
    shrunk = squared_distance(shadows[:, None])[0] / squared_distance(starts(8, 2000)[:, None])[0]
    print("squared distance shrunk to", shrunk)
    assert shrunk < 1e-6


def test_an_idle_mailbox_uses_no_cpu_to_speak_of(tmp_path):
    with gang("idle", 4, tmp_path, size=1000, seconds=3.0) as run:
        shares = [report["idle_share"] for report in run.join().values()]
    print("idle share of a core", max(shares))
    assert max(shares) < 0.03


def test_at_most_four_extra_copies_of_the_parameters_and_a_fifth_for_a_consensus_and_the_end(
    tmp_path,
):
    size = 48 << 18  # 48 MB of float32
    with gang("memory", 3, tmp_path, size=size, dtype="float32", exchanges=8) as run:
        reports = run.join().values()
    for report in reports:
        training, in_all = (report[what] / (4 * size) for what in ("training", "in all"))
        print("extra copies", training, "in all", in_all)
        assert training <= 4
        assert in_all <= 5
