"""Handlers that can stop in the middle of a step: they run in a thread of their own, in step with the loop.

Theory: a coroutine that stops in a debugger is in the middle of a call, which asyncio can't suspend. A thread can. So each step of such a
handler is made in a thread of its own while the loop's thread waits for it; only one of the two ever runs. To everybody else this is a step
like any other: same task, same loop, same context. Only when the handler *parks* does the loop's thread go on without it, with all that
else is to be done, until what it parks for is done; then it hands over again.

Rules:

* Only handlers that may stop are run like this, since it costs some 25 µs a step and 150 µs a call: those that mention ``breakpoint``, or
  call what does by a name that can be found in their class or module, and those of actors that a debugger has asked for.
* A cancellation that comes while the handler is parked ends the parking, and is raised at its next await, as it would be in the middle of
  any step.
* What the handler sets in `contextvars` is set in the task's context when it has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from queue import SimpleQueue
from types import CodeType, FunctionType
from typing import Any

from monarch_async._runtime.context import ASYNC, Handler
from monarch_async._runtime.current import find_runtime
from monarch_async._runtime.runtime import Runtime

__all__ = ["Abandoned", "Stepper", "all_in_steps", "current_stepper", "in_steps", "may_stop", "where_stops"]

_STOPS = "breakpoint"
_LOOKED_AT = 200
"""Functions that are looked at to find whether a handler may stop."""


class Abandoned(BaseException):
    """Raised in a handler that is parked when its task is gone."""


_Outcome = tuple[str, Any]
"""What came of letting the thread run: ``returned``, ``raised``, ``awaits`` or ``parked``, and the value of that."""


class _Here(threading.local):
    stepper: Stepper | None = None


_here = _Here()


def current_stepper() -> Stepper | None:
    """The one whose thread this is."""
    return _here.stepper


class Stepper:
    """One run of a coroutine in a thread. Await it in the task that the coroutine is to belong to."""

    def __init__(self, runtime: Runtime, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        self.runtime = runtime
        self.on_end: Callable[[], None] | None = None  # called in the thread when the coroutine has ended
        self.on_cancel: Callable[[], None] | None = None  # called in the loop's thread while the handler is parked
        self._coroutine = coroutine
        self._context = contextvars.copy_context()
        self._jobs: SimpleQueue[Callable[[], _Outcome] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._ident = thread.ident or 0

    # In the thread.

    def _work(self) -> None:
        _here.stepper = self
        asyncio._set_running_loop(self.runtime.loop)
        while (job := self._jobs.get()) is not None:
            outcome = self._context.run(job)
            if outcome[0] != "awaits" and self.on_end is not None:
                self.on_end()
            self._outcomes.put(outcome)

    def _step(self, function: Callable[[Any], Any], value: Any) -> _Outcome:
        try:
            return ("awaits", function(value))
        except StopIteration as end:
            return ("returned", end.value)
        except BaseException as error:
            return ("raised", error)

    def park(self, until: asyncio.Future[None]) -> None:
        """Let the loop go on until the future, one of the loop's, is done. Called by the handler, in the middle of a step."""
        self._outcomes.put(("parked", until))
        if self._jobs.get() is None:
            self._jobs.put(None)
            raise Abandoned

    # In the loop's thread.

    def __await__(self) -> Generator[Any, Any, Any]:
        ended = False
        cancelled: BaseException | None = None  # to be raised at the next await
        try:
            outcome = self._run(lambda: self._step(self._coroutine.send, None))
            while True:
                kind, value = outcome
                if kind == "parked":
                    try:
                        yield from value
                    except asyncio.CancelledError as error:
                        cancelled = error
                        if self.on_cancel is not None:
                            self.on_cancel()
                    outcome = self._run(_nothing)
                elif kind == "awaits":
                    outcome = yield from self._await(value, cancelled)
                    cancelled = None
                else:
                    ended = True
                    if kind == "raised":
                        raise value
                    return value
        finally:
            self._jobs.put(None)
            if ended:
                for variable, set_to in self._context.items():
                    if variable.get(_missing) is not set_to:
                        variable.set(set_to)

    def _await(self, waits_for: Any, cancelled: BaseException | None) -> Generator[Any, Any, _Outcome]:
        """The task waits for what the coroutine does; then the next step."""
        error = cancelled
        if error is not None and waits_for is not None and waits_for.cancel():
            error = None  # as asyncio does it: what is awaited brings the cancellation
        value: Any = None
        if error is None:
            try:
                value = yield waits_for
            except BaseException as raised:
                error = raised
        elif waits_for is not None:
            waits_for._asyncio_future_blocking = False
        if error is not None:
            raised_there = error
            return self._run(lambda: self._step(self._coroutine.throw, raised_there))
        return self._run(lambda: self._step(self._coroutine.send, value))

    def _run(self, job: Callable[[], _Outcome]) -> _Outcome:
        """Let the thread run until it has come to something. It is the runtime's thread meanwhile."""
        runtime = self.runtime
        before, runtime.thread = runtime.thread, self._ident
        try:
            self._jobs.put(job)
            return self._outcomes.get()
        finally:
            runtime.thread = before


def _nothing() -> _Outcome:
    raise AssertionError("the thread is parked: it only has to go on")


_missing = object()


def in_steps(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The same coroutine function, run in a thread that can park."""

    @functools.wraps(function)
    async def stepped(*args: Any, **kwargs: Any) -> Any:
        runtime = find_runtime()
        assert runtime is not None
        return await Stepper(runtime, function(*args, **kwargs), f"steps of {function.__qualname__}")

    return stepped


def all_in_steps(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """The same handlers; those on the loop are run in steps."""
    return {name: _in_steps(handler) if handler.kind == ASYNC else handler for name, handler in handlers.items()}


def where_stops(handlers: Mapping[str, Handler]) -> Mapping[str, Handler]:
    """The same handlers; those on the loop that may stop are run in steps."""
    methods = {name.removesuffix("()"): handler.function for name, handler in handlers.items()}
    stopping = {name for name, handler in handlers.items() if handler.kind == ASYNC and may_stop(handler.function, methods)}
    if not stopping:
        return handlers
    return {name: _in_steps(handler) if name in stopping else handler for name, handler in handlers.items()}


def _in_steps(handler: Handler) -> Handler:
    if getattr(handler.function, "__code__", None) is _STEPPED:
        return handler  # it is one already
    return Handler(in_steps(handler.function), handler.kind, handler.concurrent, handler.explicit_port)


def may_stop(function: Any, methods: Mapping[str, Any]) -> bool:
    """Whether a function names ``breakpoint``, or another of its module or of these methods that does."""
    seen: set[CodeType] = set()
    ahead: list[tuple[CodeType, Mapping[str, Any]]] = []

    def look_at(found: Any) -> None:
        found = inspect.unwrap(found) if isinstance(found, FunctionType) else None
        if found is not None and found.__code__ not in seen and len(seen) < _LOOKED_AT:
            seen.add(found.__code__)
            ahead.append((found.__code__, found.__globals__))

    look_at(function)
    while ahead:
        code, names = ahead.pop()
        if _STOPS in code.co_names:
            return True
        ahead += [(inner, names) for inner in code.co_consts if isinstance(inner, CodeType)]
        for name in code.co_names:
            look_at(methods.get(name))
            other = names.get(name)
            if getattr(other, "__module__", None) == names.get("__name__"):
                look_at(other)
    return False


_STEPPED = in_steps(asyncio.sleep).__code__
"""The code of all that `in_steps` has made."""
