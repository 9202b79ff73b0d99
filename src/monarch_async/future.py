"""The answer to a call, to be awaited, or waited for by a thread.

A `Future` is an `asyncio.Future` of the runtime's loop: awaiting it any number of times, `gather`, `wait`, `asyncio.timeout` and callbacks
work as usual. What it adds: cancelling it cancels the handler at the other end, and `get` blocks a thread that has no loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn, TypeVar

from monarch_async._runtime.context import Message, current_message
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import on_loop
from monarch_async.errors import ActorDied, ActorError, CallTimeout, UsageError
from monarch_async.shape import Point, Shape
from monarch_async.value_mesh import ValueMesh

__all__ = ["Future", "MeshFuture", "as_future"]

R = TypeVar("R")
_log = logging.getLogger("monarch_async")
_QUIET = ("asyncio.exceptions.CancelledError", "monarch_async.errors.CallTimeout")


class Future(asyncio.Future[R]):
    """The result of one call. Made by the adverbs of endpoints, not by users."""

    runtime: Runtime
    lane: Lane | LocalLane | None = None
    request = 0
    awaited_by: Message | None = None
    keeps: Any = None  # what has to live until this is done
    _timer: asyncio.TimerHandle | None = None

    # What the runtime calls.

    def settle(self, request: int, value: Any) -> None:
        if not self.done():
            self._stop_timer()
            self.set_result(value)

    def fail(self, request: int, error: BaseException) -> None:
        if not self.done():
            self._stop_timer()
            self.set_exception(error if not isinstance(error, StopIteration) else RuntimeError(str(error)))
            self._hush()
        else:
            _report_late(error)

    def _hush(self) -> None:
        """Once everything is being stopped, an error that nobody has asked for is no news."""
        if self.runtime.stopping is not None:
            self.exception()

    def futures(self) -> Sequence[asyncio.Future[Any]]:
        return (self,)

    def expire_after(self, timeout: float, what: str) -> None:
        """Fail with `CallTimeout` unless the answer comes within so many seconds."""
        self._timer = self.runtime.loop.call_later(timeout, self._expire, f"no answer from {what} within {timeout:g} s")

    def _expire(self, text: str) -> None:
        if not self.done():
            self.set_exception(CallTimeout(text))
            self._tell_cancelled("timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # What users call.

    def cancel(self, msg: Any | None = None) -> bool:
        """Give up: the handler is cancelled, or dropped if it has not begun. From any thread."""
        if threading.get_ident() != self.runtime.thread:
            self.runtime.loop.call_soon_threadsafe(self.cancel, msg)
            return not self.done()
        if not super().cancel(msg):
            return False
        self._stop_timer()
        self._tell_cancelled("cancelled")
        return True

    def _tell_cancelled(self, reason: str) -> None:
        if self.lane is not None:
            self.runtime.cancel_request(self.request, self.lane, reason)

    def get(self, timeout: float | None = None) -> R:
        """Block this thread until the answer is there. Raises `TimeoutError` after `timeout` seconds, and the future can still be used.

        In a handler that is cancelled, or whose actor ends, the future is cancelled, so that this raises `CancelledError`.

        Raises `UsageError` in the thread of the runtime's loop, which must not block: `await` it there.
        """
        if self.done():
            return self.result()
        if threading.get_ident() == self.runtime.thread:
            raise UsageError("Future.get() would block the event loop that has to bring the answer: use 'await' here")
        there = threading.Event()
        self.awaited_by = handler = current_message.get()
        if handler is not None:
            handler.blocked_on = self
            if handler.cancelled:
                self.cancel()
        self.runtime.loop.call_soon_threadsafe(self.add_done_callback, lambda _: there.set())
        try:
            if not there.wait(timeout):
                raise TimeoutError(f"no answer within {timeout:g} s")
        finally:
            self.awaited_by = None
            if handler is not None:
                handler.blocked_on = None
        return self.result()

    def as_asyncio(self) -> asyncio.Future[R]:
        """This very future: it is one of asyncio's."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future stays where it was made: await it and send the result, or send a Port for it to be sent to")


class MeshFuture(Future[ValueMesh[R]]):
    """The results of a call on a mesh. The first error raises at once, unless errors are to be values.

    The error raised has what is known per point in `.errors`; errors that come later are added to it.
    """

    _first: ActorError | None = None

    def expect(self, shape: Shape, lanes: list[Any], requests: list[int], *, keep_errors: bool) -> None:
        """Wait for the answers to these requests, in the order of the points of `shape`."""
        self._answers: list[Any] = [None] * len(requests)
        self._open = {request: index for index, request in enumerate(requests)}
        self._lanes = lanes
        self._shape = shape
        self._keep_errors = keep_errors

    def settle(self, request: int, value: Any) -> None:
        index = self._open.pop(request, None)
        if index is None:
            return
        self._answers[index] = value
        if not self._open and not self.done():
            self._stop_timer()
            self.set_result(ValueMesh(self._shape, self._answers))

    def fail(self, request: int, error: BaseException) -> None:
        index = self._open.get(request)
        if index is None:
            return
        if self._keep_errors and not self.done():
            self.settle(request, error)
            return
        del self._open[request]
        point: Point = self._shape.extent.point(index)
        if self._first is not None:
            self._first.errors = {**self._first.errors, point: error}
        elif self.done():
            _report_late(error)
        else:
            self._stop_timer()
            if isinstance(error, ActorError):
                self._first = error
                error.errors = {point: error}
            self.set_exception(error)
            self._hush()

    def _tell_cancelled(self, reason: str) -> None:
        for request, index in list(self._open.items()):  # a queued call in this process fails at once
            self.runtime.cancel_request(request, self._lanes[index], reason)


def _report_late(error: BaseException) -> None:
    """An error for which nobody waits any more: not that the handler was cancelled, but what went wrong in its doing so."""
    if isinstance(error, ActorError) and error.type_name in _QUIET:
        return
    if not isinstance(error, (asyncio.CancelledError, CallTimeout, ActorDied)):
        _log.error("a handler failed after its call was given up: %s", error)


def as_future(runtime: Runtime, awaitable: Awaitable[R]) -> Future[R]:
    """A `Future` of what is awaited in the runtime's loop from now on.

    Cancelling it cancels what is awaited, once that has begun: what shall go on for all that is to be shielded there.
    """
    future: Future[R] = Future(loop=runtime.loop)
    future.runtime = runtime

    async def wait() -> None:
        try:
            future.settle(0, await awaitable)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            future.fail(0, error)

    def begin() -> None:
        task = runtime.tasks.start(wait(), name="waiting")
        # As a callback of the future this comes after the task's first step, so that a stop that is given up at once has begun as well.
        future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)

    on_loop(runtime, begin)
    return future
