"""How many messages each actor gets, counted while somebody asks.

Theory: nothing counts messages; so whoever wants to know has a counter put before what a process takes them by. It is taken off again when
nobody has asked for `IDLE` seconds, and costs about 0.1 µs a message meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from monarch_async._core.framing import CALL
from monarch_async._runtime.context import Message
from monarch_async._runtime.link import Link
from monarch_async._runtime.runtime import Runtime
from monarch_async.observe.inside.cells import cells

__all__ = ["counts"]

IDLE = 5.0

Deliver = Callable[[Link, list[list[Any]], "list[memoryview] | None"], None]


class _Counter:
    """Stands before a runtime's `deliver` and `post_local`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._deliver, self._post_local = runtime.deliver, runtime.post_local
        self.counts: defaultdict[int, int] = defaultdict(int)
        self.asked = 0.0
        runtime.deliver = self._take  # type: ignore[method-assign]
        runtime.post_local = self._take_local  # type: ignore[method-assign]
        self._check()

    def renew(self) -> None:
        """Somebody asks: look on, over new links too."""
        self.asked = time.monotonic()
        self._have_all_taken_by(self._take)

    def _have_all_taken_by(self, deliver: Deliver) -> None:
        """Those that are made from now on ask the runtime; those of visitors always do."""
        visits = self._runtime.parts.get("visits", {})
        for link in self._runtime.links:
            if link not in visits:
                link.take_by(deliver)

    def _check(self) -> None:
        left = self.asked + IDLE - time.monotonic() if self.asked else IDLE
        if left > 0 and not self._runtime.closing:
            self._runtime.loop.call_later(left, self._check)
            return
        runtime = self._runtime
        del runtime.parts["counter"]
        runtime.deliver, runtime.post_local = self._deliver, self._post_local  # type: ignore[method-assign]
        self._have_all_taken_by(self._deliver)

    def _take(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        counts = self.counts
        for fields in messages:
            if fields[0] == CALL:
                counts[fields[1]] += 1
        self._deliver(link, messages, buffers)

    def _take_local(self, key: int, message: Message) -> None:
        self.counts[key] += 1
        self._post_local(key, message)


def counts(runtime: Runtime) -> tuple[float, list[tuple[Any, ...]], dict[int, int]]:
    """The time, the actors as `cells` lists them, and for each key how many messages have come since somebody began to ask."""
    if not runtime.cells:
        return time.monotonic(), [], {}
    counter: _Counter | None = runtime.parts.get("counter")
    if counter is None:
        counter = runtime.parts["counter"] = _Counter(runtime)
    counter.renew()
    rows = cells(runtime)
    return time.monotonic(), rows, dict(counter.counts)
