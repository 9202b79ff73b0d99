"""What the tests of the tree have behind the agent."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from monarch_async import Actor, Port, concurrent_endpoint, context, endpoint
from monarch_async._core.events import Evidence
from monarch_async.ambient import current_runtime

__all__ = ["Member"]


class Member(Actor):
    """Does what the tests want."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.log: list[str] = []
        self.kept: Any = None

    @endpoint
    async def take(self, number: int, filler: Any = None) -> int:
        self.seen.append(number)
        return number

    @endpoint
    async def all(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    async def rank(self) -> tuple[int, dict[str, int]]:
        point = context().message_rank
        return point.rank, dict(point)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def fail(self, rank: int) -> int:
        if context().message_rank.rank == rank:
            raise LookupError(f"no such thing at {rank}")
        return rank

    @endpoint
    async def die(self, rank: int) -> int:
        if context().message_rank.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(30)
        return rank

    @endpoint
    async def sleep(self) -> None:
        self.log.append("began")
        try:
            await asyncio.sleep(30)
        finally:
            self.log.append("ended")

    @concurrent_endpoint
    async def begun(self) -> None:
        """Returns when `sleep` runs."""
        while not self.log:  # noqa: ASYNC110  # another process sees nothing else of it
            await asyncio.sleep(0.002)

    @concurrent_endpoint
    async def finished(self) -> None:
        """Returns when it has ended."""
        while "ended" not in self.log:  # noqa: ASYNC110  # the same
            await asyncio.sleep(0.002)

    @concurrent_endpoint
    async def sleep_beside(self) -> None:
        self.log.append("began")
        try:
            await asyncio.sleep(30)
        finally:
            self.log.append("ended")

    @endpoint
    async def sleep_all(self, mesh: Any) -> None:
        await mesh.sleep_beside.call()

    @endpoint
    async def story(self) -> list[str]:
        return self.log

    @endpoint
    async def forget_agent(self) -> None:
        """Lose every session with the agent of this host."""
        runtime = current_runtime()
        peer = runtime.peers[runtime.agent.uid]
        for link in list(peer.links):
            peer.ended(link, Evidence("cut"))

    @endpoint
    async def double(self, array: Any) -> Any:
        return array * 2

    @endpoint
    async def send_to(self, port: Port[int]) -> None:
        port.send(context().message_rank.rank)

    @endpoint
    async def ask_all(self, mesh: Any, number: int) -> list[int]:
        for other in range(number):
            mesh.take.broadcast(other)
        return list((await mesh.take.call(number)).values())

    @endpoint
    async def ask_through(self, others: Any, back: Any) -> None:
        await others.ask_back.call(back)

    @endpoint
    async def ask_back(self, back: Any) -> None:
        await back.slice(gpus=0).take.call_one(1)
