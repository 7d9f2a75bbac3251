"""Real signals and mailboxes alone; what killed and briefly stopped ranks cost is in
test_gossip_faults.py.
"""

import signal
import time

import numpy as np
from mailbox_gang import gang, said

STEP = {"size": 20_000, "step": 0.005}


def steps_of(seconds):
    """Let the run go on for a while: there is nothing to wait for but time."""
    time.sleep(seconds)


def test_a_rank_stopped_past_the_deadline_is_evicted_and_told(tmp_path):
    with gang("free", 3, tmp_path, **STEP, deadline=2.0) as run:
        steps_of(0.7)
        run.signal(1, signal.SIGSTOP)
        steps_of(4.0)
        run.signal(1, signal.SIGCONT)
        steps_of(0.5)
        run.stop()
        reports = run.join([0, 2])
        np.testing.assert_array_equal(run.params(0), run.params(2))
        assert run.exit_code(1) == 1  # it says that it is not part of the result
    assert all("evicted" in said(report, "peer_dead")[0]["why"] for report in reports.values())


def test_a_rank_that_wakes_when_the_others_have_ended_learns_that_it_was_evicted(tmp_path):
    with gang("free", 3, tmp_path, **STEP, deadline=2.0) as run:
        steps_of(0.7)
        run.signal(1, signal.SIGSTOP)
        run.stop()
        run.join([0, 2])
        run.signal(1, signal.SIGCONT)
        assert run.exit_code(1) == 1
