"""A link: one session with another process, over one connection after the other.

Rules:

* Losing the connection loses nothing: the keeper (`connect.py`) gets another one, and what was not acknowledged is sent again.
* A link ends when its peer is gone or has forgotten the session; then every request that waits on it fails. An ended link takes
  messages and drops them.
* What was whole before a bad byte is delivered. The bad frame comes again over the next connection; if it is bad again, it is the peer
  and not the wire, and `broken` says that there is no use in a third.
* How it sends is in `outgoing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_async._channel.base import Connection
from monarch_async._channel.pool import BufferPool, allocate
from monarch_async._core.framing import ACK, CLOSE, PONG
from monarch_async._core.reader import Batch, FrameReader
from monarch_async._core.seal import Seal
from monarch_async._core.session import Inbound
from monarch_async._runtime.outgoing import Outgoing
from monarch_async.errors import ProtocolError

if TYPE_CHECKING:
    from monarch_async._runtime.context import Account, Message, Waiter

__all__ = ["INLINE", "Link"]

INLINE = 1 << 15
"""A body up to this many bytes travels inside the header of its frame."""


class Link(Outgoing):
    """The sending and receiving half of a session; see the module's docstring. Used from its loop only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: str,
        deliver: Callable[[Link, list[list[Any]], list[memoryview] | None], None],
        *,
        max_frame: int,
        pool: BufferPool,
        link_bytes: int = 1 << 30,
    ) -> None:
        super().__init__(loop, Inbound(allocate), max_frame=max_frame, link_bytes=link_bytes, pool=pool)
        self.session = session
        self.pending: dict[int, tuple[Waiter, Account, int]] = {}  # requests made over this link, until answered
        self.started: set[int] = set()  # those of them whose handlers are known to have begun
        self.inbound_calls: dict[int, Message] = {}  # requests of the peer that have no answer yet
        self.broken: ProtocolError | None = None  # set when the same frame was bad over two connections: end the link
        self.connections = 0  # how many there have been
        self.received_bytes = 0  # over all of them
        self.last_heard = 0.0
        self.held = False  # what comes in has to wait for what comes through the tree; see `branch`
        self.said_goodbye = False  # the peer has told that it sends no more
        self.on_lost: Callable[[Exception | None], None] = lambda error: None
        self._deliver = deliver
        self.get_buffer: Callable[[], memoryview]  # the reader's; straight, since every read asks for it
        self._bad_after = -1  # the last frame taken when a bad one came
        self._reader: FrameReader

    @property
    def last_received(self) -> int:
        """The last frame that has come in."""
        return self._inbound.received

    @property
    def last_sent(self) -> int:
        """The last frame that has been numbered."""
        return self._outbound.sequence

    def take_by(self, deliver: Callable[[Link, list[list[Any]], list[memoryview] | None], None]) -> None:
        """From now on what comes in goes there."""
        self._deliver = deliver

    # Connections.

    def attach(self, connection: Connection, peer_received: int, seals: tuple[Seal, Seal] | None) -> None:
        """Go on over a new connection, to a peer that has everything up to `peer_received`. Raises `ProtocolError`."""
        if self.ended:
            raise ProtocolError("the session is over on this side")
        again = self._outbound.resume(peer_received)
        self._release()
        old = self.connection
        self._disconnect()
        if old is not None:
            old.abort()
        self._reader = FrameReader(self._inbound, max_frame=self._max_frame, seal=seals[1] if seals else None)
        self.get_buffer = self._reader.get_buffer
        self._seal = seals[0] if seals else None
        self._again.extend(again)
        self.connection = connection
        self.connections += 1
        self.last_heard = self._loop.time()
        self._pump()

    def end(self) -> None:
        """No connection any more: drop what waits to be sent and wake whoever waits for that."""
        self.ended = True
        connection = self.connection
        self._disconnect()
        if connection is not None:
            connection.close()
        self._drop_all()

    def say_goodbye(self) -> None:
        """Tell the peer that nothing more comes, so that it does not look for a reason."""
        self._flush()
        if self.connection is not None:  # full or not: it is the last frame
            self._write_frame(self.connection, CLOSE, 0, b"", b"", 0)

    def drop_connection(self) -> None:
        """Cut the connection, as a fault of the network would."""
        if self.connection is not None:
            self.connection.abort()

    # What the connection calls.

    def received(self, size: int) -> None:
        reader, outbound = self._reader, self._outbound
        self.received_bytes += size
        self._gathering = self._scheduled  # what is gathered already leaves first
        messages = reader.single(size)
        if messages:
            if reader.acknowledged > outbound.acknowledged:
                try:
                    outbound.acknowledge(reader.acknowledged)
                except ProtocolError as wrong:
                    reader.error = wrong
                if self._sent:
                    self._release()
            self._deliver(self, messages, None)
            if self._inbound.ack_due and not self.ended:
                self._write_bare(ACK)
            self.last_heard = self._loop.time()
            if reader.error is None:
                return
        self._received(reader, reader.received(0 if messages is not None else size))

    def _received(self, reader: FrameReader, batches: list[Batch]) -> None:
        """The general way: several frames, large messages, and what is no frame."""
        outbound = self._outbound
        error = reader.error
        if reader.acknowledged > outbound.acknowledged:
            try:
                outbound.acknowledge(reader.acknowledged)
            except ProtocolError as wrong:
                error = wrong
            if self._sent:
                self._release()
        for messages, buffers in batches:
            self._deliver(self, messages, buffers)
            if self.ended:
                return
        if error is not None:
            self._protocol_error(error)
            return
        if self._inbound.ack_due:
            self._write_bare(ACK)
        if reader.pings or reader.closed:
            self._signs_of_life(reader)
        self.last_heard = self._loop.time()

    def writable(self) -> None:
        self._pump()
        if self._inbound.ack_due and not self._pumping:  # else a frame is being written, which acknowledges too
            self._write_bare(ACK)

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """The connection is gone; an old one's end means nothing."""
        if connection is self.connection:
            self._disconnect()
            self.on_lost(error)

    def _protocol_error(self, error: ProtocolError) -> None:
        connection = self.connection
        self._disconnect()
        if connection is not None:
            connection.abort()
        if self._bad_after == self._inbound.received:
            self.broken = error
        self._bad_after = self._inbound.received
        self.on_lost(error)

    def _signs_of_life(self, reader: FrameReader) -> None:
        if reader.pings:
            reader.pings = 0
            self._write_bare(PONG)
        self.said_goodbye = reader.closed
