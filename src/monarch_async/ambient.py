"""The runtime that code here belongs to, started when it is first needed.

* In a coroutine it lives in the running loop, and ends with it: when `asyncio.run` cancels what is left, everything that was spawned
  is stopped.
* In a synchronous script or thread it lives in a loop of its own, in a background thread, until the program ends or `shutdown_context`.
* In a worker process it is there from the start.
* In a process forked from one of these it is started anew; what the parent has is the parent's to end.

The global event loop policy is never touched.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

from monarch_async._runtime.client import Client
from monarch_async._runtime.current import find_runtime
from monarch_async._runtime.loops import new_event_loop
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import UsageError
from monarch_async.options import Options
from monarch_async.supervise import MeshFailure, call_unhandled_fault_hook, is_default_hook

__all__ = ["configure", "current_runtime", "on_loop", "run_on", "shutdown", "shutdown_context"]

T = TypeVar("T")

LAST_WORDS = 0.05
"""Seconds for which output may still be on its way when the end of a process is known already."""

client_services: dict[str, Callable[..., Any]] = {}
"""What modules above this one add to the services of a client's runtime."""

_options = Options()
_clients_lock = threading.Lock()
_clients: dict[asyncio.AbstractEventLoop, Client] = {}
# Another lock than that of `_clients`: whoever holds it waits for the new loop's thread, which enters its client there.
_background_lock = threading.Lock()
_background: _BackgroundLoop | None = None


def configure(**changes: Any) -> Options:
    """Change settings (see `Options`) for runtimes that are started from now on; returns them. Unknown names raise `TypeError`."""
    global _options
    _options = _options.with_(**changes)
    return _options


def current_runtime() -> Runtime:
    """The runtime that code here belongs to; started, for a client, if there is none yet."""
    runtime = find_runtime()
    if runtime is not None:
        return runtime
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _background_loop().runtime
    return _start_here(loop).runtime


def client_of(runtime: Runtime) -> Client | None:
    """The client that a runtime belongs to; `None` in a worker process."""
    return _clients.get(runtime.loop)


def _start_here(loop: asyncio.AbstractEventLoop) -> Client:
    with _clients_lock:
        _forget_closed_loops()
        client = Client(_options)
        client.runtime.unhandled = partial(_unhandled, client)
        client.runtime.service = {**client.runtime.service, **client_services}
        _clients[loop] = client
        # Cancelled by asyncio.run at its end, while the loop still runs: the time to clean up.
        client.guardian = loop.create_task(_guard(client), name="monarch_async guardian")
    return client


async def _guard(client: Client) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await _close(client)


async def _close(client: Client) -> None:
    client.runtime.unhandled = _ignore  # what ends now does so on purpose
    try:
        await client.close()
    finally:
        _clients.pop(client.runtime.loop, None)


def _unhandled(client: Client, failure: MeshFailure) -> None:
    """Call the program's hook. The default one ends the program, so that one waits for the last words of a process that has ended."""

    def call() -> None:
        client.show_all()
        contextvars.Context().run(call_unhandled_fault_hook, failure)  # not as whoever has started the runtime

    if failure.process and is_default_hook():
        client.runtime.loop.call_later(LAST_WORDS, call)
    else:
        call()


def _ignore(failure: MeshFailure) -> None:
    """The program is over."""


def _forget_closed_loops() -> None:
    """Loops that were closed without cancelling their tasks: end what they left."""
    for loop, client in list(_clients.items()):
        if loop.is_closed():
            del _clients[loop]
            client.abandon()


async def shutdown() -> None:
    """Stop everything that was spawned from the running loop, and wait until it is gone. Nothing happens if there is nothing."""
    client = _clients.get(asyncio.get_running_loop())
    if client is not None:
        guardian = client.guardian
        guardian.cancel()
        await asyncio.wait([guardian])


class ShuttingDown:
    """What `shutdown_context` returns: await it, or `get()` it in synchronous code."""

    def __init__(self, task: asyncio.Task[None] | None) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, None]:
        if self._task is not None:
            yield from self._task.__await__()

    def get(self, timeout: float | None = None) -> None:
        """Return when all is stopped; in synchronous code it is already."""
        if self._task is not None and not self._task.done():
            raise UsageError("await shutdown_context() in asynchronous code")


def shutdown_context() -> ShuttingDown:
    """Monarch's name for `shutdown`. In synchronous code it blocks until everything that was spawned is stopped."""
    global _background
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        with _background_lock:
            background, _background = _background, None
        if background is not None:
            background.stop()
        return ShuttingDown(None)
    return ShuttingDown(loop.create_task(shutdown()))


class _BackgroundLoop:
    """A loop in a thread of its own, with a client in it, for code that has none."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="monarch_async loop", daemon=True)
        self._thread.start()
        self.runtime = run_on(self.loop, self._start()).runtime

    async def _start(self) -> Client:
        return _start_here(self.loop)

    def stop(self) -> None:
        if self._thread.is_alive():
            run_on(self.loop, shutdown())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


def _background_loop() -> _BackgroundLoop:
    global _background
    with _background_lock:
        if _background is None:
            _background = _BackgroundLoop()
        return _background


def on_loop(runtime: Runtime, function: Callable[[], T]) -> T:
    """Run a function in the runtime's thread, and wait for it; with the context of the handler that asks."""
    if threading.get_ident() == runtime.thread:
        return function()
    context = contextvars.copy_context()

    async def run() -> T:
        return context.run(function)

    return run_on(runtime.loop, run())


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine on a loop that runs in another thread, and block until it is done."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coroutine.close()
        raise UsageError("this would block the event loop that has to do it: await it there")
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout)


def _at_exit() -> None:
    with _background_lock:
        background = _background
    if background is not None:
        background.stop()
    for client in list(_clients.values()):
        client.abandon()


atexit.register(_at_exit)


def _after_fork() -> None:
    """In the child: what was started is the parent's, and so are the locks, which another thread of it may have held."""
    global _background, _background_lock, _clients_lock
    for client in _clients.values():
        client.disown()
    _clients.clear()
    _background = None
    _background_lock, _clients_lock = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
