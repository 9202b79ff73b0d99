"""Actors whose code on the loop can stop in the middle of a step: each has a thread, in which its steps are made in turn with the loop's.

Theory: a coroutine that stops in a debugger is in the middle of a call, which asyncio can't suspend. A thread can. So each step of such a
coroutine is made in a thread of the actor's while the loop's thread waits for it; only one of the two ever runs. To everybody else this is
a step like any other: same task, same loop, same context. Only when the code *parks* does the loop's thread go on without it, with all that
else is to be done, until what it parks for is done; then it hands over again.

Rules:

* Code can tell in which thread it runs: by what is kept for each thread (the current CUDA device, a connection of `sqlite3`), and in
  asyncio's debug mode. So no actor is run like this of itself, whatever its code mentions, but only where somebody has asked for it: all
  actors by the option ``debug``, the next handler of one by a debugger. It costs some 25 µs a step.
* An actor in steps has one thread for all of it, constructor and cleanup too, so that what it keeps there is there again. Only a coroutine
  of it whose step comes while another one is parked there gets a thread of its own, to its end.
* A cancellation that comes while a coroutine is parked ends the parking, and is raised at its next await, as it would be in the middle of
  any step.
* What it sets in `contextvars` is set in the task's context when it has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from monarch_async._core.events import Failure
from monarch_async._runtime.behavior import Behavior
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import ASYNC, Handler, Message
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.thread import ActorThread

__all__ = ["Abandoned", "StepThreads", "Stepper", "begin_steps", "current_stepper", "steps_of"]


class Abandoned(BaseException):
    """Raised in code that is parked when its task is gone."""


_Outcome = tuple[str, Any]
"""What came of letting the thread run: ``returned``, ``raised``, ``awaits`` or ``parked``, and the value of that."""
_Job = Callable[[], _Outcome]


class _Here(threading.local):
    stepper: Stepper | None = None


_here = _Here()


def current_stepper() -> Stepper | None:
    """Whose step this thread makes."""
    return _here.stepper


class _Thread:
    """One that makes steps, each while the loop's thread waits for what comes of it."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.parked: Stepper | None = None  # whose coroutine is, or was, in the middle of a step, and has it to its end
        self.jobs: SimpleQueue[tuple[Stepper | None, _Job] | None] = SimpleQueue()
        self.outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._ident = thread.ident or 0

    def _work(self) -> None:
        asyncio._set_running_loop(self.runtime.loop)
        while (given := self.jobs.get()) is not None:
            _here.stepper, job = given
            try:
                outcome = job()
            except BaseException as error:  # the loop waits for this
                outcome = ("raised", error)
            self.outcomes.put(outcome)

    def run(self, stepper: Stepper | None, job: _Job) -> _Outcome:
        """Let the thread run until it has come to something. It is the runtime's thread meanwhile. In the loop's thread."""
        runtime = self.runtime
        before, runtime.thread = runtime.thread, self._ident
        try:
            self.jobs.put((stepper, job))
            return self.outcomes.get()
        finally:
            runtime.thread = before

    def end(self) -> None:
        self.jobs.put(None)


class StepThreads:
    """The threads of one actor."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._first: _Thread | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns, or raises, that can't park."""
        context = contextvars.copy_context()
        kind, value = self.take(None).run(None, lambda: context.run(_call, function))
        for variable, set_to in context.items():
            if variable.get(_missing) is not set_to:
                variable.set(set_to)
        if kind == "raised":
            raise value
        return value

    def take(self, stepper: Stepper | None) -> _Thread:
        """The one to make a step in: the actor's own, unless somebody else is parked there."""
        if self._first is None:
            self._first = _Thread(self._runtime, f"steps of {self._name}")
        if self._first.parked in (None, stepper):
            return self._first
        return _Thread(self._runtime, f"steps of {self._name}, beside")

    def let_go(self, thread: _Thread, stepper: Stepper, *, ended: bool) -> None:
        """A coroutine makes no more steps there; if it has not `ended`, and is parked there, it leaves its code now."""
        parked = thread.parked is stepper
        if parked and ended:
            thread.parked = None
        elif parked and thread is self._first:
            self._first = None
        if thread is not self._first:
            thread.end()

    def close(self) -> None:
        """Let the actor's own end."""
        first, self._first = self._first, None
        if first is not None:
            first.end()


class Stepper:
    """One run of a coroutine in threads of its actor. Await it in the task that the coroutine is to belong to."""

    def __init__(self, threads: StepThreads, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.on_end: Callable[[], None] | None = None  # called in its thread when the coroutine has ended
        self.on_cancel: Callable[[], None] | None = None  # called in the loop's thread while it is parked
        self._threads = threads
        self._coroutine = coroutine
        self._context = contextvars.copy_context()
        self._thread: _Thread | None = None  # the one that it has to its end

    # In the thread.

    def _step(self, function: Callable[[Any], Any], value: Any) -> _Outcome:
        try:
            outcome = ("awaits", self._context.run(function, value))
        except StopIteration as end:
            outcome = ("returned", end.value)
        except BaseException as error:
            outcome = ("raised", error)
        if outcome[0] != "awaits" and self.on_end is not None:
            self.on_end()
        return outcome

    def park(self, until: asyncio.Future[None]) -> None:
        """Let the loop go on until the future, one of the loop's, is done. Called by the coroutine, in the middle of a step."""
        thread = self._thread
        assert thread is not None
        thread.parked = self
        thread.outcomes.put(("parked", until))
        given = thread.jobs.get()
        if given is None:
            thread.jobs.put(None)
            raise Abandoned
        _here.stepper = self

    # In the loop's thread.

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine  # by this name it is found by who asks where the task stands
        ended = False
        cancelled: BaseException | None = None  # to be raised at the next await
        try:
            outcome = self._run(lambda: self._step(coroutine.send, None))
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
            self._over(ended)

    def _over(self, ended: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._threads.let_go(thread, self, ended=ended)
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

    def _run(self, job: _Job) -> _Outcome:
        thread = self._thread
        if thread is None or (thread.parked is not None and thread.parked is not self):
            thread = self._thread = self._threads.take(self)
        return thread.run(self, job)


def _call(function: Callable[[], Any]) -> _Outcome:
    try:
        return "returned", function()
    except BaseException as error:
        return "raised", error


def _nothing() -> _Outcome:
    raise AssertionError("the thread is parked: it only has to go on")


_missing = object()


class _Stepped:
    """A behavior whose functions on the loop are run in steps."""

    def __init__(self, behavior: Behavior, threads: StepThreads) -> None:
        self._behavior = behavior
        self._threads = threads
        self.threaded = behavior.threaded
        self.handlers: Mapping[str, Handler] = {name: in_steps(handler, threads) for name, handler in behavior.handlers.items()}

    def construct(self) -> Any:
        if self.threaded:
            return self._behavior.construct()
        return self._threads.call(self._behavior.construct)

    async def restore(self, instance: Any, saved: bytes, thread: ActorThread | None) -> None:
        await Stepper(self._threads, self._behavior.restore(instance, saved, thread))

    async def cleanup(self, instance: Any, error: BaseException | None, thread: ActorThread | None) -> None:
        try:
            await Stepper(self._threads, self._behavior.cleanup(instance, error, thread))
        finally:
            self._threads.close()

    async def supervise(self, instance: Any, failure: Failure, thread: ActorThread | None) -> bool:
        return bool(await Stepper(self._threads, self._behavior.supervise(instance, failure, thread)))

    def port(self, message: Message) -> Any:
        return self._behavior.port(message)


def begin_steps(runtime: Runtime, cell: Cell) -> None:
    """Run an actor in steps, whose life is about to begin."""
    cell.behavior = behavior = _Stepped(cell.behavior, StepThreads(runtime, str(cell.identity)))
    cell.handlers = behavior.handlers


_steps: WeakKeyDictionary[Any, tuple[StepThreads, Callable[..., Coroutine[Any, Any, Any]]]] = WeakKeyDictionary()


def steps_of(function: Any) -> tuple[StepThreads, Callable[..., Coroutine[Any, Any, Any]]] | None:
    """The threads of a handler's function that is run in steps, and what it was made of; `None` for another one."""
    return _steps.get(function)


def in_steps(handler: Handler, threads: StepThreads) -> Handler:
    """The same handler; one on the loop is run in steps."""
    function = handler.function
    if handler.kind != ASYNC or not inspect.iscoroutinefunction(function):
        return handler

    @functools.wraps(function)
    async def stepped(*args: Any, **kwargs: Any) -> Any:
        return await Stepper(threads, function(*args, **kwargs))

    _steps[stepped] = threads, function
    return Handler(stepped, handler.kind, handler.concurrent, handler.explicit_port)
