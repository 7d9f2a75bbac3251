"""Real processes for tests: a pool of ranks that stays up between tests.

results = ranks(4, work, topology=[[0, 1], [2, 3]])     # work(rank, **arguments) on every rank;
results in rank order
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forks import processes, start_server

PATIENCE = 100.0


class Pool:
    """`world` processes with torch.distributed initialised, waiting for functions to run."""

    def __init__(self, world: int) -> None:
        from torch.distributed import TCPStore

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        start_server()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = processes.Pipe()
            process = processes.Process(
                target=_serve, args=(rank, world, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
        path = Path(sys.modules[function.__module__].__file__ or "")
        for pipe in self.pipes:
            pipe.send((str(path), function.__qualname__, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"rank {rank} did not answer within {PATIENCE:g} s")
            results.append(pipe.recv())
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


_pools: dict[int, Pool] = {}


def ranks(world: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Run `function(rank, **arguments)` on `world` ranks; raise what the first failing rank
    raised.
    """
    results = attempt(world, function, **arguments)
    for rank, (ok, value) in enumerate(results):
        if not ok:
            drop(world)
            raise AssertionError(f"rank {rank} failed:\n{value}")
    return [value for _, value in results]


def errors(world: int, function: Callable[..., Any], **arguments: Any) -> list[str]:
    """Run something that fails on every rank; the last lines of what each raised."""
    results = attempt(world, function, **arguments)
    assert all(not ok for ok, _ in results), f"expected an error on every rank, got {results}"
    return [value.strip().splitlines()[-1] for _, value in results]


def attempt(world: int, function: Callable[..., Any], **arguments: Any) -> list[tuple[bool, Any]]:
    if world not in _pools:
        _pools[world] = Pool(world)
    try:
        return _pools[world].run(function, arguments)
    except (TimeoutError, EOFError, OSError):
        drop(world)
        raise


def drop(world: int) -> None:
    """End a pool whose ranks are no longer in step; the next test starts another."""
    pool = _pools.pop(world, None)
    if pool is not None:
        pool.close()


@atexit.register
def close_all() -> None:
    for world in list(_pools):
        drop(world)


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    modules: dict[str, Any] = {}
    while True:
        try:
            path, name, arguments = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if path not in modules:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                assert spec is not None
                assert spec.loader is not None
                sys.path.insert(0, str(Path(path).parent))
                modules[path] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[path])
            torch.manual_seed(rank)
            pipe.send((True, getattr(modules[path], name)(rank, **arguments)))
        except BaseException:  # noqa: BLE001  the test that asked gets to see it
            pipe.send((False, traceback.format_exc()))
