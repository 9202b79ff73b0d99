"""Descriptors that other processes have given to this one, until somebody here takes them.

Rules:

* A gift is known by its giver's uid and its name; who takes it owns its descriptors.
* What nobody takes is closed when its name is refused, its giver gone, or this process closes, and beyond `MOST` gifts, the oldest first.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["MOST", "Gifts"]

MOST = 1024


class Gifts:
    """See the module's text. Used from any thread."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._there: dict[tuple[str, str], list[int]] = {}
        self._refused: deque[str] = deque(maxlen=MOST)
        self._closed = False

    def add(self, giver: str, name: str, fds: list[int]) -> None:
        """A gift has come."""
        with self._news:
            unwanted = [self._there.pop((giver, name), [])]
            if self._closed or name in self._refused:
                unwanted.append(fds)
            else:
                self._there[giver, name] = fds
            if len(self._there) > MOST:
                unwanted.append(self._there.pop(next(iter(self._there))))
            self._news.notify_all()
        _close(unwanted)

    def take(self, giver: str, name: str, timeout: float, over: Callable[[], bool]) -> list[int] | None:
        """Wait up to `timeout` seconds, and while `over` does not say so, for a gift. In a thread that is not the loop's."""
        with self._news:
            self._news.wait_for(lambda: self._closed or over() or (giver, name) in self._there, timeout)
            return self._there.pop((giver, name), None)

    def look_again(self) -> None:
        """Something that an `over` looks at has changed."""
        with self._news:
            self._news.notify_all()

    def refuse(self, name: str) -> None:
        """What has come under a name, from whomever, is not wanted, nor is what still comes."""
        with self._news:
            self._refused.append(name)
            unwanted = [self._there.pop(key) for key in [key for key in self._there if key[1] == name]]
        _close(unwanted)

    def forget(self, giver: str) -> None:
        """A process is gone."""
        with self._news:
            unwanted = [self._there.pop(key) for key in [key for key in self._there if key[0] == giver]]
        _close(unwanted)

    def close(self) -> None:
        """Keep nothing, from now on."""
        with self._news:
            self._closed = True
            unwanted = [*self._there.values()]
            self._there.clear()
            self._news.notify_all()
        _close(unwanted)


def _close(gifts: list[list[int]]) -> None:
    for fds in gifts:
        for fd in fds:
            os.close(fd)
