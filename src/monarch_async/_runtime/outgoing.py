"""The sending half of a link: batching, queueing, cutting into chunks, resending.

Rules:

* What is sent leaves in order. A message is written at once if the one before it was followed by something coming in, as when calls
  and answers alternate; others wait for the end of the loop's iteration and leave together, in one frame. So a lone message costs no
  callback, and many share a frame.
* A large message is written in chunks, as fast as the socket takes them. Messages sent after it wait behind it; *control* messages
  (answers, cancellations, credit) pass between its chunks.
* Its memory is copied when it is sent, into pooled buffers that come back when the peer has acknowledged all of it; or, to a process of the
  same host, into shared memory (`lending`), and only a small message travels. One that speaks of what is not there yet is *held*: it
  keeps its place, and what comes after it waits as behind a large one.
* Nothing is written to a connection that is full, be it new, resent or an acknowledgement: what the transport holds is bounded by its
  high-water mark and one chunk. The rest waits here, counted in `backlog`; to bound that is the senders' part (`lane`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._channel.base import Connection
from monarch_async._channel.parcels import settled
from monarch_async._channel.pool import Buffer, BufferPool
from monarch_async._core.framing import (
    CHUNK,
    DATA,
    LARGE,
    MAX_HEADER,
    MAX_ITEMS,
    PING,
    PRELUDE,
    bulk_layout,
    join_messages,
    pack_large,
)
from monarch_async._core.seal import Seal
from monarch_async._core.session import Inbound, Outbound, SentFrame
from monarch_async.errors import ChannelFull, FrameTooLarge

__all__ = ["CHUNK_SIZE", "MAX_SMALL", "Held", "Outgoing"]

BATCH = 1 << 16
CHUNK_SIZE = 1 << 20
MAX_SMALL = MAX_HEADER - 2 * BATCH
_pack = PRELUDE.pack


class Held:
    """A message that may not leave before it is `ready`. Who makes it so has the link `go_on`."""

    __slots__ = ("packed", "ready", "size")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.size = len(packed)  # as it is accounted for; what is sent may be another message in the end
        self.ready = False


Lend = Callable[[list[Any], bytes, Sequence[memoryview]], bytes | Held | None]
"""Puts body and buffers of a message where the peer can see them; returns the message that says so, or `None` if that can't be."""


class _Transfer:
    """A large message on its way out."""

    __slots__ = ("buffer", "bulk", "header", "last", "offset")

    def __init__(self, header: bytes, bulk: bytes | memoryview, buffer: Buffer | None) -> None:
        self.header = header
        self.bulk = bulk
        self.buffer = buffer  # to be given back to the pool
        self.offset = 0
        self.last = 0  # number of its last frame, once that is written


class Outgoing:
    """What is on its way to one peer; see the module's docstring. Used from its loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbound: Inbound, *, max_frame: int, link_bytes: int, pool: BufferPool) -> None:
        self.connection: Connection | None = None
        self.ended = False
        self.lend: Lend | None = None  # set if the peer may be lent shared memory
        self._loop = loop
        self._max_frame = max_frame
        self._link_bytes = link_bytes
        self._pool = pool
        self._inbound = inbound  # what has come in rides as an acknowledgement on what goes out
        self._outbound = Outbound()
        self._sent_before = 0  # bytes, of a session that has ended
        self._seal: Seal | None = None
        self._out: Connection | None = None  # the connection, once everything is resent and new frames may be written
        self._again: deque[SentFrame] = deque()  # to be resent
        self._batch: list[bytes] = []  # messages for the next frame
        self._batch_bytes = 0  # in them; at most `BATCH`, and one message
        self._headers: deque[bytes] = deque()  # frames of messages that go before `_batch`
        self._queue: deque[_Transfer | Held | bytes] = deque()  # a transfer under way is its first element
        self._waiting = 0  # bytes in `_headers` and `_queue`
        self._gathering = False  # a message was written since something came in: what follows is gathered
        self._scheduled = False  # the flush at the end of this iteration is
        self._pumping = False
        self._sent: deque[_Transfer] = deque()  # written, not yet acknowledged
        self._drained: list[asyncio.Future[None]] = []

    def send(self, packed: bytes) -> None:
        """Send a small message in order. Raises `FrameTooLarge` past about 16 MiB."""
        if self._queue:
            if len(packed) > MAX_SMALL:
                raise _too_large(len(packed))
            self._queue.append(packed)
            self._waiting += len(packed)
        else:
            self.send_control(packed)

    def send_control(self, packed: bytes) -> None:
        """Send a small message that may overtake large ones. Raises `FrameTooLarge` past about 16 MiB."""
        size = len(packed)
        if size > MAX_SMALL:
            raise _too_large(size)
        out = self._out
        if self._gathering or out is None or out.full:
            if not self.ended:
                self._batch.append(packed)
                self._batch_bytes += size
                if self._batch_bytes > BATCH:
                    self._close_batch()
                    self._flush()
                elif not self._scheduled:
                    self._scheduled = True
                    self._loop.call_soon(self._end_of_iteration)
        else:
            self._gathering = True
            header = b"\x91" + packed
            outbound, inbound = self._outbound, self._inbound
            outbound.sequence = sequence = outbound.sequence + 1  # as `number`, and below as `ack`, which are too dear here
            outbound.pending.append((sequence, DATA, 0, header, b""))
            outbound.pending_bytes += size + 1
            inbound.told = received = inbound.received
            inbound.unacknowledged_bytes = 0
            head = _pack(DATA, 0, 0, size + 1, 0, sequence, received) + header
            out.write(head if self._seal is None else head + self._seal.sign(head))

    def send_large(self, message: list[Any], body: bytes, buffers: Sequence[memoryview]) -> None:
        """Send a message whose body or buffers are large, in order.

        Raises `FrameTooLarge` past `max_frame` bytes, and `ChannelFull` when others wait and all together would pass `link_bytes`.

        The field of the body in `message` is empty; `buffers` are contiguous views of bytes.
        """
        if self.ended:
            return
        backlog = self.backlog
        sizes = [view.nbytes for view in buffers]
        offsets, total = bulk_layout(len(body), sizes)
        if total > self._max_frame:
            raise FrameTooLarge(f"a message of {total} bytes is over the option max_frame={self._max_frame}: send it in parts, or raise it")
        if backlog > CHUNK_SIZE and backlog + total > self._link_bytes:
            text = (
                f"{backlog} bytes wait to leave for the same process, and {total} more would pass the option link_bytes={self._link_bytes}"
            )
            raise ChannelFull(f"{text}: await what you send, or raise it", limit=self._link_bytes, option="link_bytes")
        if len(sizes) > MAX_ITEMS:
            raise FrameTooLarge(f"a message has {len(sizes)} buffers, {MAX_ITEMS} are possible: join arrays, or send it in parts")
        if self.lend is not None and (lent := self.lend(message, body, buffers)) is not None:
            if isinstance(lent, Held):
                self._queue.append(lent)
                self._waiting += len(lent.packed)
            else:
                self.send(lent)
            return
        buffers = settled(buffers)
        header = pack_large(message, len(body), sizes)
        if len(header) > MAX_SMALL:
            raise _too_large(len(header))
        bulk: bytes | memoryview = body
        buffer = None
        if buffers:
            buffer, bulk = self._pool.take(total)
            bulk[: len(body)] = body
            for start, view in zip(offsets, buffers, strict=True):
                bulk[start : start + view.nbytes] = view
        self._queue.append(_Transfer(header, bulk, buffer))
        self._waiting += total
        self._pump()

    def go_on(self) -> None:
        """A message that was held is ready."""
        self._pump()

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._write_bare(PING)

    @property
    def backlog(self) -> int:
        """Bytes that are written and not acknowledged, or wait to be written."""
        return self._outbound.pending_bytes + self._batch_bytes + self._waiting

    @property
    def sent_bytes(self) -> int:
        """Bytes of all numbered frames, each once, however often it was written. Acknowledgements and probes are not among them."""
        outbound = self._outbound
        return self._sent_before + outbound.acknowledged_bytes + outbound.pending_bytes + PRELUDE.size * outbound.sequence

    def undelivered(self) -> list[bytes]:
        """The small messages of which the peer has not said that it has them, each item a packed array of some."""
        sent = [header for _, kind, flags, header, _ in self._outbound.pending if kind == DATA and not flags & LARGE]
        return [*sent, *self._headers, *([join_messages(self._batch)] if self._batch else ())]

    @property
    def idle(self) -> bool:
        """Whether everything sent has been acknowledged."""
        return not (self._unwritten or self._outbound.pending)

    async def drain(self) -> None:
        """Wait until the transport has taken everything, or the link has ended."""
        while self._unwritten and not self.ended:
            waiter = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    @property
    def _unwritten(self) -> bool:
        return bool(self._batch or self._headers or self._queue or self._again)

    def _end_of_iteration(self) -> None:
        self._scheduled = self._gathering = False
        if self._batch:
            self._flush()

    def _close_batch(self) -> None:
        header = join_messages(self._batch)
        self._headers.append(header)
        self._waiting += len(header)
        self._batch = []
        self._batch_bytes = 0

    def _flush(self) -> None:
        """Write what has been gathered, as far as the connection takes it."""
        out = self._out
        headers = self._headers
        while headers and out is not None and not out.full:
            header = headers.popleft()
            self._waiting -= len(header)
            self._write(out, DATA, 0, header)
        if self._batch and not headers and out is not None and not out.full:
            header = join_messages(self._batch)
            self._batch = []
            self._batch_bytes = 0
            self._write(out, DATA, 0, header)
        if self._drained and not self._unwritten:
            self._wake_drained()

    def _pump(self) -> None:
        """Write what waits, until the connection is full."""
        if self._pumping:  # called back by a transport while it is written to: the loop below goes on with what is new
            return
        self._pumping = True
        try:
            if self._resend():
                self._flush()
                self._write_queue()
                self._flush()
        finally:
            self._pumping = False

    def _resend(self) -> bool:
        """Write what the peer had not received over the last connection; True when all of it is written."""
        connection, again = self.connection, self._again
        while again:
            if connection is None or connection.full:
                return False
            sequence, kind, flags, header, bulk = again.popleft()
            if sequence > self._outbound.acknowledged:
                self._write_frame(connection, kind, flags, header, bulk, sequence)
        self._out = connection
        return True

    def _write_queue(self) -> None:
        queue = self._queue
        while queue and (out := self._out) is not None and not out.full:
            item = queue[0]
            if isinstance(item, Held):
                if not item.ready:
                    return
                self._waiting += len(item.packed) - item.size
                item = item.packed
            if isinstance(item, bytes):
                queue.popleft()
                self._waiting -= len(item)
                self._batch.append(item)
                self._batch_bytes += len(item)
                if self._batch_bytes > BATCH:
                    self._close_batch()
                    self._flush()
                continue
            if self._batch:  # sent before it, so written before it
                self._flush()
                continue
            end = min(item.offset + CHUNK_SIZE, len(item.bulk))
            piece = item.bulk[item.offset : end]
            self._waiting -= end - item.offset
            if item.offset:
                self._write(out, CHUNK, 0, b"", piece)
            else:
                self._write(out, DATA, LARGE, item.header, piece)
            item.offset = end
            if end == len(item.bulk):
                queue.popleft()
                if item.buffer is not None:
                    item.last = self._outbound.sequence
                    self._sent.append(item)

    def _write(self, out: Connection, kind: int, flags: int, header: bytes, bulk: bytes | memoryview = b"") -> None:
        """Number a frame, keep it until it is acknowledged, and write it."""
        self._write_frame(out, kind, flags, header, bulk, self._outbound.number(kind, flags, header, bulk))

    def _write_bare(self, kind: int) -> None:
        if self.connection is not None and not self.connection.full:
            self._write_frame(self.connection, kind, 0, b"", b"", 0)

    def _write_frame(self, connection: Connection, kind: int, flags: int, header: bytes, bulk: bytes | memoryview, sequence: int) -> None:
        head = _pack(kind, flags, 0, len(header), len(bulk), sequence, self._inbound.ack()) + header
        seal = self._seal
        if not len(bulk):
            connection.write(head if seal is None else head + seal.sign(head))
            return
        tail = seal.sign_bulk(head, bulk) if seal is not None else b""
        connection.write(head)
        connection.write(bulk)
        if tail:
            connection.write(tail)

    def _disconnect(self) -> None:
        """No connection until the next one."""
        self.connection = self._out = self._seal = None
        self._again.clear()

    def _drop_all(self) -> None:
        """Nothing goes out any more."""
        for item in self._queue:
            if isinstance(item, _Transfer) and item.buffer is not None and not item.offset:
                self._pool.give(item.buffer)
        self._batch = []
        self._headers.clear()
        self._queue.clear()
        self._sent.clear()  # a closing connection may still read from their buffers, which are left to the garbage collector
        self._batch_bytes = self._waiting = 0
        self._sent_before = self.sent_bytes
        self._outbound = Outbound()
        self._wake_drained()

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


def _too_large(size: int) -> FrameTooLarge:
    return FrameTooLarge(f"a message of {size} bytes outside its body and buffers is over {MAX_SMALL}: pass large values as arguments")
