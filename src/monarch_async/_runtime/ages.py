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
"""Looks that are remembered; as precise as below, so many reach back for years."""
PRECISION = 1 / 16
"""The part of an age that may be missing in it."""


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
            self._thin(now)
        self._numbers.append(number)
        self._times.append(now)

    def _thin(self, now: float) -> None:
        """Leave out looks that say hardly more than the one before them."""
        kept: list[int] = []
        for index, time in enumerate(self._times):
            if not kept or time - self._times[kept[-1]] >= (now - time) * PRECISION:
                kept.append(index)
        self._numbers = [self._numbers[index] for index in kept]
        self._times = [self._times[index] for index in kept]

    def age(self, request: int, now: float) -> float:
        """Seconds since a request was made, at least."""
        index = bisect.bisect_right(self._numbers, request)  # the first look that came after it
        return now - self._times[index] if index < len(self._times) else 0.0
