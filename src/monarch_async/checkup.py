"""Asking the agents of several hosts for the health of processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from monarch_async._runtime.asking import ask
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import MonarchError
from monarch_async.health import Health, ProcState
from monarch_async.ids import ProcAddress

__all__ = ["check_up"]


async def check_up(runtime: Runtime, procs: Sequence[tuple[ProcAddress, ProcAddress]]) -> list[Health]:
    """The health of processes, each given with its agent, in their order. Takes at most for the option `health_timeout`."""
    by_agent: dict[ProcAddress, list[str]] = {}
    known: dict[str, Health] = {}
    for address, agent in procs:
        if address.uid == runtime.me.uid:  # whoever can ask is not stuck
            known[address.uid] = Health(ProcState.BUSY if runtime.busy else ProcState.READY, pid=os.getpid(), why="it is the one that asks")
        else:
            by_agent.setdefault(agent, []).append(address.uid)
    for answers in await asyncio.gather(*(_ask_agent(runtime, agent, uids) for agent, uids in by_agent.items())):
        known.update(answers)
    return [known[address.uid] for address, _ in procs]


async def _ask_agent(runtime: Runtime, agent: ProcAddress, uids: list[str]) -> dict[str, Health]:
    up = runtime.hosts_up.get(agent.host)
    if up is not None and not up.done():
        return dict.fromkeys(uids, Health(ProcState.STARTING, why="the agent of its host is being started"))
    limit = runtime.options.health_timeout
    try:
        if up is not None:
            up.result()
        async with asyncio.timeout(limit):
            answers: list[Health] = await ask(runtime, agent, "health", uids)
    except TimeoutError:
        return dict.fromkeys(uids, Health(ProcState.UNREACHABLE, why=f"the agent of its host does not answer within {limit:g} s"))
    except MonarchError as error:
        return dict.fromkeys(uids, Health(ProcState.UNREACHABLE, why=f"the agent of its host can't be asked: {error}"))
    return dict(zip(uids, answers, strict=True))
