"""How often a supervisor may start something again: so many times within so many seconds.

The rule is that of `add_restart` in Erlang/OTP's `supervisor.erl`, with seconds as floats: a restart is noted with its time, those from
before `now - within` are forgotten, and what is left may be no more than `max_restarts`. A restart exactly `within` seconds old counts, and
of several at the same time each counts.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Intensity"]


class Intensity:
    """The restarts of the last `within` seconds, and how many there may be."""

    __slots__ = ("_times", "max_restarts", "within")

    def __init__(self, max_restarts: int, within: float) -> None:
        self.max_restarts = max_restarts
        self.within = within
        self._times: deque[float] = deque()  # ascending, the oldest at most `within` before the newest

    def add(self, now: float) -> bool:
        """Note a restart. False if it is one too many."""
        times = self._times
        oldest = now - self.within
        while times and times[0] < oldest:
            times.popleft()
        times.append(now)
        return len(times) <= self.max_restarts

    def count(self, now: float) -> int:
        """How many of the last `within` seconds are remembered."""
        return sum(time >= now - self.within for time in self._times)

    def exceeded(self) -> str:
        """The rule that was broken, for people."""
        several = "" if self.max_restarts == 1 else "s"
        return f"{self.max_restarts} restart{several} within {self.within:g} s allowed, this would be the {_ordinal(self.max_restarts + 1)}"

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        assert list(self._times) == sorted(self._times)
        assert not self._times or self._times[0] >= self._times[-1] - self.within
        assert len(self._times) <= self.max_restarts + 1


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
