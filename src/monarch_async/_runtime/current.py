"""Which runtime code belongs to: the one of the running loop, of the handler it runs in, or of this process.

A worker process has one. A client may have one in each event loop it runs, and one in a background thread for synchronous code.
"""

from __future__ import annotations

import asyncio
import weakref

from monarch_async._runtime.context import current_message
from monarch_async._runtime.runtime import Runtime

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
