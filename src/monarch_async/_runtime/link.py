"""A link: one session with another process, over one connection after the other.

Rules:

* What is sent leaves in order. The first message of a loop iteration is written at once; the rest of that iteration leave together
  at its end, in one frame.
* A large message is written in chunks, as fast as the socket takes them. Messages sent after it wait behind it; *control* messages
  (answers, cancellations, credit) pass between its chunks.
* Its memory is copied when it is sent, into pooled buffers that come back when the peer has acknowledged all of it.
* Losing the connection loses nothing: the keeper (`connect.py`) gets another one, and what was not acknowledged is sent again.
  A link ends when its peer is gone or has forgotten the session; then every request that waits on it fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._channel.base import Connection
from monarch_async._channel.pool import BufferPool
from monarch_async._core.framing import (
    ACK,
    CHUNK,
    CLOSE,
    DATA,
    LARGE,
    PING,
    PONG,
    PRELUDE,
    Seal,
    bulk_layout,
    join_messages,
    pack_large,
)
from monarch_async._core.reader import FrameReader
from monarch_async._core.session import Inbound, Outbound
from monarch_async._runtime.context import Account, Message, Waiter
from monarch_async.errors import FrameTooLarge, ProtocolError

__all__ = ["INLINE", "Link"]

INLINE = 1 << 15
"""A body up to this many bytes travels inside the header of its frame."""
BATCH = 1 << 16
CHUNK_SIZE = 1 << 20
_pack = PRELUDE.pack


class _Transfer:
    """A large message on its way out."""

    __slots__ = ("buffer", "bulk", "header", "last", "offset")

    def __init__(self, header: bytes, bulk: bytes | memoryview, buffer: bytearray | None) -> None:
        self.header = header
        self.bulk = bulk
        self.buffer = buffer  # to be given back to the pool
        self.offset = 0
        self.last = 0  # number of its last frame, once that is written


class Link:
    """The sending and receiving half of a session; see the module's docstring. Used from its loop only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: str,
        deliver: Callable[[Link, list[list[Any]], list[memoryview] | None], None],
        *,
        max_frame: int,
        pool: BufferPool,
    ) -> None:
        self.session = session
        self.pending: dict[int, tuple[Waiter, Account, int]] = {}  # requests made over this link, until answered
        self.started: set[int] = set()  # those of them whose handlers are known to have begun
        self.inbound_calls: dict[int, Message] = {}  # requests of the peer that have no answer yet
        self.connection: Connection | None = None
        self.ended = False
        self.connections = 0  # how many there have been
        self.last_heard = 0.0
        self.said_goodbye = False  # the peer has told that it sends no more
        self.on_lost: Callable[[Exception | None], None] = lambda error: None
        self._loop = loop
        self._deliver = deliver
        self._max_frame = max_frame
        self._pool = pool
        self._outbound = Outbound()
        self._inbound = Inbound()
        self._reader: FrameReader
        self._seal: Seal | None = None
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._tick = False  # a message was written in this iteration already
        self._queue: deque[_Transfer | bytes] = deque()  # a transfer under way is its first element
        self._sent: deque[_Transfer] = deque()  # written, not yet acknowledged
        self._drained: list[asyncio.Future[None]] = []

    # Sending.

    def send(self, packed: bytes) -> None:
        """Send a small message in order."""
        if self._queue:
            self._queue.append(packed)
        else:
            self.send_control(packed)

    def send_control(self, packed: bytes) -> None:
        """Send a small message that may overtake large ones."""
        connection = self.connection
        if self._tick or connection is None or connection.full:
            self._batch.append(packed)
            self._batch_bytes += len(packed)
            if self._batch_bytes > BATCH:
                self._flush()
        else:
            self._tick = True
            self._loop.call_soon(self._end_tick)
            self._write(DATA, 0, b"\x91" + packed)

    def send_large(self, message: list[Any], body: bytes, buffers: Sequence[memoryview]) -> None:
        """Send a message whose body or buffers are large, in order. Raises `FrameTooLarge` past `max_frame` bytes."""
        sizes = [view.nbytes for view in buffers]
        offsets, total = bulk_layout(len(body), sizes)
        if total > self._max_frame:
            raise FrameTooLarge(f"a message of {total} bytes is over the option max_frame={self._max_frame}: send it in parts, or raise it")
        bulk: bytes | memoryview = body
        buffer = None
        if buffers:
            buffer, bulk = self._pool.take(total)
            bulk[: len(body)] = body
            for start, view in zip(offsets, buffers, strict=True):
                bulk[start : start + view.nbytes] = view
        self._queue.append(_Transfer(pack_large(message, len(body), sizes), bulk, buffer))
        self._pump()

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if self.connection is not None:
            self._write_bare(PING)

    @property
    def backlog(self) -> int:
        """Bytes that are written and not acknowledged, or wait to be written."""
        waiting = sum(len(item) if isinstance(item, bytes) else len(item.bulk) - item.offset for item in self._queue)
        return self._outbound.pending_bytes + self._batch_bytes + waiting

    @property
    def last_received(self) -> int:
        """The last frame that has come in."""
        return self._inbound.received

    @property
    def idle(self) -> bool:
        """Whether everything sent has been acknowledged."""
        return not (self._batch or self._queue or self._outbound.pending)

    async def drain(self) -> None:
        """Wait until the socket has taken everything, or the link has ended."""
        while (self._batch or self._queue) and not self.ended:
            waiter = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    def _end_tick(self) -> None:
        self._tick = False
        if self._batch:
            self._flush()

    def _flush(self) -> None:
        """Write what has been gathered, unless the connection is full or missing."""
        connection = self.connection
        if self._batch and connection is not None and not connection.full:
            batch, self._batch = self._batch, []
            self._batch_bytes = 0
            self._write(DATA, 0, join_messages(batch))
        if self._drained and not self._batch and not self._queue:
            self._wake_drained()

    def _pump(self) -> None:
        """Write queued messages until the connection is full."""
        queue = self._queue
        self._flush()
        while queue and (connection := self.connection) is not None and not connection.full:
            item = queue[0]
            if isinstance(item, bytes):
                queue.popleft()
                self._batch.append(item)
                self._batch_bytes += len(item)
                if self._batch_bytes > BATCH:
                    self._flush()
                continue
            self._flush()
            end = min(item.offset + CHUNK_SIZE, len(item.bulk))
            piece = item.bulk[item.offset : end]
            if item.offset:
                self._write(CHUNK, 0, b"", piece)
            else:
                self._write(DATA, LARGE, item.header, piece)
            item.offset = end
            if end == len(item.bulk):
                queue.popleft()
                if item.buffer is not None:
                    item.last = self._outbound.sequence
                    self._sent.append(item)
        self._flush()

    def _write(self, kind: int, flags: int, header: bytes, bulk: bytes | memoryview = b"") -> None:
        """Number a frame, keep it until it is acknowledged, and write it."""
        frame = self._outbound.number(kind, flags, header, bulk)
        if self.connection is not None:
            self._write_frame(self.connection, kind, flags, header, bulk, frame.sequence)

    def _write_bare(self, kind: int) -> None:
        if self.connection is not None:
            self._write_frame(self.connection, kind, 0, b"", b"", 0)

    def _write_frame(self, connection: Connection, kind: int, flags: int, header: bytes, bulk: bytes | memoryview, sequence: int) -> None:
        head = _pack(kind, flags, 0, len(header), len(bulk), sequence, self._inbound.ack()) + header
        if self._seal is not None:
            seal = self._seal.sign(head, bulk)
            if bulk:
                connection.write(head)
                connection.write(bulk)
                connection.write(seal)
            else:
                connection.write(head + seal)
        else:
            connection.write(head)
            if bulk:
                connection.write(bulk)

    # Connections.

    def attach(self, connection: Connection, peer_received: int, seals: tuple[Seal, Seal] | None) -> None:
        """Go on over a new connection, to a peer that has everything up to `peer_received`. Raises `ProtocolError`."""
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
        again = self._outbound.resume(peer_received)
        self._release()
        self._reader = FrameReader(self._inbound, max_frame=self._max_frame, seal=seals[1] if seals else None)
        self._seal = seals[0] if seals else None
        self.connection = connection
        self.connections += 1
        self.last_heard = self._loop.time()
        for frame in again:
            self._write_frame(connection, frame.kind, frame.flags, frame.header, frame.bulk, frame.sequence)
        self._pump()

    def end(self) -> None:
        """No connection any more: drop what waits to be sent and wake whoever waits for that."""
        self.ended = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._batch.clear()
        self._queue.clear()
        self._sent.clear()
        self._wake_drained()

    def say_goodbye(self) -> None:
        """Tell the peer that nothing more comes, so that it does not look for a reason."""
        if self.connection is not None:
            self._flush()
            self._write_bare(CLOSE)

    def drop_connection(self) -> None:
        """Cut the connection, as a fault of the network would."""
        if self.connection is not None:
            self.connection.abort()

    # What the connection calls.

    def get_buffer(self) -> memoryview:
        return self._reader.get_buffer()

    def received(self, size: int) -> None:
        reader = self._reader
        try:
            batches = reader.received(size)
            if reader.acknowledged > self._outbound.acknowledged:
                self._outbound.acknowledge(reader.acknowledged)
                if self._sent:
                    self._release()
        except ProtocolError as error:
            self._protocol_error(error)
            return
        for messages, buffers in batches:
            self._deliver(self, messages, buffers)
        if self._inbound.ack_due:
            self._write_bare(ACK)
        if reader.pings or reader.pongs or reader.closed:
            self._signs_of_life(reader)
        self.last_heard = self._loop.time()

    def writable(self) -> None:
        self._pump()

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """The connection is gone; an old one's end means nothing."""
        if connection is self.connection:
            self.connection = None
            self._seal = None
            self.on_lost(error)

    def _protocol_error(self, error: ProtocolError) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        self.on_lost(error)

    def _signs_of_life(self, reader: FrameReader) -> None:
        for _ in reader.pings:
            self._write_bare(PONG)
        reader.pings.clear()
        reader.pongs.clear()
        self.said_goodbye = reader.closed

    def _release(self) -> None:
        """Give back the buffers of messages that the peer has."""
        while self._sent and self._sent[0].last <= self._outbound.acknowledged:
            transfer = self._sent.popleft()
            assert transfer.buffer is not None
            self._pool.give(transfer.buffer)

    def _wake_drained(self) -> None:
        for waiter in self._drained:
            if not waiter.done():
                waiter.set_result(None)
        self._drained.clear()
