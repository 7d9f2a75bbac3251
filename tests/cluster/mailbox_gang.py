"""Starts the ranks of a gossip test as real processes and ends every one of them."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch.distributed import TCPStore

WORKER = Path(__file__).with_name("mailbox_worker.py")


class Gang:
    def __init__(self, scenario, n, folder, **options):
        self.n, self.folder = n, folder
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, WORKER, scenario, str(rank), str(n), str(self.store.port), folder, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(n)
        ]

    def go(self):
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()

    def kill_store(self):
        """The rendezvous goes away after start-up."""
        self.store = None

    def signal(self, rank, number):
        self.processes[rank].send_signal(number)

    def stop(self):
        (self.folder / "stop").touch()

    def join(self, ranks=None, timeout=60):
        """Reports of the ranks that were expected to end well."""
        ranks = range(self.n) if ranks is None else ranks
        for rank in ranks:
            assert self.processes[rank].wait(timeout) == 0, f"rank {rank} failed"
        return {rank: json.loads((self.folder / f"{rank}.json").read_text()) for rank in ranks}

    def params(self, rank, name="params"):
        with np.load(self.folder / f"{rank}.npz") as saved:
            return saved[name]

    def shadow(self, rank):
        """base + delta of a rank that was killed and never folded."""
        parts = [np.memmap(self.folder / f"{rank}.part{k}", dtype=np.float64, mode="r") for k in range(2)]
        return np.asarray(parts[0]) + np.asarray(parts[1])

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self.store = None


@contextmanager
def gang(scenario, n, folder, **options):
    made = Gang(scenario, n, folder, **options)
    try:
        made.go()
        yield made
    finally:
        made.close()


def said(report, kind):
    return [event for event in report["events"] if event["kind"] == kind]
