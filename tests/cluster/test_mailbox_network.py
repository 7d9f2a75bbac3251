"""Mailboxes on emulated machines: a link that goes one way; nothing without a key. More in
test_gossip_faults.py.
"""

import time

import numpy as np
import pytest
import torch
from mailbox_gang import gang, said
from mailbox_worker import start_vector
from torch.distributed import HashStore

from loosestep.core.gossip.mailbox import Mailbox
from loosestep.lab import leftovers
from loosestep.lab.network import Network

SIZE = 100_000
KEY = "0123456789abcdef" * 2


@pytest.fixture
def network():
    try:
        made = Network(3, rate=None, pairs={}, wired=False, mark=leftovers.new_mark())
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


def run_on(network, folder, **options):
    places = {
        "namespaces": [network.namespace(node) for node in range(3)],
        "master": network.address(0),
        "key": KEY,
    }
    return gang("free", 3, folder, **({"size": SIZE, "step": 0.01} | places | options))


def check_the_mean(run, reports):
    assert not any(said(report, "peer_dead") for report in reports.values())
    mean = sum(start_vector(rank, SIZE, "float64").numpy() for rank in range(3)) / 3
    for rank in range(3):
        np.testing.assert_array_equal(run.params(rank), run.params(0))
    np.testing.assert_allclose(run.params(0), mean, atol=1e-12)


def test_a_link_that_goes_one_way_is_given_up_by_both_ends(network, tmp_path):
    with run_on(network, tmp_path) as run:
        time.sleep(1.0)
        cut = time.monotonic()
        network.drop(0, 1)
        time.sleep(3.0)
        network.restore(0, 1)
        time.sleep(4.0)
        run.stop()
        reports = run.join()
        check_the_mean(run, reports)
    noticed = [said(reports[rank], "peer_suspended")[0]["at"] - cut for rank in (0, 1)]
    print("given up after", noticed)
    assert max(noticed) < 3.0


def test_without_a_key_nothing_starts_off_loopback(network, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", network.address(1))
    monkeypatch.delenv("LOOSESTEP_KEY", raising=False)
    with pytest.raises(
        ValueError, match=r"10.83.0.1 is not a loopback address, so gossip needs a run key"
    ):
        network.inside(
            0, lambda: Mailbox(HashStore(), 0, world=[0], params=[torch.zeros(3)], layout=b"")
        )
