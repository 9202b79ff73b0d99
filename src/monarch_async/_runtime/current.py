"""Which runtime code belongs to: the one of the running loop, of the handler it runs in, or of this process.

A worker process has one. A client may have one in each event loop it runs, and one in a background thread for synchronous code.

A process that was forked from one of these has none: its parent's sockets are not its own, so whatever would use them raises `UsageError`.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Any, NoReturn

from monarch_async._runtime.context import current_message
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import UsageError

__all__ = ["find_runtime", "install", "runtimes", "uninstall"]

_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Runtime] = weakref.WeakKeyDictionary()


def install(runtime: Runtime) -> None:
    """This runtime answers for its loop from now on."""
    _by_loop[runtime.loop] = runtime


def uninstall(runtime: Runtime) -> None:
    """It does so no more."""
    if _by_loop.get(runtime.loop) is runtime:
        del _by_loop[runtime.loop]


def runtimes() -> list[Runtime]:
    """All of this process that are not closed."""
    return list(_by_loop.values())


def find_runtime() -> Runtime | None:
    """The runtime that code here belongs to, if there is one: of the running loop, else of the handler, else the only one."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return _by_loop.get(loop)
    message = current_message.get()
    if message is not None and message.cell is not None:
        runtime: Runtime = message.cell.runtime
        return runtime
    alive = [runtime for runtime in _by_loop.values() if not runtime.closing]
    return alive[0] if len(alive) == 1 else None


class _ParentsLoop:
    """In a forked child, what stands for the loop of the parent's runtime: everything that is sent or awaited asks for that."""

    def is_closed(self) -> bool:
        return True

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            "this process was forked from one that holds actors, and can't use them: use them in the parent, or start it with 'spawn'"
        )


def _disown() -> None:
    no_loop: Any = _ParentsLoop()
    for runtime in runtimes():
        runtime.loop = no_loop
        runtime.thread = 0  # no thread has this number, so none gets past the loop
    _by_loop.clear()


os.register_at_fork(after_in_child=_disown)
