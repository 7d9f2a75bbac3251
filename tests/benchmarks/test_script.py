"""What the sections say of peers that are not in their tables, and when a benchmark ends."""

import time

import pytest

import peers
from harness import script
from harness.script import absent, progress_in_time

HEAT = next(peer for peer in peers.LINEUP if peer.launcher == "mpirun")


@pytest.mark.parametrize(
    ("network", "reason"),
    [(True, "left out for time"), (False, "mpirun needs nodes with a network, here all share")],
)
def test_a_peer_under_mpirun_is_left_out_for_the_reason_that_holds(
    network: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.Peer, "missing", lambda self: None)
    assert f"{HEAT.name} ({reason}" in absent([], network=network, rare=False)


def test_a_peer_that_is_not_installed_is_left_out_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.Peer, "missing", lambda self: "not installed" if self.needs else None)
    assert f"{HEAT.name} (not installed)" in absent([], network=False, rare=False)


@pytest.mark.parametrize(
    ("rare", "reason"),
    [(False, "exchanges too rarely to be timed here"), (True, "left out for time")],
)
def test_a_peer_that_exchanges_rarely_is_left_out_for_that_only_where_none_such_is_measured(
    rare: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.Peer, "missing", lambda self: None)
    assert f"torchft DiLoCo, period 64 ({reason})" in absent([], network=True, rare=rare)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (25.0, 2), (30.0, 3), (1000.0, 4)])
def test_no_round_is_begun_that_would_end_too_late(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    plan = [(number, name) for number in range(4) for name in "ab"]
    made = []
    for item in progress_in_time(plan, str, lambda item: item[0], seconds):
        made.append(item)
        clock[0] += 5.0
    assert made == plan[: 2 * rounds]


@pytest.mark.parametrize(("cores", "name"), [(2, "kill.jsonl"), (16, "kill-16-cores.jsonl")])
def test_figures_of_a_machine_of_another_size_are_kept_apart(
    cores: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "machine", lambda: f"A processor, {cores} cores, 24 GiB")
    assert script.raw("kill").name == name
