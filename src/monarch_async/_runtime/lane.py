"""Lanes: what this process has under way to one remote actor, and the bound on it.

A message is under way from the moment it is sent until it has left the actor's mailbox: a call until its answer comes, a cast until
the actor's process grants credit for it. So neither mailbox, link nor process grows without bound, whoever is slow.

Rules:

* At the hard limit a send raises `ChannelFull` and sends nothing. A send that is awaited returns only when less than half of it is in use,
  so that awaiting senders never meet the hard limit.
* One message larger than the limit in bytes passes when nothing else is under way, or so little that it does not matter. What has no
  bytes of arguments takes none, and passes that limit always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

from monarch_async._core.events import Evidence
from monarch_async._core.framing import CALL, PORT, pack_message
from monarch_async._runtime.context import Waiter
from monarch_async._runtime.link import INLINE, Link
from monarch_async._runtime.room import Room
from monarch_async.errors import ChannelFull, PortClosed
from monarch_async.ids import ProcAddress

__all__ = ["Lane", "Route"]

LITTLE = 10
"""Of the limit in bytes, a part of 2 to the power of minus this is little."""


class Route(Protocol):
    """The process at the other end, as its lanes see it."""

    address: ProcAddress

    link: Link | None
    links: set[Link]

    @property
    def why_gone(self) -> Evidence | None:
        """Why nothing can be sent to it."""

    def turn_to_tree(self) -> tuple[int, int]:
        """What to say with the next message, which goes through the tree; see `tree`."""

    def open(self, waiter: Waiter | None, request: int, lane: Lane) -> Link | None:
        """The link to send over; `None`, after telling the waiter, if the process is gone."""


@final
class Lane(Room):
    """The account with one actor: `key` in the process of `peer`, rank `rank` of the mesh named `mesh`."""

    __slots__ = ("__weakref__", "byte_limit", "bytes", "closed", "key", "moves", "peer")

    def __init__(self, peer: Route, key: int, mesh: str, rank: int, limit: int, byte_limit: int) -> None:
        super().__init__(mesh, rank, limit)
        self.peer = peer
        self.key = key
        self.byte_limit = byte_limit
        self.closed = False
        self.moves = False  # to the process that takes the place of one that has ended
        self.bytes = 0  # of the arguments of what is under way

    def call(
        self,
        endpoint: str,
        request: int,
        rank: int,
        body: bytes,
        buffers: Sequence[memoryview],
        extras: dict[str, Any] | None,
        waiter: Waiter,
    ) -> None:
        """Send a call that `waiter` waits for. Raises `ChannelFull`, `FrameTooLarge`; everything later goes to the waiter."""
        size = len(body)
        if buffers:
            size += sum(view.nbytes for view in buffers)
        self.check(size)
        link = self.peer.link or self.peer.open(waiter, request, self)
        if link is None:
            return
        if size > INLINE or buffers:
            link.send_large([CALL, self.key, endpoint, request, rank, b"", extras], body, buffers)
        elif extras is None:
            link.send(pack_message((CALL, self.key, endpoint, request, rank, body)))
        else:
            link.send(pack_message((CALL, self.key, endpoint, request, rank, body, extras)))
        link.pending[request] = (waiter, self, size)
        self.messages += 1
        self.bytes += size

    def cast(self, endpoint: str, rank: int, body: bytes, buffers: Sequence[memoryview], extras: dict[str, Any] | None) -> bool:
        """Send a message that wants no answer; False if the process is known to be gone. Raises `ChannelFull`, `FrameTooLarge`."""
        size = len(body)
        if buffers:
            size += sum(view.nbytes for view in buffers)
        self.check(size)
        link = self.peer.link or self.peer.open(None, 0, self)
        if link is None:
            return False
        if size > INLINE or buffers:
            link.send_large([CALL, self.key, endpoint, 0, rank, b"", extras], body, buffers)
        elif extras is None:
            link.send(pack_message((CALL, self.key, endpoint, 0, rank, body)))
        else:
            link.send(pack_message((CALL, self.key, endpoint, 0, rank, body, extras)))
        self.messages += 1
        self.bytes += size
        return True

    def push(self, rank: int, body: bytes, buffers: Sequence[memoryview], fault: bytes | None) -> bool:
        """Send to port `key`: a value, or a fault in its place; False if its process is gone. Raises as `cast`, and `PortClosed`."""
        if self.closed:
            raise PortClosed(f"{self.mesh} is closed: its receiver takes nothing more")
        size = len(body) + sum(view.nbytes for view in buffers)
        self.check(size)
        link = self.peer.link or self.peer.open(None, 0, self)
        if link is None:
            return False
        if size > INLINE or buffers:
            link.send_large([PORT, self.key, rank, b"", fault], body, buffers)
        else:
            link.send(pack_message((PORT, self.key, rank, body, fault)))
        self.messages += 1
        self.bytes += size
        return True

    def close(self) -> None:
        """The port is closed at the other end."""
        self.closed = True
        self.reset()

    def check(self, size: int) -> None:
        """Raise `ChannelFull` if a message of `size` bytes may not be sent now."""
        if self.messages >= self.limit:
            super().check(size)
        if self.bytes + size > self.byte_limit and size and self.bytes > self.byte_limit >> LITTLE:
            raise ChannelFull(
                f"{self.bytes} bytes are under way to {self.mesh}[{self.rank}] and {size} more would pass the option "
                f"mailbox_bytes={self.byte_limit}: await what you send, or raise it",
                limit=self.byte_limit,
                option="mailbox_bytes",
            )

    def credit(self, messages: int, size: int) -> None:
        """So many messages have left the mailbox."""
        self.messages -= messages
        self.bytes -= size
        if self.waiters and self.has_room:
            self._wake()

    def reset(self) -> None:
        """Nothing is under way any more: the process, or the session with it, is gone."""
        self.messages = self.bytes = 0
        self._wake()

    @property
    def has_room(self) -> bool:
        """Whether an awaited send may return."""
        return self.messages * 2 <= self.limit and self.bytes * 2 <= self.byte_limit
