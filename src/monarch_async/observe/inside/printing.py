"""What the processes of a host have printed, as its agent keeps it, in bytes: who reads it knows best where a line ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress
from monarch_async.observe.inside.cells import Name
from monarch_async.observe.inside.host import agent_of

if TYPE_CHECKING:  # where there is no agent, what it needs is not loaded either
    from monarch_async._runtime.agent import Agent

__all__ = ["last_output", "output"]

AT_ONCE = 256 << 10
"""Bytes of one process in one answer."""
LONGEST_WAIT = 60.0

Piece = tuple[ProcAddress, bytes, int]
"""Whose it is, what it has printed, and how many bytes that makes in all."""


async def output(runtime: Runtime, names: Sequence[Name] | None, read: Mapping[str, int], wait: float) -> list[Piece]:
    """What processes of these names, or all, have printed after so many bytes, by uid. Where nothing has come, waits for it some seconds.

    What is longer than `AT_ONCE` comes in several answers.
    """
    agent = agent_of(runtime)
    wanted = None if names is None else {(mesh, rank) for mesh, rank in names}
    news = asyncio.Event()
    agent.on_output.append(news.set)
    try:
        async with asyncio.timeout(min(wait, LONGEST_WAIT)):
            while not (found := _after(agent, wanted, read)):
                news.clear()
                await news.wait()
        return found
    except TimeoutError:
        return []
    finally:
        agent.on_output.remove(news.set)


def _after(agent: Agent, wanted: set[Name] | None, read: Mapping[str, int]) -> list[Piece]:
    found = []
    for uid, (me, reader) in agent.printed.items():
        if reader.total > read.get(uid, 0) and (wanted is None or (me.name, me.rank) in wanted or (me.name, -1) in wanted):
            found.append((me, *reader.since(read.get(uid, 0), AT_ONCE)))
    return found


def last_output(runtime: Runtime, name: str) -> str:
    """What the last process of this name, ``gpus[3]``, has printed that has printed anything; also of one that is gone."""
    readers = [reader for me, reader in agent_of(runtime).printed.values() if str(me) == name and reader.total]
    return readers[-1].text() if readers else ""
