"""The account with an actor of this very process; the counterpart of `lane` without a link.

Arguments are never shared: what is not immutable is copied, as if it had travelled.
"""

from __future__ import annotations

from typing import Any, Protocol, final

from monarch_async._core.codec import copy_value, is_plain
from monarch_async._runtime.context import Message, Origin, Waiter
from monarch_async._runtime.room import Room

__all__ = ["LocalLane", "Neighbourhood"]


class Neighbourhood(Protocol):
    """What a local account needs of its runtime."""

    local_calls: dict[int, Message]

    @property
    def local(self) -> Origin: ...

    def post_local(self, key: int, message: Message) -> None:
        """Deliver a message to actor `key`."""


@final
class LocalLane(Room):
    """At most `limit` messages may be under way to actor `key`; see `Lane` for the rules."""

    __slots__ = ("__weakref__", "key", "runtime")

    def __init__(self, runtime: Neighbourhood, key: int, mesh: str, rank: int, limit: int) -> None:
        super().__init__(mesh, rank, limit)
        self.runtime = runtime
        self.key = key

    def send(
        self,
        endpoint: str,
        request: int,
        rank: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        extras: dict[str, Any] | None,
        waiter: Waiter | None,
    ) -> None:
        """Send a call, or a cast if nobody waits. Raises `ChannelFull`, and `TypeError` for what can't be copied."""
        self.check(0)  # there is no bound in bytes: nothing is copied twice here
        runtime = self.runtime
        message = Message(runtime.local, endpoint, request, rank, b"", None, extras)
        if kwargs or not is_plain(args):
            args, kwargs = copy_value((args, kwargs))
        message.args = (args, kwargs)
        message.lane = self
        if request:
            message.waiter = waiter
            runtime.local_calls[request] = message
        self.messages += 1
        runtime.post_local(self.key, message)

    def credit(self, messages: int, size: int) -> None:
        """So many messages have left the mailbox."""
        self.messages -= messages
        if self.waiters and self.has_room:
            self._wake()

    def reset(self) -> None:
        """Nothing is under way any more."""
        self.messages = 0
        self._wake()
