"""The emulated cluster that all peers are measured on: ranks started once, blocks run one after the
other.

with Cluster(2, 2) as cluster:
    outcome = cluster.run(Block("torch DDP", {"kind": "layers", "megabytes": 4, "seconds": 0.1}), bandwidth="500mbit")
    outcome.speed, outcome.paces, outcome.bytes_per_gradient
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import figures
from harness.rank import MARK
from loosestep.lab import Lab
from loosestep.launch import Job, Rank
from peers import FREE, find

BENCHMARKS = Path(__file__).resolve().parents[1]
PROJECT = BENCHMARKS.parent
QUIET = 0.02
"""The share of the processors that others may take from this machine (a virtual one) during a
block.
"""


@dataclass(frozen=True)
class Block:
    """One peer at work for a moment. Times in seconds."""

    peer: str
    work: Mapping[str, Any]
    window: float = 1.0
    warmup: float = 0.5
    steps: int = 4
    """The window is longer if a rank has made fewer."""
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    snapshots: float = 0.0
    """Keep the model every so many seconds; 0: never."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the peer's `prepare`, beside those of the line-up."""
    whole: bool = False
    """The window holds whole periods of the peer's schedule, for what is counted and not timed."""
    deadline: float = 30.0
    """The window ends here at the latest, whatever the peer has done."""

    def order(self, folder: str) -> dict[str, Any]:
        """What the ranks need to know: warm-up lasts for one exchange at least, the window
        contains one whole period.
        """
        period = find(self.peer).period
        steps = {"warm_steps": period + 3, "least_steps": max(self.steps, 2 * period)}
        steps["multiple"] = period if self.whole else 1
        return {**dataclasses.asdict(self), **steps, "folder": folder}


@dataclass(frozen=True)
class Outcome:
    """What the ranks reported, by rank; a rank that was killed or crashed without a word is
    missing.
    """

    block: Block
    number: int
    reports: dict[int, dict[str, Any]]
    failures: dict[int, str]
    failed_at: dict[int, float]
    """Seconds after the start."""
    nodes: list[int]
    """The node of every rank."""
    kill_moment: float | None = None
    networked: bool = True
    stolen: float = 0.0
    """The share of the processors that others took from this machine meanwhile."""

    @property
    def failed(self) -> str | None:
        """The first failure, in words."""
        return next(iter(self.failures.values()), None)

    @property
    def paces(self) -> list[float]:
        """Steps per second of every rank; nan for all if one failed: what the others do without
        it is no speed of the peer.
        """
        if self.failures:
            return [math.nan] * len(self.nodes)
        period = find(self.block.peer).period
        return [
            figures.pace(report["moments"], report["begin"], report["end"], period=period)
            if report
            else 0.0
            for report in (self.reports.get(rank) for rank in range(len(self.nodes)))
        ]

    @property
    def speed(self) -> float:
        """Gradients per second over all ranks; nan if one failed."""
        return sum(self.paces)

    @property
    def gradients(self) -> int:
        """In the window, of all ranks."""
        return sum(report["steps"] for report in self.reports.values())

    @property
    def exchanges_per_step(self) -> float:
        """Models that a rank exchanged per step in the window, on average: what speed alone does
        not tell. nan where a rank failed.
        """
        if self.failures or not self.reports:
            return math.nan
        peer = find(self.block.peer)
        if peer.name == FREE:
            return 0.0
        counted = [report.get("exchanges") for report in self.reports.values()]
        if any(count is None for count in counted):
            return 1.0 / peer.period
        steps = [max(1, report["steps"]) for report in self.reports.values()]
        return sum(float(c) / s for c, s in zip(counted, steps, strict=True)) / len(steps)

    @property
    def bytes_sent(self) -> float:
        """What left all nodes in the window, by the counters of their cables; nan without a
        network.
        """
        # one rank of each node
        links = {self.nodes[rank]: report for rank, report in self.reports.items()}
        sent = sum(report["after"]["sent"] - report["before"]["sent"] for report in links.values())
        return sent if self.networked else float("nan")

    @property
    def bytes_per_gradient(self) -> float:
        """Of any rank."""
        return self.bytes_sent / self.gradients if self.gradients else float("nan")

    @property
    def cpu_per_gradient(self) -> float:
        """CPU seconds of all ranks' processes in the window, per gradient."""
        spent = sum(
            report["after"]["cpu"] - report["before"]["cpu"] for report in self.reports.values()
        )
        return spent / self.gradients if self.gradients else float("nan")

    @property
    def memory(self) -> float:
        """Bytes that a rank's process does not share with others; the mean over the ranks."""
        held = [report["memory"] for report in self.reports.values()]
        return sum(held) / len(held) if held else math.nan


class Cluster:
    """`nodes` x `ranks_per_node` processes that wait for blocks. Without `network` (no root) all
    share the loopback.

    `preload`: modules, separated by commas, that are imported before the first block. `tries`: a
    block during which others took more of this machine than is `QUIET` is run so often at most; the
    quietest counts.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        *,
        network: bool = True,
        preload: str = "",
        patience: float = 120.0,
        tries: int = 1,
    ) -> None:
        self.nodes = [node for node in range(nodes) for _ in range(ranks_per_node)]
        self._tries = tries
        self.networked = network
        self._said: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._number = 0
        self._mpi: Job | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="loosestep-bench-")
        self._rates: list[str | None] = [None] * nodes
        self.lab = Lab(nodes, ranks_per_node, network=network)
        try:
            for rank in range(len(self.nodes)):
                os.mkfifo(self._pipe(rank))
            self._start(preload, patience)
        except BaseException:
            self.close()
            raise

    def _start(self, preload: str, patience: float) -> None:
        paths = [str(BENCHMARKS), str(PROJECT / "src"), os.environ.get("PYTHONPATH", "")]
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "LOOSESTEP_PRELOAD": preload,
        }
        env["CUDA_VISIBLE_DEVICES"] = ""  # several peers take a GPU that they see for theirs
        command = [sys.executable, "-c", _FIND_PIPE, self._folder.name]
        self._env = env
        self._job = self.lab.start(command, env=env, output=self._hear)
        waiting = set(range(len(self.nodes)))
        until = time.monotonic() + patience
        while waiting:
            try:
                rank, said = self._said.get(timeout=max(0.1, min(1.0, until - time.monotonic())))
                if said.get("ready"):
                    waiting.discard(rank)
            except queue.Empty:
                gone = [rank.number for rank in self._job.ranks if rank.returncode is not None]
                if gone or time.monotonic() > until:
                    rank = gone[0] if gone else min(waiting)
                    last = "\n".join(self._job.ranks[rank].output[-20:])
                    raise RuntimeError(
                        f"rank {rank} is not ready; its last lines:\n{last}"
                    ) from None

    def run(
        self,
        block: Block,
        *,
        bandwidth: str | None = None,
        kill: tuple[int, float] | None = None,
    ) -> Outcome:
        """One block on all ranks; `kill=(rank, seconds)` ends a rank by SIGKILL so long after the
        start.

        The models that earlier blocks kept are removed.
        """
        for file in Path(self._folder.name).glob("*.safetensors"):
            file.unlink()
        outcomes: list[Outcome] = []
        while len(outcomes) < self._tries and not any(
            outcome.stolen <= QUIET for outcome in outcomes
        ):
            outcomes.append(self._run(block, bandwidth, kill))
        return min(outcomes, key=lambda outcome: outcome.stolen)

    def _run(self, block: Block, bandwidth: str | None, kill: tuple[int, float] | None) -> Outcome:
        if self.networked:
            self._limit(bandwidth)
        elif bandwidth is not None:
            raise ValueError("a bandwidth needs a cluster with a network (root)")
        self._number += 1
        number = self._number
        world = len(self.nodes)
        reports: dict[int, dict[str, Any]] = {}
        failures: dict[int, str] = {}
        failed_at: dict[int, float] = {}
        exited: set[int] = set()
        start: float | None = None
        kill_moment: float | None = None
        stolen = stolen_seconds()
        begun = time.monotonic()
        self._begin({"do": "begin", "number": number, "block": block.order(self._folder.name)})
        until = time.monotonic() + block.deadline + 60
        while len(reports.keys() | failures.keys() | exited) < world and time.monotonic() < until:
            wake = (
                until
                if kill is None or start is None or kill_moment is not None
                else start + kill[1]
            )
            try:
                rank, said = self._said.get(timeout=max(0.001, min(0.5, wake - time.monotonic())))
            except queue.Empty:
                rank = -1
                said = {}
            if (
                kill
                and start is not None
                and kill_moment is None
                and time.monotonic() >= start + kill[1]
            ):
                self._tell(kill[0], {"do": "kill"})
                kill_moment = time.monotonic() - start
            if said.get("block") != number:
                continue
            if "started" in said:
                start = said["started"]
            elif "failed" in said or "exited" in said:
                failed_at.setdefault(rank, time.monotonic() - (start or time.monotonic()))
                if "exited" in said:
                    exited.add(rank)
                if kill is None or rank != kill[0]:
                    failures.setdefault(
                        rank, said.get("failed") or f"ended with code {said['exited']}"
                    )
            else:
                reports[rank] = said
        for rank in range(world):
            if rank not in reports and rank not in failures and (kill is None or rank != kill[0]):
                failures[rank] = f"no report in {block.deadline + 60:g} s"
        stolen = (stolen_seconds() - stolen) / (time.monotonic() - begun) / (os.cpu_count() or 1)
        self._end(number, exited)
        return Outcome(
            block,
            number,
            reports,
            failures,
            failed_at,
            self.nodes,
            kill_moment,
            self.networked,
            stolen,
        )

    def snapshots(self, outcome: Outcome) -> list[Path]:
        """The files in which the ranks kept their models, in rank order."""
        folder = Path(self._folder.name)
        return [folder / f"{outcome.number}-{rank}.safetensors" for rank in sorted(outcome.reports)]

    def close(self) -> None:
        """End the ranks, remove the network and the files."""
        if self._mpi is not None:
            self._mpi.stop(grace=0)
        self.lab.close()
        self._folder.cleanup()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, order: dict[str, Any]) -> None:
        if find(order["block"]["peer"]).launcher == "fork":
            self._tell_all(order)
            return
        from harness import mpi

        meeting = {
            name: self._job.ranks[0].place.env[name] for name in ("MASTER_ADDR", "MASTER_PORT")
        }
        self._mpi = mpi.start(
            self.lab, order, {**self._env, **meeting, "GLOO_SOCKET_IFNAME": "eth0"}, self._hear
        )

    def _end(self, number: int, exited: set[int]) -> None:
        """Every block's processes are gone before the next begins."""
        if self._mpi is not None:
            self._mpi.stop()
            self._mpi = None
            return
        self._tell_all({"do": "end"})
        until = time.monotonic() + 10
        while len(exited) < len(self.nodes):
            try:
                rank, said = self._said.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(len(self.nodes))) - exited)
                raise RuntimeError(
                    f"the processes of rank(s) {missing} do not end, even by SIGKILL"
                ) from None
            if said.get("block") == number and "exited" in said:
                exited.add(rank)

    def _limit(self, bandwidth: str | None) -> None:
        for node, rate in enumerate(self._rates):
            if rate != bandwidth:
                self.lab.limit(node, bandwidth)
                self._rates[node] = bandwidth

    def _hear(self, rank: Rank, line: str) -> None:
        if line.startswith(MARK):
            try:
                said = json.loads(line.removeprefix(MARK))
            except ValueError:
                # torn by what a peer wrote in between: the block ends without this rank's report
                print(
                    f"rank {rank.number} said something that cannot be read: {line[:100]}",
                    flush=True,
                )
                return
            # under mpirun one process speaks for all
            self._said.put((said.get("rank", rank.number), said))

    def _pipe(self, rank: int) -> Path:
        return Path(self._folder.name) / f"orders-{rank}"

    def _tell(self, rank: int, order: Mapping[str, Any]) -> None:
        try:
            pipe = os.open(self._pipe(rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:  # nobody reads it any more
            last = "\n".join(self._job.ranks[rank].output[-20:])
            raise RuntimeError(
                f"rank {rank} has ended and takes no more blocks; its last lines:\n{last}"
            ) from error
        with os.fdopen(pipe, "w") as orders:
            orders.write(json.dumps(order) + "\n")

    def _tell_all(self, order: Mapping[str, Any]) -> None:
        for rank in range(len(self.nodes)):
            self._tell(rank, order)


def stolen_seconds() -> float:
    """Processor time that this machine wanted and others had, since it was started; 0 where
    nobody counts it.
    """
    try:
        return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


_FIND_PIPE = (
    "import os, sys; os.environ['LOOSESTEP_ORDERS'] = "
    "f\"{sys.argv[1]}/orders-{os.environ['RANK']}\"; from harness.rank import main; main()"
)
