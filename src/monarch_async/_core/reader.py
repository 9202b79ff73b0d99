"""Bytes in, messages out: the receiving end of one connection of a session.

`FrameReader` offers a buffer to read into and, told how much came, returns what is complete. Bytes of a large message are read straight
to where they belong. So are the few that follow them, the seal and the next prelude: they lie where the message goes on until they are
taken from there, and what belongs there comes over them. So a chunk takes one read, and no copy.

Rules:

* A frame counts as received only when it is whole, its seal, if there is one, is right, and its messages are messages: a connection may
  be cut anywhere. With a seal nothing in a frame is acted on before that, its acknowledgement included, except that memory is set aside
  for the large message that it announces.
* What was complete before the first bad byte is delivered; then `error` says what was wrong, and the reader takes nothing more.
* Memory follows what has come, not what is announced: the buffer at most doubles whenever it is full. For a large message
  all of the memory is asked for at once, within `max_frame`; it comes from an allocator that is to commit it as it is filled.
  A bulk that was received before is dropped as it comes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch_async._core.framing import (
    CHUNK,
    CLOSE,
    DATA,
    KINDS,
    LARGE,
    MAX_HEADER,
    NUMBERED,
    PING,
    PONG,
    PRELUDE,
    unpack_large,
    unpack_messages,
)
from monarch_async._core.seal import SEAL_SIZE, BulkDigest, Seal
from monarch_async._core.session import Inbound
from monarch_async.errors import ProtocolError

__all__ = ["Batch", "FrameReader"]

FIRST = 1 << 14
SMALL = 1 << 18
_unpack_from = PRELUDE.unpack_from
_SIZE = PRELUDE.size

Batch = tuple[list[list[Any]], list[memoryview] | None]
"""Messages in order, and the buffers of a large one (which then is alone)."""


class _Bulk(NamedTuple):
    """A frame whose bulk is under way."""

    head: bytes  # prelude and header
    size: int
    acknowledged: int
    target: memoryview | None  # where the bulk goes, and some room behind; None: it was received before, and is dropped
    digest: BulkDigest | None  # of what has come, if there is a seal


class FrameReader:
    """Reads frames for `inbound`; at most `max_frame` bytes in one message. `error` is set, once, for what is no frame."""

    def __init__(self, inbound: Inbound, *, max_frame: int, seal: Seal | None = None) -> None:
        self.acknowledged = 0  # the highest number the peer has acknowledged
        self.pings = 0  # PING frames that have come; the user counts them down
        self.pongs = 0
        self.closed = False  # the peer said it sends no more
        self.error: ProtocolError | None = None
        self._inbound = inbound
        self._max_frame = max_frame
        self._seal = seal
        self._tail = SEAL_SIZE if seal is not None else 0
        self._view = memoryview(bytearray(FIRST))
        self._start = 0  # self._view[_start:_end] has come and is not used yet
        self._end = 0
        self._bulk: _Bulk | None = None
        self._left = 0  # bytes of its bulk that have not come; above 0 only while the buffer is empty

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes shall be put; never empty. Takes and ignores the hint that asyncio's protocols are given."""
        bulk = self._bulk
        if self._left and bulk is not None and bulk.target is not None:
            return bulk.target[bulk.size - self._left :]
        return self._view[self._end :]

    def feed(self, data: bytes | bytearray | memoryview) -> list[Batch]:
        """For callers that have the bytes already: the same as reading them into `get_buffer`."""
        batches: list[Batch] = []
        rest = memoryview(data)
        while rest and self.error is None:
            room = self.get_buffer()
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            batches += self.received(size)
            rest = rest[size:]
        return batches

    def single(self, size: int) -> list[list[Any]] | None:
        """If the `size` bytes that have been put into the buffer are just one frame of small messages: those. Else use `received`.

        Nearly every read of a process that calls and answers is such a one.
        """
        if self._end or size < _SIZE or self._bulk is not None or self._seal is not None or self.error is not None:
            return None
        view = self._view
        kind, flags, reserved, header_size, bulk_size, sequence, acknowledged = _unpack_from(view, 0)
        inbound = self._inbound
        if kind != DATA or flags or reserved or bulk_size or header_size != size - _SIZE or sequence != inbound.received + 1:
            return None
        try:
            messages = unpack_messages(view[_SIZE:size])
        except ProtocolError as error:
            self.error = error
            return []
        inbound.received = sequence
        inbound.unacknowledged_bytes += header_size
        if acknowledged > self.acknowledged:
            self.acknowledged = acknowledged
        if size == len(view):
            self._make_room()
        return messages

    def received(self, size: int) -> list[Batch]:
        """`size` bytes have been put into the buffer: what is whole now, in order. Look at `error` afterwards."""
        batches: list[Batch] = []
        if self.error is not None:
            return batches
        bulk = self._bulk
        if self._left and bulk is not None and bulk.target is not None:
            start = bulk.size - self._left
            if size > self._left:  # what follows the bulk came too
                self._end = size - self._left
                self._view[: self._end] = bulk.target[bulk.size : start + size]
                size = self._left
            if bulk.digest is not None:
                bulk.digest.update(bulk.target[start : start + size])
            self._left -= size
            if self._left:
                return batches
        else:
            self._end += size
        try:
            while self._bulk is None or self._go_on(self._bulk, batches):
                if self._start == self._end or not self._next_frame(batches):
                    break
        except ProtocolError as error:
            self.error = error
            self._bulk, self._left = None, 0
        if self._start == self._end < FIRST:  # as after most reads
            self._start = self._end = 0
        else:
            self._make_room()
        return batches

    def _next_frame(self, batches: list[Batch]) -> bool:
        """Take one frame, or the beginning of one with a bulk, off the buffer; False when it does not hold that."""
        start = self._start
        body = start + _SIZE
        if body > self._end:
            return False
        kind, flags, reserved, header_size, bulk_size, sequence, acknowledged = _unpack_from(self._view, start)
        if reserved or header_size > MAX_HEADER:
            raise ProtocolError(f"no frame: kind {kind}, flags {flags}, header of {header_size} bytes")
        if kind == DATA and not flags and not bulk_size:
            pass  # as most frames
        elif kind not in KINDS or flags & ~LARGE:
            raise ProtocolError(f"no frame: kind {kind}, flags {flags}, header of {header_size} bytes")
        elif kind in NUMBERED:
            if (bulk_size and kind == DATA and not flags) or (kind == CHUNK and (flags or header_size or not bulk_size)):
                raise ProtocolError(f"no frame: kind {kind}, flags {flags}, header of {header_size} bytes, bulk of {bulk_size}")
            if bulk_size > self._max_frame:
                raise ProtocolError(f"the peer announced a bulk of {bulk_size} bytes, over the option max_frame={self._max_frame}")
        elif flags or header_size or bulk_size or sequence:
            raise ProtocolError(f"a frame of kind {kind} is more than a bare prelude")
        end = body + header_size
        if bulk_size:
            if end > self._end:
                return False
            self._start = end
            self._begin_bulk(kind, sequence, bytes(self._view[start:end]), bulk_size, acknowledged)
            return True
        if end + self._tail > self._end:
            return False
        if self._seal is not None:
            self._seal.check(bytes(self._view[end : end + SEAL_SIZE]), bytes(self._view[start:end]))
        self._start = end + self._tail
        if kind == DATA:
            inbound = self._inbound
            if sequence == inbound.received + 1 or inbound.is_new(sequence):
                header = self._view[body:end]
                if flags:
                    inbound.begin(*unpack_large(header, self._max_frame))
                    inbound.space(0)
                    inbound.take(header_size)
                    self._deliver(batches, 0)
                else:
                    messages = unpack_messages(header)
                    inbound.take(header_size)
                    batches.append((messages, None))
        elif kind == PING:
            self.pings += 1
        elif kind == PONG:
            self.pongs += 1
        elif kind == CLOSE:
            self.closed = True
        if acknowledged > self.acknowledged:
            self.acknowledged = acknowledged
        return True

    def _begin_bulk(self, kind: int, sequence: int, head: bytes, size: int, acknowledged: int) -> None:
        """A frame with a bulk begins: find where its bytes go."""
        inbound = self._inbound
        target = None
        if inbound.is_new(sequence):
            if kind == DATA:
                inbound.begin(*unpack_large(memoryview(head)[_SIZE:], self._max_frame))
            target = inbound.space(size, self._tail + _SIZE)
        self._bulk = _Bulk(head, size, acknowledged, target, self._seal.begin_bulk() if self._seal is not None else None)
        self._left = size

    def _go_on(self, bulk: _Bulk, batches: list[Batch]) -> bool:
        """Put what has come of a bulk where it belongs; True when all of it, and its seal, have come and its frame is done."""
        if self._left:
            start = self._start
            size = min(self._left, self._end - start)
            piece = self._view[start : start + size]
            if bulk.target is not None:
                done = bulk.size - self._left
                bulk.target[done : done + size] = piece
            if bulk.digest is not None:
                bulk.digest.update(piece)
            self._start = start + size
            self._left -= size
            if self._left:
                return False
        if self._end - self._start < self._tail:
            return False
        if self._seal is not None and bulk.digest is not None:
            seal = bytes(self._view[self._start : self._start + SEAL_SIZE])
            self._seal.check(seal, bulk.head, bulk.digest.digest())
            self._start += SEAL_SIZE
        self._bulk = None
        if bulk.acknowledged > self.acknowledged:
            self.acknowledged = bulk.acknowledged
        if bulk.target is not None:
            self._inbound.take(len(bulk.head) - _SIZE + bulk.size)
            self._deliver(batches, bulk.size)
        return True

    def _deliver(self, batches: list[Batch], size: int) -> None:
        whole = self._inbound.fill(size)
        if whole is not None:
            message, buffers = whole
            batches.append(([message], buffers))

    def _make_room(self) -> None:
        """See to it that the buffer has room, and more of it if what came has filled it; give back what only one long header needed."""
        view, left = self._view, self._end - self._start
        size = len(view)
        filled = self._end == size
        if filled and (size < SMALL or not self._start):
            size *= 2
        elif size > SMALL and left < SMALL // 2:
            size = SMALL
        if size != len(view):
            self._view = memoryview(bytearray(size))
            self._view[:left] = view[self._start : self._end]
        elif not left:
            pass
        elif size - self._end < size // 4 and self._start:
            view[:left] = view[self._start : self._end]
        else:
            return
        self._start, self._end = 0, left
