"""The pace of gossip: as many exchanges as asked for, unless they cost more CPU than they may."""

from __future__ import annotations


class Pace:
    """Decides at every step whether to begin an exchange.

    `rate` exchanges per step is the upper bound. Communication may use `share` of the CPU time the process is entitled
    to, `cores` times the wall clock (less than 1 when ranks outnumber processors). Once per `interval` seconds

        current <- min(rate, current * sqrt(share * cores * wall / used))

    with the factor kept between 1/2 and 2: the square root damps, because exchanges that peers begin here cost CPU too
    and answer to their pace, not to ours.
    """

    def __init__(self, rate: float = 1.0, *, share: float = 0.1, cores: float = 1.0, interval: float = 0.5) -> None:
        if not rate > 0:
            raise ValueError(f"rate must be above 0 exchanges per step, got {rate}")
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        self.rate = rate
        self.current = rate
        self._budget, self._interval = share * cores, interval
        self._credit = 0.0
        self._last: tuple[float, float] | None = None

    def observe(self, now: float, used: float) -> None:
        """`used`: the CPU seconds communication has used up to the time `now`."""
        if self._last is None:
            self._last = now, used
            return
        wall, cost = now - self._last[0], used - self._last[1]
        if wall < self._interval:
            return
        self._last = now, used
        factor = 2.0 if cost <= 0 else (self._budget * wall / cost) ** 0.5
        self.current = min(self.rate, self.current * min(2.0, max(0.5, factor)))

    def due(self) -> int:
        """How many exchanges to begin at this step."""
        self._credit += self.current
        whole = int(self._credit)
        self._credit -= whole
        return whole
