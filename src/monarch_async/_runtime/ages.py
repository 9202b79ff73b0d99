"""How old requests are, without a time in any of them.

Theory: a process numbers its requests. Whoever looks now and then which number comes next knows, to within the time between two looks,
when each was made; so a call costs nothing for that. Looks become sparser with their age, so that few are kept and an age is known to some
percent.

Looks are made by whoever looks at a process anyway. A client has nobody for that: `Looks` sees to it, and sleeps while no request is made.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from monarch_async._runtime.numbering import Numbered, listen, unlisten

__all__ = ["Ages", "Looks"]

KEPT = 512
"""Looks that are remembered; as precise as below, so many reach back for years."""
PRECISION = 1 / 16
"""The part of an age that may be missing in it."""


class Ages:
    """For the requests that are numbered by `requests`."""

    __slots__ = ("_numbers", "_requests", "_times")

    def __init__(self, requests: Iterator[int]) -> None:
        self._requests = requests
        self._numbers: list[int] = []  # the next number at each look, ascending
        self._times: list[float] = []

    def look(self, now: float) -> bool:
        """Note which number comes next, and tell whether that has changed. For any thread, one at a time."""
        number = int(repr(self._requests)[len("count(") : -1])  # to ask for it would use it up
        if self._numbers and number == self._numbers[-1]:
            return False  # that those before were made is known since then
        if len(self._numbers) >= KEPT:
            self._thin(now)
        self._numbers.append(number)
        self._times.append(now)
        return True

    def _thin(self, now: float) -> None:
        """Leave out looks that say hardly more than the one before them."""
        kept: list[int] = []
        for index, when in enumerate(self._times):
            if not kept or when - self._times[kept[-1]] >= (now - when) * PRECISION:
                kept.append(index)
        self._numbers = [self._numbers[index] for index in kept]
        self._times = [self._times[index] for index in kept]

    def age(self, request: int, now: float) -> float:
        """Seconds since a request was made, at least."""
        index = bisect.bisect_right(self._numbers, request)  # the first look that came after it
        return now - self._times[index] if index < len(self._times) else 0.0


LOOK = 0.5
"""Seconds between two looks while requests are made."""


class Requesting(Numbered, Protocol):
    """What `Looks` needs of a runtime."""

    loop: asyncio.AbstractEventLoop


class Looks:
    """Has `ages` look at the requests of a runtime. While none is made it is told of the next one."""

    def __init__(self, runtime: Requesting, ages: Ages) -> None:
        self._runtime = runtime
        self._ages = ages
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Look now, and go on with it. Nothing happens if it has begun."""
        if self._timer is None and not self._closed:
            self._look()

    def close(self) -> None:
        self._closed = True
        unlisten(self._runtime, self._made)
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._ages.look(time.monotonic()):
            self._timer = self._runtime.loop.call_later(LOOK, self._look)
        else:
            listen(self._runtime, self._made)

    def _made(self, number: int) -> None:
        """In whatever thread a request is made."""
        unlisten(self._runtime, self._made)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._runtime.loop.call_soon_threadsafe(self.start)
