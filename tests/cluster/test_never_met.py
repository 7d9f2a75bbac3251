"""Ranks that end before the others have met them: nobody waits for long, and who it was is said."""

import sys
import time

import pytest

from loosestep import launch

pytestmark = pytest.mark.usefixtures("warm_ranks")

SCRIPT = """
import os, sys, threading, time
import torch, loosestep
if int(os.environ["RANK"]) == 2:
    {before}
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begun = time.monotonic()
try:
    loosestep.attach(model, optimizer, "{strategy}", deadline=4)
except (RuntimeError, OSError) as error:
    threads = [t.name for t in threading.enumerate() if t.name.startswith("loosestep")]
    print(f"{{time.monotonic() - begun:.1f}} s: {{error}} {{threads}}", flush=True)
"""


def waited(tmp_path, before: str, strategy: str, *, alone: bool = False) -> list[str]:
    """What the other ranks say, who met rank 2 never."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=before, strategy=strategy))
    # Without our launcher's name in it, as another launcher would start them.
    env = {"TORCHELASTIC_RUN_ID": "some other"} if alone else {}
    with launch.start([sys.executable, str(script)], nodes=2, ranks_per_node=2, env=env) as job:
        job.wait(timeout=30)
        return [rank.output[-1] for rank in job.ranks if rank.number != 2]


@pytest.mark.parametrize("strategy", ["daso", "adpsgd"])
def test_the_launcher_tells_at_once(tmp_path, strategy):
    begun = time.monotonic()
    for said in waited(tmp_path, "raise ValueError('no data here')", strategy):
        assert "rank 2 ended (exit code 1) before all ranks had called loosestep.attach" in said
        assert said.endswith("[]")
    assert time.monotonic() - begun < 20


def test_without_our_launcher_the_deadline_holds(tmp_path):
    for said in waited(tmp_path, "os._exit(0)", "daso", alone=True):
        assert "rank(s) 2 did not call loosestep.attach within 4 s" in said


def test_a_note_that_is_not_the_launchers_is_not_believed():
    import torch.distributed as dist

    from loosestep.core.store import ENDED, tell_ended, who_ended

    store = dist.HashStore()
    tell_ended(store, 2, "exit code 1", key="a" * 32, run="this")
    assert who_ended(store, key="a" * 32, run="this") == (2, "exit code 1")
    assert who_ended(store, key="b" * 32, run="this") is None
    assert who_ended(store, key="a" * 32, run="that") is None
    for garbage in ("x", "[]", "{}", '{"rank": 1, "how": "", "proof": 3}'):
        store.set(ENDED, garbage)
        assert who_ended(store, key="a" * 32, run="this") is None
