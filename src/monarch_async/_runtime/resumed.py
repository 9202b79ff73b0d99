"""Going on with a coroutine that was begun outside the task that is to finish it.

A future that is awaited marks itself until the task has seen that, and can't be awaited by another task before. So the mark is taken off
when the coroutine is left, and put on again when the task comes to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

__all__ = ["Resumed"]


class Resumed:
    """Await it in the task that the coroutine was begun as. `waits_for` is what its first step yielded.

    If the task was `cancelled` meanwhile, so is what the coroutine waits for, as asyncio does it.
    """

    __slots__ = ("_coroutine", "_waits_for", "cancelled")

    def __init__(self, coroutine: Any, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for
        self.cancelled = False
        if getattr(waits_for, "_asyncio_future_blocking", None):
            waits_for._asyncio_future_blocking = False

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, waits_for = self._coroutine, self._waits_for
        if getattr(waits_for, "_asyncio_future_blocking", None) is not None:
            waits_for._asyncio_future_blocking = True
        error: BaseException | None = None
        if self.cancelled and (waits_for is None or not waits_for.cancel()):
            error = asyncio.CancelledError()
        try:
            while True:
                if error is None:
                    try:
                        value = yield waits_for
                    except BaseException as raised:
                        error = raised
                    else:
                        waits_for = coroutine.send(value)
                        continue
                waits_for = coroutine.throw(error)
                error = None
        except StopIteration as end:
            return end.value
