"""The bound on what is under way to one actor, and waiting for room within it; what `Lane` and `LocalLane` have in common."""

from __future__ import annotations

import asyncio

from monarch_async.errors import ChannelFull

__all__ = ["Room"]


class Room:
    """At most `limit` messages under way to rank `rank` of the mesh named `mesh`."""

    __slots__ = ("limit", "mesh", "messages", "rank", "waiters")

    def __init__(self, mesh: str, rank: int, limit: int) -> None:
        self.mesh = mesh
        self.rank = rank
        self.limit = limit
        self.messages = 0  # under way
        self.waiters: list[asyncio.Future[None]] = []  # sends that wait for room

    def check(self, size: int) -> None:
        """Raise `ChannelFull` if a message of `size` bytes may not be sent now."""
        if self.messages >= self.limit:
            raise ChannelFull(
                f"{self.messages} messages are under way to {self.mesh}[{self.rank}], as many as the option "
                f"mailbox_messages={self.limit} allows: await what you send, or raise it",
                limit=self.limit,
                option="mailbox_messages",
            )

    @property
    def has_room(self) -> bool:
        """Whether an awaited send may return."""
        return self.messages * 2 <= self.limit

    async def wait_for_room(self) -> None:
        """Wait until less than half of the limit is in use."""
        while not self.has_room:
            waiter = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self.waiters:
                    self.waiters.remove(waiter)

    def _wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()
