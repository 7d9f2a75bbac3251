"""What the sections say of peers that are not in their tables."""

import pytest

import peers
from harness.script import absent

HEAT = next(peer for peer in peers.LINEUP if peer.launcher == "mpirun")


@pytest.mark.parametrize(
    ("network", "reason"), [(True, "left out for time"), (False, "mpirun needs nodes with a network, here all share")]
)
def test_a_peer_under_mpirun_is_left_out_for_the_reason_that_holds(
    network: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.Peer, "missing", lambda self: None)
    assert f"{HEAT.name} ({reason}" in absent([], network=network)


def test_a_peer_that_is_not_installed_is_left_out_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.Peer, "missing", lambda self: "not installed" if self.needs else None)
    assert f"{HEAT.name} (not installed)" in absent([], network=False)
