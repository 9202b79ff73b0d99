"""One conversation of two processes: numbering, acknowledgement and resending, kept across connections.

Rules:

* Each direction numbers its DATA and CHUNK frames 1, 2, 3, … . The receiving side takes exactly the next number; what it has seen
  already it drops, and a gap is the peer's fault.
* A frame counts as received only once it is whole and found right, so that a bad one is never acknowledged.
* The sending side keeps a frame until it is acknowledged, and after a reconnect resends what the peer has not received.
* Acknowledgements ride on every frame; by themselves they are due after `ACK_FRAMES` frames, `ACK_BYTES` bytes, or the end of a large
  message. No timer is needed: what the sender keeps of what has arrived is bounded by these figures.

Pure: no bytes are written here. `Outbound` hands out frames, `Inbound` assembles what comes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from monarch_async._core.framing import BODY_FIELD, bulk_layout
from monarch_async.errors import ProtocolError

__all__ = ["ACK_BYTES", "ACK_FRAMES", "Inbound", "Outbound", "SentFrame"]

ACK_FRAMES = 64
ACK_BYTES = 1 << 18

SentFrame = tuple[int, int, int, bytes, bytes | memoryview]
"""A numbered frame as it can be written again: sequence, kind, flags, header, bulk. A plain tuple: one is made for every write."""


class Outbound:
    """The sending half: what has been numbered and is not acknowledged yet."""

    __slots__ = ("acknowledged", "acknowledged_bytes", "pending", "pending_bytes", "sequence")

    def __init__(self) -> None:
        self.sequence = 0
        self.acknowledged = 0
        self.pending: deque[SentFrame] = deque()  # sequences acknowledged+1 … sequence, without a gap
        self.pending_bytes = 0  # sum of their headers and bulks
        self.acknowledged_bytes = 0  # the same of all before them

    def number(self, kind: int, flags: int, header: bytes, bulk: bytes | memoryview = b"") -> int:
        """Give a frame the next number, which is returned, and keep it."""
        self.sequence = sequence = self.sequence + 1
        self.pending.append((sequence, kind, flags, header, bulk))
        self.pending_bytes += len(header) + len(bulk)
        return sequence

    def acknowledge(self, sequence: int) -> None:
        """The peer has everything up to `sequence`. `ProtocolError` if that was never sent."""
        count = sequence - self.acknowledged
        if count <= 0:
            return
        if sequence > self.sequence:
            raise ProtocolError(f"the peer acknowledges frame {sequence}, of which only {self.sequence} were sent")
        pending, before = self.pending, self.pending_bytes
        for _ in range(count):
            _, _, _, header, bulk = pending.popleft()
            self.pending_bytes -= len(header) + len(bulk)
        self.acknowledged_bytes += before - self.pending_bytes
        self.acknowledged = sequence

    def resume(self, received: int) -> list[SentFrame]:
        """What to send again on a new connection to a peer that has received up to `received`."""
        if received < self.acknowledged:
            raise ProtocolError(f"the peer went back to frame {received} after acknowledging {self.acknowledged}")
        self.acknowledge(received)
        return list(self.pending)

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        assert 0 <= self.acknowledged <= self.sequence
        assert [frame[0] for frame in self.pending] == list(range(self.acknowledged + 1, self.sequence + 1))
        assert self.pending_bytes == sum(len(header) + len(bulk) for _, _, _, header, bulk in self.pending)


def _allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


class Inbound:
    """The receiving half: the last number taken, and the large message that is being put together.

    `allocate(size)` gives the memory for a large message; it need not be cleared. It is asked as soon as the message is announced.
    """

    __slots__ = ("_allocate", "_body", "_buffers", "_bulk", "_filled", "_message", "_whole", "received", "told", "unacknowledged_bytes")

    def __init__(self, allocate: Callable[[int], memoryview] = _allocate) -> None:
        self.received = 0
        self.told = 0  # the last number that was acknowledged to the peer
        self.unacknowledged_bytes = 0
        self._allocate = allocate
        self._whole = False  # a large message has been completed since the last acknowledgement
        self._message: list[Any] | None = None  # the large message under way, else None
        self._body = 0
        self._buffers: list[int] = []
        self._bulk = memoryview(b"")
        self._filled = 0  # bytes of the bulk that are in place; above 0 once the first frame was taken

    def is_new(self, sequence: int) -> bool:
        """Whether the frame of this number is the next one; False if it was taken before. `ProtocolError` for a gap."""
        if sequence == self.received + 1:
            return True
        if 0 < sequence <= self.received:
            return False
        raise ProtocolError(f"frame {sequence} follows frame {self.received}: some were lost on the way")

    def take(self, size: int) -> None:
        """The next frame, of `size` bytes, has been received and found right."""
        self.received += 1
        self.unacknowledged_bytes += size

    @property
    def ack_due(self) -> bool:
        """Whether the peer should be told now what has come in."""
        return self.unacknowledged_bytes >= ACK_BYTES or self.received - self.told >= ACK_FRAMES or self._whole

    def ack(self) -> int:
        """The number to acknowledge; it counts as told."""
        self.told = self.received
        self.unacknowledged_bytes = 0
        self._whole = False
        return self.received

    def begin(self, message: list[Any], body: int, buffers: list[int]) -> None:
        """A large message is announced; again, if its first frame was cut off. `ProtocolError` if another is under way."""
        if self._filled:
            raise ProtocolError("a large message began before the one before it ended")
        total = bulk_layout(body, buffers)[1]
        if self._message is None or total != len(self._bulk):
            self._bulk = self._allocate(total)
        self._message = message
        self._body = body
        self._buffers = buffers

    @property
    def missing(self) -> int:
        """Bytes of the large message under way that have not come yet; 0 when there is none."""
        return len(self._bulk) - self._filled if self._message is not None else 0

    def space(self, size: int, beyond: int = 0) -> memoryview:
        """Where the next `size` bytes of the bulk belong. They count only once `fill` is called.

        Behind them up to `beyond` bytes of those that are missing after them, which may be written to until they come.
        """
        missing = self.missing
        if not 0 < size <= missing and (size or missing):
            raise ProtocolError(f"{size} bytes of a large message came where {missing} were missing")
        return self._bulk[self._filled : self._filled + size + beyond]

    def fill(self, size: int) -> tuple[list[Any], list[memoryview]] | None:
        """`size` bytes are in place; the whole message and its buffers, once nothing is missing. Its body is a view too."""
        self._filled += size
        message, bulk = self._message, self._bulk
        if message is None or self._filled < len(bulk):
            return None
        offsets, _ = bulk_layout(self._body, self._buffers)
        message[BODY_FIELD[message[0]]] = bulk[: self._body]
        views = [bulk[start : start + length] for start, length in zip(offsets, self._buffers, strict=True)]
        self._message, self._bulk, self._filled = None, memoryview(b""), 0
        self._whole = True
        return message, views

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        assert self.told <= self.received
        assert 0 <= self._filled <= len(self._bulk)
        assert self._message is not None or not self._bulk
        assert not self._filled or self.missing, "a message that is whole was not delivered"
