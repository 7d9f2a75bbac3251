"""The pace of gossip: as many exchanges as asked for, unless they cost more CPU than they may."""

from __future__ import annotations

AIM = 0.8  # of the limit
FOLDING = 0.5  # of the limit: what folding may take, which the compute thread does itself
# of that: folding while nothing has landed, so that peers meet a model that is not too old
IDLE = 0.2
# of a core: what folding may take on a thread of its own, for parameters on an accelerator
RELAYING = 0.25


class Pace:
    """Decides at every step how many exchanges to begin.

    `rate` exchanges per step is the upper bound. Communication may use `share` of the CPU time the
    process is entitled to: `cores` times the wall clock, less than 1 when ranks outnumber
    processors. That allowance flows into an account and what communication has used flows out,
    exchanges that peers began included; none is begun while the account is overdrawn. So fewer
    exchanges, never slower steps. The account holds at most one second's allowance, so that a pause
    is not followed by a burst. The controller aims at four fifths of the limit: what is begun
    cannot be taken back.
    """

    def __init__(self, rate: float = 1.0, *, share: float = 0.1, cores: float = 1.0) -> None:
        if not rate > 0:
            raise ValueError(f"rate must be above 0 exchanges per step, got {rate}")
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        if not cores > 0:
            raise ValueError(f"cores must be above 0, got {cores}")
        self.rate = rate
        self.current = rate  # running mean of the exchanges begun per step
        self._allowance = AIM * share * cores
        self._account = self._credit = 0.0
        self._last: tuple[float, float] | None = None

    def due(self, now: float, used: float) -> int:
        """The exchanges to begin at this step; `used`: CPU seconds communication has cost up to
        the time `now`.
        """
        then, before = self._last or (now, used)
        self._last = now, used
        flow = self._allowance * (now - then) - (used - before)
        self._account = min(self._account + flow, self._allowance)
        self._credit = min(self._credit + self.rate, max(1.0, self.rate))
        begun = int(self._credit) if self._account >= 0 else 0
        self._credit -= begun
        self.current += 0.02 * (begun - self.current)
        return begun
