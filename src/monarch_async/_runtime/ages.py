"""How old requests are, without a time in any of them.

Theory: a process numbers its requests. Whoever looks now and then which number comes next knows, to within the time between two looks,
when each was made; so a call costs nothing for that. Looks become sparser with their age, so that few are kept and an age is known to some
percent.
"""

from __future__ import annotations

import bisect
import itertools

__all__ = ["Ages"]

KEPT = 512
"""Looks that are remembered."""


class Ages:
    """For the requests that are numbered by `requests`."""

    __slots__ = ("_numbers", "_requests", "_times")

    def __init__(self, requests: itertools.count[int]) -> None:
        self._requests = requests
        self._numbers: list[int] = []  # the next number at each look, ascending
        self._times: list[float] = []

    def look(self, now: float) -> None:
        """Note which number comes next. For any thread, one at a time."""
        number = int(repr(self._requests)[len("count(") : -1])  # to ask for it would use it up
        if self._numbers and number == self._numbers[-1]:
            return  # that those before were made is known since then
        if len(self._numbers) >= KEPT:
            half = KEPT // 2
            self._numbers[:half] = self._numbers[:half:2]
            self._times[:half] = self._times[:half:2]
        self._numbers.append(number)
        self._times.append(now)

    def age(self, request: int, now: float) -> float:
        """Seconds since a request was made, at least."""
        index = bisect.bisect_right(self._numbers, request)  # the first look that came after it
        return now - self._times[index] if index < len(self._times) else 0.0
