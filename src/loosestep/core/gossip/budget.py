"""The pace of gossip: as much as asked for, unless it makes the computation's steps slower than it
may.

What counts is what communication takes from the computation, not what it costs: on a host with idle
cores it may cost much and take nothing. So `Budget` measures it. Time is cut into cycles, and in
the first part of each nobody begins an exchange; the mean step of the rest, compared with the mean
step of that quiet part, says how much slower communication makes a step. Cycles follow the
monotonic clock, which the ranks of a host share, so that they are quiet together.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median

AIM = 0.8  # of the limit
FOLDING = 2.0  # of the limit: what folding may take
# of that: folding while nothing has landed, so that peers meet a model that is not too old
IDLE = 0.2

CYCLE = 24  # steps that a cycle has at least
QUIET = 0.25  # of a cycle
QUIET_SETTLED = 0.125  # the same, once the rate has stayed where it is
LEAST_STEPS = 3  # in each part of a cycle that is believed
POWER = 0.6  # how far the rate moves towards the one that would be right
MOST = 2.0  # by which factor it moves at a time
SETTLED = 4  # moves by less than a quarter in a row
BUSY = 0.25  # cores idle, below which a host has none
RARE = 0.05  # models a step


class Idle:
    """Says how many of this process's cores were idle since it was asked last; None where the
    system does not tell.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def __call__(self) -> float | None:
        """See the class."""
        now = self._read()
        then = self._last
        self._last = now
        if now is None or then is None or now[1] <= then[1]:
            return None
        return len(self._cores()) * (now[0] - then[0]) / (now[1] - then[1])

    @staticmethod
    def _cores() -> set[int]:
        return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

    def _read(self) -> tuple[int, int] | None:
        """(idle, all) ticks of the cores this process may use."""
        cores = {f"cpu{core}" for core in self._cores()}
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return None
        ticks = [list(map(int, line.split()[1:])) for line in lines if line.split()[0] in cores]
        return (sum(core[3] for core in ticks), sum(map(sum, ticks))) if ticks else None


class Budget:
    """Decides at every step how much of a model to begin to exchange.

    At most `rate` models a step. `slowdown` is by how much communication may make steps slower;
    None: it does not matter, as where it takes no time. Each cycle gives one estimate; of the first
    ones each moves the rate, later the median of three does, together with what the other ranks of
    the host have found, for rates that follow every rank's own estimate drift apart:

        rate <- rate (.8 slowdown / slower)^.6

    When no core is idle every second of communication was stolen from a computation, here or on
    another rank of the host, whether or not steps show it: `cores` is this rank's part of them.
    """

    def __init__(
        self,
        rate: float = 1.0,
        *,
        slowdown: float | None = 0.03,
        cores: float = 1.0,
        least: float = 0.0,
        idle: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`least`: the smallest share of a model that can travel. `idle`: the mean number of idle
        cores since it was called last.
        """
        if not rate > 0:
            raise ValueError(f"rate must be above 0 exchanges per step, got {rate}")
        if slowdown is not None and not 0 < slowdown <= 1:
            raise ValueError(f"slowdown must be above 0 and at most 1, got {slowdown}")
        if not cores > 0:
            raise ValueError(f"cores must be above 0, got {cores}")
        self.most = rate
        self.rate = rate if slowdown is None else rate / 2
        self.current = self.rate  # running mean of what was begun per step
        self.slower: float | None = None
        self._slowdown = slowdown
        self._cores = cores
        self._least = least
        self._idle = idle
        self._credit = 0.0
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=9)  # steps
        self._length = 0.0  # of a cycle, in seconds
        self._steps: dict[bool, list[float]] = {True: [], False: []}  # quiet or not
        self._was_quiet = False
        self._clean = False  # no exchange of the part before is under way any more
        self._begun = (0.0, 0.0)  # the part that is not quiet: when, and what had been used
        self._found: list[float] = []
        self._moves = 0
        self._calm = 0

    @property
    def too_rare(self) -> bool:
        """Whether the rate has settled where exchanges hardly help, though more were asked for."""
        return self._moves >= 2 * SETTLED and self.rate < min(RARE, self.most)

    def due(self, now: float, used: float, *, others: Iterable[float] = ()) -> float:
        """The share of a model to begin at this step; above 1 for several. `used`: CPU seconds that
        communication has cost this rank up to the time `now`. `others`: what the other ranks of
        this host have found.
        """
        quiet = self._slowdown is not None and self._observe(now, used, others)
        begun = 0.0 if quiet else self._spend()
        self.current += 0.02 * (begun - self.current)
        return begun

    def _spend(self) -> float:
        self._credit = min(self._credit + self.rate, max(1.0, self.most, self._least))
        begun = self._credit
        if self._least:
            begun = math.floor(begun / self._least + 1e-9) * self._least
        self._credit -= begun
        return begun

    def _observe(self, now: float, used: float, others: Iterable[float]) -> bool:
        """Take note of the step that has ended; whether the next one is quiet."""
        step = None if self._last is None else now - self._last
        self._last = now
        if step is not None and not self._was_quiet:
            self._recent.append(step)
        if len(self._recent) < LEAST_STEPS:
            return False
        wanted = CYCLE * max(1e-6, median(self._recent))
        if not self._length / 4 < wanted < self._length * 1.5:
            self._length = 2.0 ** math.ceil(math.log2(wanted))
            self._steps = {True: [], False: []}
        place = now % self._length
        quiet = place < self._length * (QUIET_SETTLED if self._calm >= SETTLED else QUIET)
        if quiet == self._was_quiet and step is not None:
            if self._clean:
                self._steps[quiet].append(step)
            self._clean = True
        elif quiet:
            self._end_cycle(now, used, others)
            self._clean = False
        else:
            self._begun = (now, used)
            self._idle()
            self._clean = True
        self._was_quiet = quiet
        return quiet

    def _end_cycle(self, now: float, used: float, others: Iterable[float]) -> None:
        quiet = self._steps[True]
        rest = self._steps[False]
        self._steps = {True: [], False: []}
        idle = self._idle()
        if min(len(quiet), len(rest)) < LEAST_STEPS:
            return
        slower = fmean(rest) / fmean(quiet) - 1.0
        begun, before = self._begun
        if idle is not None and idle < BUSY:
            stolen = min(0.9, (used - before) / ((now - begun) * self._cores))
            slower = max(slower, stolen / (1.0 - stolen))
        self._found.append(slower)
        if self._moves < LEAST_STEPS or len(self._found) == 3:
            self._move(median(self._found), others)
            self._found = []

    def _move(self, slower: float, others: Iterable[float]) -> None:
        self.slower = slower
        assert self._slowdown is not None
        together = fmean([slower, *others])
        aim = AIM * self._slowdown
        factor = (aim / max(together, aim * MOST ** (-1 / POWER))) ** POWER
        factor = max(1 / MOST, factor)
        before = self.rate
        self.rate = min(self.most, self.rate * factor)
        self._moves += 1
        self._calm = self._calm + 1 if 0.8 < self.rate / before < 1.25 else 0
