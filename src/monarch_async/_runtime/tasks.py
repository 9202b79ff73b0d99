"""Background tasks of a runtime: kept until they are done, their errors never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["TaskSet"]


class TaskSet:
    """Tasks that nobody awaits. An exception in one is logged with its traceback: it is a bug of the runtime."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        self._loop = loop
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False  # nothing is to be started any more

    def start(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run a coroutine to its end."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("internal error in %s", task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancel what still runs, and wait for it."""
        self.closed = True
        current = asyncio.current_task()
        rest = [task for task in self._tasks if task is not current]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=5.0)
