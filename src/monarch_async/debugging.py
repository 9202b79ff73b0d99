"""Speaking with handlers that have stopped at ``breakpoint()``; see docs/repl.md for what stops and what goes on.

`stopped` finds them, `command` gives one of them a command for pdb, `stop_next` has actors stop at the next message that they handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from monarch_async._runtime.debug import Said, Stop
from monarch_async._runtime.service import ask
from monarch_async.ambient import current_runtime
from monarch_async.errors import ActorDied
from monarch_async.ids import ProcAddress

__all__ = ["Said", "Stopped", "command", "known_processes", "stop_next", "stopped"]


class Stopped(NamedTuple):
    """One handler in pdb: `actor` (``trainer[3]``, or the thread where it is no actor's), its endpoint, and the process it is in."""

    actor: str
    process: ProcAddress
    stop: Stop

    @property
    def where(self) -> str:
        """``train.py:12``, as a path."""
        return f"{self.stop.file}:{self.stop.line}"


def known_processes() -> list[ProcAddress]:
    """The worker processes that this one has to do with."""
    runtime = current_runtime()
    return [
        peer.address
        for peer in runtime.peers.values()
        if peer.evidence is None and peer.address.uid not in (peer.address.host, runtime.client.uid)
    ]


async def stopped(processes: Iterable[ProcAddress]) -> list[Stopped]:
    """The handlers in these processes that are in pdb, in order of their actors."""
    runtime = current_runtime()
    chosen = list(processes)
    answers = await asyncio.gather(*(ask(runtime, process, "debug_list") for process in chosen), return_exceptions=True)
    found: list[Stopped] = []
    for process, answer in zip(chosen, answers, strict=True):
        if isinstance(answer, ActorDied):
            continue  # it has ended: nothing waits there
        if isinstance(answer, BaseException):
            raise answer
        found += [Stopped(f"{stop.mesh}[{stop.rank}]" if stop.mesh else stop.thread, process, stop) for stop in answer]
    return sorted(found, key=lambda one: (one.stop.mesh, one.stop.rank, one.stop.number))


async def command(handler: Stopped, line: str) -> Said:
    """Give pdb a line; done when it waits for the next one, or is over. Cancelled, it leaves the handler as it is.

    Raises `UsageError` when it does not wait for a command, and `ActorDied` when its process has ended.
    """
    said: Said = await ask(current_runtime(), handler.process, "debug_command", handler.stop.number, line)
    return said


async def stop_next(processes: Iterable[ProcAddress], mesh: str, rank: int | None = None) -> int:
    """Have actors of this mesh, all or one rank, stop at the first line of the next message that they handle; returns how many."""
    runtime = current_runtime()
    return sum(await asyncio.gather(*(ask(runtime, process, "debug_arm", mesh, rank) for process in processes)))
