"""The own thread of an actor with `def` endpoints, where they may block.

One call at a time, in order. The thread is a daemon: a handler that never returns does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from monarch_async._runtime.context import Message, current_cell, current_message

__all__ = ["ActorThread"]

_Job = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Message | None, "asyncio.Future[Any]"]


class ActorThread:
    """A thread that runs functions of the actor `cell` for coroutines of `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cell: Any, name: str) -> None:
        self._loop = loop
        self._cell = cell
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"actor {name}", daemon=True)
        self.thread.start()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], message: Message | None
    ) -> asyncio.Future[Any]:
        """Run `function` in the thread, with `message` as its context; the future has its result."""
        future = self._loop.create_future()
        self._jobs.put((function, args, kwargs, message, future))
        return future

    def stop(self) -> None:
        """Let the thread end after what it is doing."""
        self._jobs.put(None)

    def _work(self) -> None:
        post = self._loop.call_soon_threadsafe
        current_cell.set(self._cell)
        while (job := self._jobs.get()) is not None:
            function, args, kwargs, message, future = job
            current_message.set(message)
            try:
                outcome: tuple[Callable[..., None], Any] = (_set_result, function(*args, **kwargs))
            except BaseException as error:
                outcome = (_set_exception, error)
            try:
                post(outcome[0], future, outcome[1])
            except RuntimeError:
                return  # the loop is closed: nobody is left to tell
            del job, function, args, kwargs, message, future, outcome


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        if isinstance(error, StopIteration):
            error = RuntimeError(f"the handler raised {error!r}, which a future can't hold")
        future.set_exception(error)
