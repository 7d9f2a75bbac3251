"""Starts the ranks of a gossip test as real processes and ends every one of them."""

import json
import os
from contextlib import contextmanager

import mailbox_worker
import numpy as np
from forks import processes, start_server
from torch.distributed import TCPStore


class Gang:
    def __init__(self, scenario, n, folder, **options):
        self.n = n
        self.folder = folder
        start_server()
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        meeting = str(folder / "store") if "namespaces" in options else self.store.port
        pipes = [processes.Pipe() for _ in range(n)]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = [
            processes.Process(
                target=mailbox_worker.work,
                args=(scenario, rank, n, meeting, folder, options, pipes[rank][1]),
            )
            for rank in range(n)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def go(self):
        for pipe in self.pipes:
            assert pipe.poll(60)
            assert pipe.recv() == "ready"
        for pipe in self.pipes:
            pipe.send("go")

    def kill_store(self):
        """The rendezvous goes away after start-up."""
        self.store = None

    def signal(self, rank, number):
        os.kill(self.processes[rank].pid, number)

    def stop(self):
        (self.folder / "stop").touch()

    def exit_code(self, rank, timeout=60):
        self.processes[rank].join(timeout)
        return self.processes[rank].exitcode

    def join(self, ranks=None):
        """Reports of the ranks that were expected to end well."""
        ranks = range(self.n) if ranks is None else ranks
        for rank in ranks:
            assert self.exit_code(rank) == 0, f"rank {rank} failed"
        return {rank: json.loads((self.folder / f"{rank}.json").read_text()) for rank in ranks}

    def params(self, rank, name="params"):
        with np.load(self.folder / f"{rank}.npz") as saved:
            return saved[name]

    def close(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
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
