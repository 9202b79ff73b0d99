"""Measuring handlers: how long each takes, and how it ends, for as little as can be.

Theory: a function around a handler would be a coroutine more for each message, which costs more than the measuring. Most handlers end in
their first step, which their actor makes where the message arrives (`Cell._first_step`); so while somebody measures, actors have another
one, which takes the time of that. A handler that waits is measured where it goes on, and one that does not begin like this (it was queued,
it is concurrent, it runs in a thread) by a function around it.

Rules: a tally is a list: counts of handlers that took up to each of `CALL_BOUNDS`, of those that took longer, and the sum of the seconds.
Those that failed are in it, and in `failed` too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator
from typing import Any

from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import SYNC, Handler, Message
from monarch_async._runtime.resumed import Resumed
from monarch_async.observe.metrics.families import CALL_BOUNDS, OTHER

__all__ = ["Measured", "Tallies", "first_step", "outcome_of"]

_SUM = len(CALL_BOUNDS) + 1
_LEAST = CALL_BOUNDS[0]
_MOST = 10_000
_clock = time.perf_counter


class Tallies:
    """Of one process, by class and endpoint."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[float]] = {}
        self.failed: Counter[tuple[str, str, str]] = Counter()  # by outcome too
        self.lock = threading.Lock()  # for handlers in threads

    def of(self, actor: str, endpoint: str) -> list[float]:
        """The list to add to."""
        key = (actor, endpoint) if len(self.found) < _MOST else (OTHER, OTHER)
        return self.found.setdefault(key, [0.0] * (_SUM + 1))


class Measured(Handler):
    """A handler that is measured; `inner` is the same without that."""

    __slots__ = ("actor", "endpoint", "inner", "tallies", "tally")

    def __init__(self, handler: Handler, actor: str, endpoint: str, tallies: Tallies) -> None:
        around = self._around_sync if handler.kind == SYNC else self._around_async
        super().__init__(around(handler.function), handler.kind, handler.concurrent, handler.explicit_port)
        self.actor, self.endpoint = actor, endpoint
        self.inner = handler
        self.tallies = tallies
        self.tally = tallies.of(actor, endpoint)

    def took(self, seconds: float) -> None:
        tally = self.tally
        tally[bisect_left(CALL_BOUNDS, seconds)] += 1
        tally[_SUM] += seconds

    def failed(self, error: BaseException, seconds: float) -> None:
        self.tallies.failed[self.actor, self.endpoint, outcome_of(error)] += 1
        self.took(seconds)

    def _around_async(self, function: Any) -> Any:
        async def measured(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            start = _clock()
            try:
                result = await function(instance, *args, **kwargs)
            except BaseException as error:
                self.failed(error, _clock() - start)
                raise
            self.took(_clock() - start)
            return result

        return measured

    def _around_sync(self, function: Any) -> Any:
        def measured(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            start = _clock()
            try:
                result = function(instance, *args, **kwargs)
            except BaseException as error:
                with self.tallies.lock:
                    self.failed(error, _clock() - start)
                raise
            with self.tallies.lock:
                self.took(_clock() - start)
            return result

        return measured


class _Measured(Resumed):
    """A handler that waits, which is measured up to its end."""

    __slots__ = ("_handler", "_start")

    def __init__(self, begun: Resumed, handler: Measured, start: float) -> None:
        super().__init__(begun._coroutine, begun._waits_for)
        self._handler, self._start = handler, start

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            result = yield from super().__await__()
        except BaseException as error:
            self._handler.failed(error, _clock() - self._start)
            raise
        self._handler.took(_clock() - self._start)
        return result


def first_step(cell: Cell, message: Message, handler: Handler) -> Resumed:
    """In place of `Cell._first_step`: the same, and the time of it. Raises what that does, `StopIteration` if the handler has ended."""
    if type(handler) is not Measured:
        return Cell._first_step(cell, message, handler)
    start = _clock()
    try:
        begun = Cell._first_step(cell, message, handler.inner)
    except StopIteration:
        taken = _clock() - start
        tally = handler.tally
        tally[0 if taken <= _LEAST else bisect_left(CALL_BOUNDS, taken)] += 1
        tally[_SUM] += taken
        raise
    except BaseException as error:
        handler.failed(error, _clock() - start)
        raise
    return _Measured(begun, handler, start)


def outcome_of(error: BaseException) -> str:
    """``cancelled`` or ``error``."""
    return "cancelled" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "error"
