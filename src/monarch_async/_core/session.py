"""One conversation of two processes: numbering, acknowledgement and resending, kept across connections.

Rules:

* Each direction numbers its DATA and CHUNK frames 1, 2, 3, … . The receiving side takes exactly the next number; what it has seen
  already it drops, and a gap is the peer's fault.
* The sending side keeps a frame until it is acknowledged, and after a reconnect resends what the peer has not received.
* Acknowledgements ride on every frame; by themselves they are due after `ACK_FRAMES` frames or `ACK_BYTES` bytes. No timer is needed: what
  stays unacknowledged is bounded by these figures.

Pure: no bytes are written here. `Outbound` hands out frames, `Inbound` assembles what comes in.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from monarch_async._core.framing import BODY_FIELD, bulk_layout
from monarch_async.errors import ProtocolError

__all__ = ["ACK_BYTES", "ACK_FRAMES", "Inbound", "Outbound", "SentFrame"]

ACK_FRAMES = 64
ACK_BYTES = 1 << 18


class SentFrame(NamedTuple):
    """A numbered frame as it can be written again: kind, flags, header and bulk."""

    sequence: int
    kind: int
    flags: int
    header: bytes
    bulk: bytes | memoryview
    size: int


class Outbound:
    """The sending half: what has been numbered and is not acknowledged yet."""

    def __init__(self) -> None:
        self.sequence = 0
        self.acknowledged = 0
        self.pending: deque[SentFrame] = deque()  # sequences acknowledged+1 … sequence, without a gap
        self.pending_bytes = 0  # sum of their sizes

    def number(self, kind: int, flags: int, header: bytes, bulk: bytes | memoryview = b"") -> SentFrame:
        """Give a frame the next number and keep it."""
        self.sequence += 1
        size = len(header) + len(bulk)
        frame = SentFrame(self.sequence, kind, flags, header, bulk, size)
        self.pending.append(frame)
        self.pending_bytes += size
        return frame

    def acknowledge(self, sequence: int) -> None:
        """The peer has everything up to `sequence`. `ProtocolError` if that was never sent."""
        if sequence <= self.acknowledged:
            return
        if sequence > self.sequence:
            raise ProtocolError(f"the peer acknowledges frame {sequence}, of which only {self.sequence} were sent")
        pending = self.pending
        for _ in range(sequence - self.acknowledged):
            self.pending_bytes -= pending.popleft().size
        self.acknowledged = sequence

    def resume(self, received: int) -> list[SentFrame]:
        """What to send again on a new connection to a peer that has received up to `received`."""
        if received < self.acknowledged:
            raise ProtocolError(f"the peer went back to frame {received} after acknowledging {self.acknowledged}")
        self.acknowledge(received)
        return list(self.pending)

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        assert len(self.pending) == self.sequence - self.acknowledged
        assert [f.sequence for f in self.pending] == list(range(self.acknowledged + 1, self.sequence + 1))
        assert self.pending_bytes == sum(f.size for f in self.pending)


class Inbound:
    """The receiving half: the last number taken, and the large message that is being put together."""

    def __init__(self) -> None:
        self.received = 0
        self.told = 0  # the last number that was acknowledged to the peer
        self.unacknowledged_bytes = 0
        self._message: list[Any] | None = None  # the large message under way, else None
        self._body = 0
        self._buffers: list[int] = []
        self._bulk = memoryview(b"")
        self._filled = 0  # bytes of the bulk that are in place

    def take(self, sequence: int, size: int) -> bool:
        """Whether the frame of this number is new. `ProtocolError` for a gap."""
        if sequence != self.received + 1:
            if sequence <= self.received:
                return False
            raise ProtocolError(f"frame {sequence} follows frame {self.received}: some were lost on the way")
        self.received = sequence
        self.unacknowledged_bytes += size
        return True

    @property
    def ack_due(self) -> bool:
        """Whether the peer should be told now what has come in."""
        return self.received - self.told >= ACK_FRAMES or self.unacknowledged_bytes >= ACK_BYTES

    def ack(self) -> int:
        """The number to acknowledge; it counts as told."""
        self.told = self.received
        self.unacknowledged_bytes = 0
        return self.received

    def begin(self, message: list[Any], body: int, buffers: list[int]) -> None:
        """A large message is announced; again, if its first frame was cut off. `ProtocolError` if another is under way."""
        if self._filled:
            raise ProtocolError("a large message began before the one before it ended")
        self._message = message
        self._body = body
        self._buffers = buffers
        self._bulk = memoryview(bytearray(bulk_layout(body, buffers)[1]))
        self._filled = 0

    @property
    def missing(self) -> int:
        """Bytes of the large message under way that have not come yet; 0 when there is none."""
        return len(self._bulk) - self._filled if self._message is not None else 0

    def space(self, size: int) -> memoryview:
        """Where the next `size` bytes of the bulk belong. They count only once `fill` is called."""
        if size > self.missing:
            raise ProtocolError(f"{size} bytes of a large message came where {self.missing} were missing")
        return self._bulk[self._filled : self._filled + size]

    def fill(self, size: int) -> tuple[list[Any], list[memoryview]] | None:
        """`size` bytes are in place; the whole message and its buffers, once nothing is missing."""
        self._filled += size
        if self._message is None or self._filled < len(self._bulk):
            return None
        message, bulk = self._message, self._bulk
        offsets, _ = bulk_layout(self._body, self._buffers)
        message[BODY_FIELD[message[0]]] = bytes(bulk[: self._body])
        views = [bulk[start : start + length] for start, length in zip(offsets, self._buffers, strict=True)]
        self._message, self._bulk, self._filled = None, memoryview(b""), 0
        return message, views

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        assert self.told <= self.received
        assert 0 <= self._filled <= len(self._bulk)
        assert self._message is not None or not self._bulk
