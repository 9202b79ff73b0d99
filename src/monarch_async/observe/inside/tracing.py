"""The next messages of an actor, seen from around its handlers: put there when somebody asks, taken off when nobody does any more.

An asker comes back for more until it has enough; one that does not come back within `IDLE` seconds has gone.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from monarch_async._core.codec import size_of
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import SYNC, Handler, Message, current_message
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.wrapping import unwrap, wrap
from monarch_async.errors import UsageError
from monarch_async.observe.inside.cells import Name, find_cells

__all__ = ["trace"]

IDLE = 5.0
KEPT = 1000
"""Messages that wait to be asked for."""
AT_ONCE = 0.2
"""Seconds for which an asker waits for the first one."""

Seen = tuple[str, float, str, str, int, float, str]


class _Trace:
    """One actor's handlers, wrapped."""

    def __init__(self, runtime: Runtime, cell: Cell, number: int) -> None:
        self._runtime = runtime
        self._cell = cell
        self._number = number
        self.seen: deque[Seen] = deque(maxlen=KEPT)
        self.news = asyncio.Event()
        self._over = False  # its functions may be left below layers, which then call through them
        self.asked = time.monotonic()
        wrap(cell, self, self._wrap)
        self._check()

    def _check(self) -> None:
        left = self.asked + IDLE - time.monotonic()
        if left > 0 and not self._runtime.closing:
            self._runtime.loop.call_later(left, self._check)
        else:
            self.end()

    def end(self) -> None:
        """Take the wrapping off."""
        self._over = True
        unwrap(self._cell, self)
        _traces(self._runtime).pop(self._number, None)

    def _wrap(self, name: str, handler: Handler) -> Handler:
        function = handler.function

        @functools.wraps(function)
        async def run(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._over:
                return await function(instance, *args, **kwargs)
            message, start, when = current_message.get(), time.perf_counter(), time.time()
            outcome = "ok"
            try:
                return await function(instance, *args, **kwargs)
            except BaseException as error:
                outcome = _outcome(error)
                raise
            finally:
                self._note(name, message, when, time.perf_counter() - start, outcome)

        @functools.wraps(function)
        def run_in_thread(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._over:
                return function(instance, *args, **kwargs)
            message, start, when = current_message.get(), time.perf_counter(), time.time()
            outcome = "ok"
            try:
                return function(instance, *args, **kwargs)
            except BaseException as error:
                outcome = _outcome(error)
                raise
            finally:
                taken = time.perf_counter() - start
                self._runtime.loop.call_soon_threadsafe(self._note, name, message, when, taken, outcome)

        return Handler(run_in_thread if handler.kind == SYNC else run, handler.kind, handler.concurrent, handler.explicit_port)

    def _note(self, name: str, message: Message | None, when: float, taken: float, outcome: str) -> None:
        sender, size = "", 0
        if message is not None:
            chain = (message.extras or {}).get("c", ())
            address = self._runtime.address_of(message.origin)
            sender = chain[-1][3] if chain else str(address) if address is not None else ""
            size = size_of(message.body, message.buffers or ())
        self.seen.append((str(self._cell.identity), when, name, sender, size, taken, outcome))
        self.news.set()


def _outcome(error: BaseException) -> str:
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def _traces(runtime: Runtime) -> dict[int, _Trace]:
    traces: dict[int, _Trace] = runtime.parts.setdefault("traces", {})
    return traces


async def trace(runtime: Runtime, names: Sequence[Name], numbers: Sequence[int], end: bool = False) -> tuple[list[int], list[Seen]]:
    """Go on with the traces of these numbers, or, if there are none, begin: the numbers to come back with, and what was seen meanwhile.

    With `end` they are over.
    """
    traces = _traces(runtime)
    if not numbers:
        cells = list(find_cells(runtime, names))
        if not cells:
            raise UsageError("no such actor is here any more")
        numbers = [next(runtime.requests) for _ in cells]
        for number, cell in zip(numbers, cells, strict=True):
            traces[number] = _Trace(runtime, cell, number)
    known = [traces[number] for number in numbers if number in traces]
    if end:
        for one in known:
            one.end()
    elif known and not any(one.seen for one in known):
        waits = [asyncio.ensure_future(one.news.wait()) for one in known]
        await asyncio.wait(waits, timeout=AT_ONCE, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    seen: list[Seen] = []
    for one in known:
        one.asked = time.monotonic()
        seen += one.seen
        one.seen.clear()
        one.news.clear()
    return list(numbers), sorted(seen, key=lambda entry: entry[1])
