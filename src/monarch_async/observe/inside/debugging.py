"""Handlers of this process that have stopped at ``breakpoint()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import UsageError

if TYPE_CHECKING:
    from monarch_async._runtime.debug import Debugger, Stop

__all__ = ["pdb_command", "stop_next", "stops"]


def stops(runtime: Runtime) -> list[Stop]:
    """All of them."""
    debugger: Debugger | None = runtime.parts.get("debugger")
    return debugger.stops() if debugger is not None else []


async def pdb_command(runtime: Runtime, who: str, subject: str, number: int, line: str) -> tuple[str, str, str]:
    """Give one a line for pdb. Raises `UsageError` if it does not wait for one."""
    debugger: Debugger | None = runtime.parts.get("debugger")
    if debugger is None:
        raise UsageError(f"{runtime.me} has no debugger: only worker processes have")
    return await debugger.command(number, line)


def stop_next(runtime: Runtime, who: str, subject: str, mesh: str, rank: int) -> list[str]:
    """Have the next handlers of these actors stop at their first line; returns their names. A rank of -1 is every one."""
    debugger: Debugger | None = runtime.parts.get("debugger")
    return debugger.stop_next(mesh, rank) if debugger is not None else []
