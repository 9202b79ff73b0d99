"""Who is told of each request that a process makes, for a while.

Requests are numbered by a plain `itertools.count`, which is all that most processes ever need. While somebody wants to be told, another
iterator stands in for it, so nobody pays for what nobody wants to know.

Rules: a listener is called with the number, in whatever thread makes the request, and before that is sent. It may take itself off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

__all__ = ["Listener", "Numbered", "listen", "unlisten"]

Listener = Callable[[int], None]


class Numbered(Protocol):
    """What has the iterator: a runtime."""

    requests: Iterator[int]


class _Telling:
    """The next number, and others are told."""

    __slots__ = ("listeners", "numbers")

    def __init__(self, numbers: Iterator[int], listeners: Sequence[Listener]) -> None:
        self.numbers = numbers
        self.listeners = listeners

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = next(self.numbers)
        for listener in self.listeners:
            listener(number)
        return number


_lock = threading.Lock()


def listen(numbered: Numbered, listener: Listener) -> None:
    """Tell this one from now on."""
    with _lock:
        numbers, listeners = _parts(numbered)
        numbered.requests = _Telling(numbers, [*listeners, listener])


def unlisten(numbered: Numbered, listener: Listener) -> None:
    """Do not any more. Nothing happens if it is not told."""
    with _lock:
        numbers, listeners = _parts(numbered)
        left = [other for other in listeners if other != listener]
        numbered.requests = _Telling(numbers, left) if left else numbers


def _parts(numbered: Numbered) -> tuple[Iterator[int], Sequence[Listener]]:
    requests = numbered.requests
    return (requests.numbers, requests.listeners) if isinstance(requests, _Telling) else (requests, ())
