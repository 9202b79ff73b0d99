"""Actors that do what they are told. Nothing is imported here that holds up the processes that they are in."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from monarch_async import ProcMesh, ProcState, endpoint
from monarch_async._runtime.context import current_message
from monarch_async.actor import Actor

__all__ = ["Worker", "settled"]


class Worker(Actor):
    """Does what it is told."""

    @endpoint
    async def step(self, seconds: float = 0.0) -> float:
        if seconds:
            await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def length(self, data: bytes) -> int:
        return len(data)

    @endpoint
    async def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    async def hold(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  # the loop has to be late

    @endpoint
    async def ask(self, other: Any, seconds: float = 0.0) -> float:
        answer: float = await other.step.call_one(seconds)
        return answer

    @endpoint
    async def tell(self, other: Any) -> None:
        await other.step.broadcast(0.0)

    @endpoint
    async def ask_all(self, others: Any) -> None:
        await others.step.call(0.001)

    @endpoint
    async def is_watched(self) -> bool:
        message = current_message.get()
        assert message is not None
        return message.cell.handlers is not message.cell.behavior.handlers


async def settled(*meshes: ProcMesh) -> None:
    """Wait until the host of these processes knows that they answer, which is a look of their watchdogs later than they do."""
    async with asyncio.timeout(20):
        for mesh in meshes:
            while {health.state for health in (await mesh.health()).values()} - {ProcState.READY, ProcState.BUSY}:
                await asyncio.sleep(0.02)
