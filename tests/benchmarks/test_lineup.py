"""The line-up: every row has a file, installed or not."""

import importlib.util
from pathlib import Path

import pytest

import peers

FOLDER = Path(peers.__file__).parent


@pytest.mark.parametrize("peer", peers.LINEUP, ids=lambda peer: peer.name)
def test_every_row_has_a_file_that_prepares(peer: peers.Peer) -> None:
    text = (FOLDER / f"{peer.file}.py").read_text()
    assert "\ndef prepare(" in text


def test_names_are_different() -> None:
    names = [peer.name for peer in peers.LINEUP]
    assert len(names) == len(set(names))


def test_a_peer_that_is_not_installed_gives_its_reason() -> None:
    absent = peers.Peer("nobody", "nothing", needs="a-distribution-that-does-not-exist")
    assert "a-distribution-that-does-not-exist is not installed" in (absent.missing() or "")


def test_no_communication_is_always_measured() -> None:
    assert peers.choose(["torch DDP"])[0].name == peers.FREE


def test_the_quick_line_up_leaves_the_slow_starters_out() -> None:
    assert {peer.name for peer in peers.choose(full=True)} > {
        peer.name for peer in peers.choose(full=False)
    }


def test_every_installed_peer_says_that_it_is_there() -> None:
    for peer in peers.LINEUP:
        if peer.needs == "accelerate" and importlib.util.find_spec("accelerate") is None:
            assert peer.missing() is not None
