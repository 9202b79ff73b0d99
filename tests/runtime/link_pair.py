"""Two links in one process over real sockets, what they were told to send and what they got: what the link tests share."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._channel.pool import BufferPool
from monarch_async._channel.stream import HIGH_WATER, Stream, open_stream
from monarch_async._core.framing import pack_message
from monarch_async._core.seal import Seal
from monarch_async._runtime.link import Link
from tests.channel.turns import turns_until
from tests.core.wire import Plain, call, plain

KEYS = (b"a" * 32, b"b" * 32)
Seals = tuple[Seal, Seal] | None


class CountingPool(BufferPool):
    """A pool that knows how many of its buffers are out."""

    def __init__(self) -> None:
        super().__init__()
        self.out = 0

    def take(self, size: int) -> Any:
        self.out += 1
        return super().take(size)

    def give(self, buffer: Any) -> None:
        self.out -= 1
        super().give(buffer)


class End:
    """A link with what it has got, and what it was told to send."""

    def __init__(self, max_frame: int = 1 << 30) -> None:
        self.pool = CountingPool()
        self.got: list[Plain] = []
        self.sent: list[Plain] = []
        self.batches: list[int] = []  # messages in each delivery
        self.lost: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.link = Link(asyncio.get_running_loop(), "s", self.deliver, max_frame=max_frame, pool=self.pool)
        self.link.on_lost = self.on_lost
        self.stream: Stream | None = None

    def deliver(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        self.batches.append(len(messages))
        self.got += plain([(messages, buffers)])
        self.changed.set()

    def on_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.changed.set()

    def small(self, number: int, size: int = 10) -> None:
        message = call(number, bytes([number % 256]) * size)
        self.link.send(pack_message(message))
        self.sent.append((message, []))

    def large(self, number: int, body: int, *sizes: int) -> None:
        whole = call(number, bytes([number % 256]) * body)
        buffers = [bytes([number % 251]) * size for size in sizes]
        self.link.send_large(call(number), whole[5], [memoryview(buffer) for buffer in buffers])
        self.sent.append((whole, buffers))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


async def opened(buffer: int = 0) -> tuple[Stream, Stream]:
    """Both ends of a new connection; `buffer` is the size of their sending buffers."""
    socks = socket.socketpair()
    for sock in socks:
        sock.setblocking(False)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return await open_stream(socks[0], server=True, patience=5), await open_stream(socks[1], server=False, patience=5)


def attach(one: End, other: End, streams: tuple[Stream, Stream], *, sealed: str = "") -> None:
    """Go on over a new connection, each told what the other has received; `sealed` names the digest, if it has seals."""
    one.stream, other.stream = streams
    seals: tuple[Seals, Seals] = (None, None)
    if sealed:
        seals = ((Seal(KEYS[0], sealed), Seal(KEYS[1], sealed)), (Seal(KEYS[1], sealed), Seal(KEYS[0], sealed)))
    received = one.link.last_received, other.link.last_received
    one.link.attach(one.stream, received[1], seals[0])
    other.link.attach(other.stream, received[0], seals[1])
    one.stream.bind(one.link, b"")
    other.stream.bind(other.link, b"")


async def join(one: End, other: End, *, sealed: str = "", buffer: int = 0) -> None:
    """Connect two links anew."""
    attach(one, other, await opened(buffer), sealed=sealed)


def gone(stream: Stream) -> bool:
    """Whether its transport has let go of the socket."""
    return stream._transport is None


def has(items: Sequence[object], count: int) -> bool:
    return len(items) == count


async def finish(*ends: End) -> None:
    """End the links and wait until their connections are closed."""
    for end in ends:
        end.link.end()
    for end in ends:
        if end.stream is not None:
            await turns_until(functools.partial(gone, end.stream))


async def acknowledged(end: End) -> None:
    """Wait until no buffer is out; what the last messages leave unacknowledged is small."""
    await turns_until(lambda: not end.pool.out)


class Wall:
    """A connection to a peer that does not read: it counts what it is given."""

    def __init__(self, limit: float = HIGH_WATER) -> None:
        self.full = False
        self.limit = limit
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        self.written += len(data)
        self.full = self.written > self.limit

    def close(self) -> None: ...

    def abort(self) -> None: ...
