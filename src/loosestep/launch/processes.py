"""Processes that run side by side: started, listened to, signalled, reaped. What they compute is
not our business.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from loosestep.core.store import tell_ended

LINES_KEPT = 10_000
LONGEST_LINE = 1 << 16
Output = Callable[["Rank", str], None]

_EXEC = str(Path(__file__).with_name("become_rank.py"))


@dataclass(frozen=True)
class RankCommand:
    """Where and how one process runs: its name in the output, its command, what is special in
    its environment.
    """

    label: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    node: int = 0
    namespace: str = "-"
    """A network namespace to enter, as a path; "-" for none."""
    hosts: str = "-"
    """Lines to add to the /etc/hosts that this process sees; "-" for none."""


@dataclass(frozen=True)
class Result:
    """How a job ended; exit codes by rank, negative for a signal as in `subprocess`."""

    returncodes: tuple[int, ...]
    seconds: float
    cpu_seconds: tuple[float, ...]
    first_failure: int | None
    """The rank that failed first in time."""

    @property
    def exit_code(self) -> int:
        """0 if every rank ended with 0, else the code of the first that did not (128 + n for
        signal n).
        """
        if self.first_failure is None:
            return 0
        code = self.returncodes[self.first_failure]
        return code if code > 0 else 128 - code


def describe(returncode: int) -> str:
    """`exit code 3` or `SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


class Rank:
    """One process of a job. `returncode` is None while it runs; `output` its last lines, stdout
    and stderr together.
    """

    def __init__(self, number: int, place: RankCommand) -> None:
        self.number = number
        self.place = place
        self.pid = 0
        self.returncode: int | None = None
        self.cpu_seconds = 0.0
        self.ended = 0.0
        self._reaped = False
        self._holders: set[object] = set()
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._partial = b""

    @property
    def output(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; nothing happens if the rank has ended."""
        with self._changed:
            if not self._reaped:
                os.kill(self.pid, number)

    def hold(self, holder: object) -> None:
        """Stop the rank and what it started (SIGSTOP) until all who hold it have let go."""
        with self._changed:
            self._holders.add(holder)
            self._signal_group(signal.SIGSTOP)

    def let_go(self, holder: object | None = None) -> None:
        """The rank goes on (SIGCONT) if nobody else holds it; without `holder`, whoever does."""
        with self._changed:
            if holder is None:
                self._holders.clear()
            self._holders.discard(holder)
            if not self._holders:
                self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        if not self._reaped:
            # macOS: it has ended, nobody has looked yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutError with the rank's last lines if it still runs after
        `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise TimeoutError(f"{self.story()} still runs after {timeout:g} s")
            assert self.returncode is not None
            return self.returncode

    def expect(self, text: str, timeout: float = 60.0) -> str:
        """The first line that contains `text`, waited for; an error with the rank's last lines
        if it never comes.
        """

        def found() -> str | None:
            return next((line for line in self._lines if text in line), None)

        with self._changed:
            self._changed.wait_for(
                lambda: found() is not None or self.returncode is not None, timeout
            )
            line = found()
            if line is None:
                fate = f"still runs after {timeout:g} s" if self.returncode is None else "has ended"
                raise TimeoutError(f"{self.story()} never said {text!r}: {fate}")
            return line

    def story(self) -> str:
        """Who it is, how it ended if it did, and what it said last."""
        fate = "" if self.returncode is None else f", which ended with {describe(self.returncode)}"
        tail = "".join(f"\n  {line}" for line in list(self._lines)[-20:])
        return (
            f"rank {self.number} [{self.place.label}]{fate}, whose last lines "
            f"are:{tail or ' (none)'}\n"
        )

    def _take(self, data: bytes) -> list[str]:
        """Whole lines out of what was read; the rest stays for the next read."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_LINE:
            lines.append(self._partial)
            self._partial = b""
        return self._keep(lines)

    def _take_rest(self) -> list[str]:
        rest = self._partial
        self._partial = b""
        return self._keep([rest] if rest else [])

    def _keep(self, lines: list[bytes]) -> list[str]:
        texts = [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
        with self._changed:
            self._lines.extend(texts)
            self._changed.notify_all()
        return texts


class Job:
    """Processes that were started together. Made by `start` (or the lab); ends with the `with`
    block at the latest.
    """

    def __init__(
        self, places: Sequence[RankCommand], *, output: Output | None = None, store: object = None
    ) -> None:
        self.ranks = [Rank(number, place) for number, place in enumerate(places)]
        self._output = output
        self._store = store  # lives as long as the job: ranks look each other up in it
        self._begun = time.monotonic()
        self._started = threading.Event()
        self._result: Future[Result] = Future()
        # The thread that starts a process is the "parent" whose end kills it (PR_SET_PDEATHSIG), so
        # the one that lives exactly as long as the ranks has to start them.
        self._thread = threading.Thread(target=self._run, name="loosestep-launch", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._result.done():
            self._result.result()

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.returncode is None]

    def wait(self, timeout: float | None = None) -> Result:
        """Until every rank has ended. TimeoutError, with the last lines of those that run, after
        `timeout` seconds.
        """
        try:
            return self._result.result(timeout)
        except FutureTimeoutError:
            if self._result.done():  # what the output callable raised, not our own time limit
                raise
            stories = "".join(rank.story() for rank in self.running)
            seconds = time.monotonic() - self._begun
            raise TimeoutError(f"still running after {seconds:.3g} s:\n{stories}") from None

    def ended(self, timeout: float) -> bool:
        """Whether every rank has ended, or does within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, grace: float = 3.0) -> None:
        """Ask (SIGTERM), insist (SIGINT), kill (SIGKILL), `grace` seconds between; 0 kills at
        once. Leaves nothing.
        """
        try:
            if grace > 0:
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._signal_all(number)
                    self._thread.join(grace)
        finally:
            self._signal_all(signal.SIGKILL)
            self._thread.join()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _signal_all(self, number: int) -> None:
        for rank in self.running:
            rank.kill(number)
            rank.let_go()  # a stopped process acts on nothing but SIGKILL

    def _run(self) -> None:
        pipes: dict[int, int] = {}
        try:
            for rank in self.ranks:
                pipes[rank.number] = self._spawn(rank)
            self._started.set()
            self._serve(pipes)
            self._result.set_result(self._summary())
        except (Exception, SystemExit) as error:  # noqa: BLE001  # handed to whoever waits; rich exits on a closed pipe
            for rank in self.ranks:
                if rank.pid:
                    rank.kill(signal.SIGKILL)
                    self._bury(rank, os.wait4(rank.pid, 0))
            self._result.set_exception(error)
        finally:
            for pipe in pipes.values():
                os.close(pipe)
            self._store = None
            self._started.set()

    def _spawn(self, rank: Rank) -> int:
        """Start the rank in a session of its own (Ctrl-C reaches it through us only); its
        output, to be read.
        """
        place = rank.place
        read, write = os.pipe()
        os.set_blocking(read, False)
        command = [
            sys.executable,
            "-I",
            "-S",
            _EXEC,
            str(os.getpid()),
            place.namespace,
            place.hosts,
        ]
        command += place.command
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **place.env}
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, read)
            try:
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    start_new_session=True,
                )
            finally:
                os.close(write)
            undo.pop_all()
        process.returncode = 0  # we reap it ourselves, with its CPU time
        rank.pid = process.pid
        return read

    def _serve(self, pipes: Mapping[int, int]) -> None:
        """Hand on output and bury the dead until nobody is left."""
        handles: list[int] = []
        with selectors.DefaultSelector() as selector:
            try:
                for rank in self.ranks:
                    selector.register(pipes[rank.number], selectors.EVENT_READ, rank)
                    if hasattr(os, "pidfd_open"):
                        handles.append(os.pidfd_open(rank.pid))
                        selector.register(handles[-1], selectors.EVENT_READ)
                while self.running:
                    # Where the system cannot tell us of an exit, look for one twenty times a
                    # second.
                    for key, _ in selector.select(None if handles else 0.05):
                        is_exit = key.data is None
                        if is_exit or not self._read(key.data, key.fd):
                            selector.unregister(key.fd)
                    self._reap(pipes)
            finally:
                for handle in handles:
                    os.close(handle)

    def _reap(self, pipes: Mapping[int, int]) -> None:
        for rank in self.running:
            with rank._changed:
                reaped = os.wait4(rank.pid, os.WNOHANG)
                rank._reaped = reaped[0] != 0
            if rank._reaped:
                self._read(rank, pipes[rank.number])
                self._hand_on(rank, rank._take_rest())
                self._bury(rank, reaped)

    def _read(self, rank: Rank, pipe: int) -> bool:
        """Everything the pipe holds now; False at its end."""
        while True:
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._hand_on(rank, rank._take(data))

    def _hand_on(self, rank: Rank, lines: list[str]) -> None:
        if self._output is not None:
            for line in lines:
                self._output(rank, line)

    def _bury(self, rank: Rank, reaped: tuple[int, int, resource.struct_rusage]) -> None:
        """Note how the rank ended; what it left running goes with it."""
        _, status, usage = reaped
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        with rank._changed:
            rank._reaped = True
            rank.cpu_seconds = usage.ru_utime + usage.ru_stime
            rank.ended = time.monotonic()
            rank.returncode = os.waitstatus_to_exitcode(status)
            rank._changed.notify_all()
        self._tell(rank)

    def _tell(self, rank: Rank) -> None:
        """Let ranks that have not met this one yet know that they wait in vain."""
        key = rank.place.env.get("LOOSESTEP_KEY")
        if self._store is not None and rank.returncode != 0 and key is not None:
            how = describe(rank.returncode or 0)
            run = rank.place.env.get("TORCHELASTIC_RUN_ID", "")
            tell_ended(self._store, rank.number, how, key=key, run=run)

    def _summary(self) -> Result:
        codes = tuple(rank.returncode for rank in self.ranks if rank.returncode is not None)
        failed = [rank for rank in self.ranks if rank.returncode != 0]
        return Result(
            returncodes=codes,
            seconds=time.monotonic() - self._begun,
            cpu_seconds=tuple(rank.cpu_seconds for rank in self.ranks),
            first_failure=min(failed, key=lambda rank: rank.ended).number if failed else None,
        )
