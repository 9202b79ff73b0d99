"""Bytes in, messages out: the receiving end of one connection of a session.

`FrameReader` offers a buffer to read into and, told how much came, returns what is complete. Bytes of a large message are read straight
to where they belong. A frame counts as received only when it is whole and its seal, if there is one, is right: a connection may be
cut anywhere.
"""

from __future__ import annotations

from typing import Any

from monarch_async._core.framing import (
    ACK,
    CHUNK,
    CLOSE,
    DATA,
    KINDS,
    LARGE,
    MAX_HEADER,
    PING,
    PONG,
    PRELUDE,
    SEAL_SIZE,
    Seal,
    unpack_large,
    unpack_messages,
)
from monarch_async._core.session import Inbound
from monarch_async.errors import ProtocolError

__all__ = ["Batch", "FrameReader"]

SMALL = 1 << 18
_unpack_from = PRELUDE.unpack_from
_SIZE = PRELUDE.size

Batch = tuple[list[list[Any]], list[memoryview] | None]
"""Messages in order, and the buffers of a large one (which then is alone)."""


class FrameReader:
    """Reads frames for `inbound`; at most `max_frame` bytes in one message. Raises `ProtocolError` for what is no frame."""

    def __init__(self, inbound: Inbound, *, max_frame: int, seal: Seal | None = None) -> None:
        self.acknowledged = 0  # the highest number the peer has acknowledged
        self.pings: list[int] = []  # numbers of PING frames that want a PONG
        self.pongs: list[int] = []
        self.closed = False  # the peer said it sends no more
        self._inbound = inbound
        self._max_frame = max_frame
        self._seal = seal
        self._tail = SEAL_SIZE if seal is not None else 0
        self._buffer = bytearray(SMALL)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        # A bulk that reaches past the buffer: where it goes, how much is there, the frame it belongs to.
        self._target: memoryview | None = None
        self._have = 0
        self._frame: tuple[int, int, int, bytes] = (0, 0, 0, b"")

    def get_buffer(self) -> memoryview:
        """Where the next bytes shall be put; never empty."""
        if self._target is not None and self._have < len(self._target):
            return self._target[self._have :]
        if self._start and self._end == len(self._view):
            self._compact(0)
        return self._view[self._end :]

    def feed(self, data: bytes | bytearray | memoryview) -> list[Batch]:
        """For callers that have the bytes already: the same as reading them into `get_buffer`."""
        batches: list[Batch] = []
        rest = memoryview(data)
        while rest:
            room = self.get_buffer()
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            batches += self.received(size)
            rest = rest[size:]
        return batches

    def received(self, size: int) -> list[Batch]:
        """`size` bytes have been put into the buffer: what is whole now, in order."""
        batches: list[Batch] = []
        if self._target is not None and self._have < len(self._target):
            self._have += size
        else:
            self._end += size
        while True:
            if self._target is not None and not self._finish_bulk(batches):
                return batches
            if not self._next_frame(batches):
                return batches

    def _next_frame(self, batches: list[Batch]) -> bool:
        """Take one frame off the buffer; False when it does not hold a whole one."""
        start = self._start
        have = self._end - start
        if have < _SIZE:
            if not have:
                self._start = self._end = 0
            return False
        kind, flags, reserved, header_size, bulk_size, sequence, acknowledged = _unpack_from(self._buffer, start)
        if kind not in KINDS or reserved or flags & ~LARGE or header_size > MAX_HEADER:
            raise ProtocolError(f"no frame: kind {kind}, flags {flags}, header of {header_size} bytes")
        if bulk_size > self._max_frame or (bulk_size and kind != CHUNK and not flags):
            raise ProtocolError(f"a frame of kind {kind} announces a bulk of {bulk_size} bytes")
        body = start + _SIZE
        end = body + header_size
        if bulk_size:
            if end > self._end:
                self._compact(_SIZE + header_size)
                return False
            self._start = end
            self._begin_bulk(kind, flags, sequence, bytes(self._view[start:body]), bytes(self._view[body:end]), bulk_size)
            self._acknowledge(acknowledged)
            return True
        if end + self._tail > self._end:
            self._compact(_SIZE + header_size + self._tail)
            return False
        header = self._view[body:end]
        if self._seal is not None:
            self._seal.check(bytes(self._view[end : end + SEAL_SIZE]), self._view[start:end])
        self._start = end + self._tail
        self._acknowledge(acknowledged)
        if kind == DATA:
            if self._inbound.take(sequence, header_size):
                if flags:
                    self._inbound.begin(*unpack_large(header, self._max_frame))
                    self._deliver(batches, 0)
                else:
                    batches.append((unpack_messages(header), None))
        elif kind == PING:
            self.pings.append(sequence)
        elif kind == PONG:
            self.pongs.append(sequence)
        elif kind == CLOSE:
            self.closed = True
        elif kind != ACK:
            raise ProtocolError("a chunk without bytes")
        return True

    def _begin_bulk(self, kind: int, flags: int, sequence: int, prelude: bytes, header: bytes, size: int) -> None:
        """A frame with a bulk begins: find where its bytes go, and put there what has come."""
        inbound = self._inbound
        if sequence == inbound.received + 1:
            if kind == DATA:
                inbound.begin(*unpack_large(header, self._max_frame))
            target = inbound.space(size)
        else:
            inbound.take(sequence, 0)  # raises for a gap; a frame that was seen already is read and dropped
            target = memoryview(bytearray(size))
        self._target = target
        self._frame = (kind, sequence, size, prelude + header)
        self._have = min(size, self._end - self._start)
        target[: self._have] = self._view[self._start : self._start + self._have]
        self._start += self._have
        if self._start == self._end:
            self._start = self._end = 0

    def _finish_bulk(self, batches: list[Batch]) -> bool:
        """Complete the bulk under way if all of it, and its seal, have come."""
        target = self._target
        if target is None or self._have < len(target) or self._end - self._start < self._tail:
            return False
        kind, sequence, size, head = self._frame
        if self._seal is not None:
            seal = bytes(self._view[self._start : self._start + SEAL_SIZE])
            self._seal.check(seal, head, target)
            self._start += SEAL_SIZE
        self._target = None
        if self._inbound.take(sequence, len(head) - _SIZE + size):
            self._deliver(batches, size)
        return True

    def _deliver(self, batches: list[Batch], size: int) -> None:
        whole = self._inbound.fill(size)
        if whole is not None:
            message, buffers = whole
            batches.append(([message], buffers))

    def _acknowledge(self, sequence: int) -> None:
        if sequence > self.acknowledged:
            self.acknowledged = sequence

    def _compact(self, need: int) -> None:
        """Move what is left to the front of the buffer, which grows if `need` bytes don't fit it."""
        left = self._end - self._start
        if need > len(self._view):
            buffer = bytearray(max(need, 2 * len(self._view)))
            buffer[:left] = self._view[self._start : self._end]
            self._buffer, self._view = buffer, memoryview(buffer)
        elif (self._start and self._start + need > len(self._view)) or not need:
            self._view[:left] = bytes(self._view[self._start : self._end])
        else:
            return
        self._start, self._end = 0, left
