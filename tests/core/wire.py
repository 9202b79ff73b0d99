"""Byte streams of frames as a peer would write them, and readers to feed them to: what the frame and link tests share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from monarch_async._core.framing import (
    ACK,
    CALL,
    CHUNK,
    CLOSE,
    DATA,
    LARGE,
    PING,
    PONG,
    PORT,
    PRELUDE,
    REPLY,
    bulk_layout,
    join_messages,
    pack_large,
    pack_message,
)
from monarch_async._core.reader import Batch, FrameReader
from monarch_async._core.seal import POLY1305, SHA256, Seal
from monarch_async._core.session import Inbound, Outbound

Key = tuple[bytes, str]
"""Of a seal, and how it digests bulks."""

KEY: Key = (bytes(range(32)), SHA256)
FAST: Key = (bytes(range(32)), POLY1305)
LIMIT = 1 << 20

Plain = tuple[list[Any], list[bytes]]
"""A message with its body as bytes, and its buffers: what can be compared."""


def call(number: int, body: bytes = b"") -> list[Any]:
    return [CALL, 7, "step", number, 0, body]


def plain(batches: Sequence[Batch]) -> list[Plain]:
    """The messages of batches, one by one."""
    found = []
    for messages, buffers in batches:
        for message in messages:
            fields = [bytes(field) if isinstance(field, memoryview) else field for field in message]
            found.append((fields, [bytes(view) for view in buffers or ()]))
    return found


class Writer:
    """Writes frames as a link does, one list entry each, and notes what it has sent."""

    def __init__(self, key: Key | None = None, outbound: Outbound | None = None) -> None:
        self.seal = Seal(*key) if key is not None else None
        self.outbound = outbound if outbound is not None else Outbound()
        self.frames: list[bytes] = []
        self.sent: list[Plain] = []
        self.acknowledged = 0

    def write(self, kind: int, flags: int, header: bytes, bulk: bytes, sequence: int) -> None:
        head = PRELUDE.pack(kind, flags, 0, len(header), len(bulk), sequence, self.acknowledged) + header
        seal = b""
        if self.seal is not None:
            seal = self.seal.sign_bulk(head, bulk) if bulk else self.seal.sign(head)
        self.frames.append(head + bulk + seal)

    def numbered(self, kind: int, flags: int, header: bytes, bulk: bytes = b"") -> None:
        self.write(kind, flags, header, bulk, self.outbound.number(kind, flags, header, bulk))

    def small(self, *messages: list[Any]) -> None:
        self.numbered(DATA, 0, join_messages([pack_message(message) for message in messages]))
        self.sent += [(message, []) for message in messages]

    def large(
        self, message: list[Any], field: int, body: bytes, buffers: Sequence[bytes], chunk: int, between: Sequence[list[Any]] = ()
    ) -> None:
        """One large message in pieces of `chunk` bytes, with one small message in each gap while there are any."""
        sizes = [len(buffer) for buffer in buffers]
        offsets, total = bulk_layout(len(body), sizes)
        bulk = bytearray(total)
        bulk[: len(body)] = body
        for start, buffer in zip(offsets, buffers, strict=True):
            bulk[start : start + len(buffer)] = buffer
        self.numbered(DATA, LARGE, pack_large(message, len(body), sizes), bytes(bulk[:chunk]))
        gaps = iter(between)
        for start in range(chunk, total, chunk):
            for small in (*((found,) if (found := next(gaps, None)) is not None else ()),):
                self.small(small)
            self.numbered(CHUNK, 0, b"", bytes(bulk[start : start + chunk]))
        whole = list(message)
        whole[field] = body
        self.sent.append((whole, list(buffers)))

    def bare(self, kind: int) -> None:
        self.write(kind, 0, b"", b"", 0)

    @property
    def bytes(self) -> bytes:
        return b"".join(self.frames)


def conversation(key: Key | None = None, chunk: int = 700) -> Writer:
    """A bit of everything: batches, large messages in chunks with small ones between, empty ones, signs of life."""
    writer = Writer(key)
    writer.small(call(1, b"one"))
    writer.bare(PING)
    writer.small(*[call(number, b"x" * number) for number in range(2, 22)])
    writer.acknowledged = 5
    writer.large(call(22), 5, b"body" * 300, [b"a" * 1000, b"", b"b" * 65], chunk, [[REPLY, 3, b"between"], call(23)])
    writer.bare(ACK)
    writer.large([PORT, 9, 1, b"", None], 3, b"", [], chunk)
    writer.large([REPLY, 8, b""], 2, b"", [b""], chunk)
    writer.bare(PONG)
    writer.large([REPLY, 9, b""], 2, b"r" * 701, [], chunk)
    writer.acknowledged = 9
    writer.small(call(24, b"last"))
    writer.bare(CLOSE)
    return writer


def new_reader(key: Key | None = None, inbound: Inbound | None = None, max_frame: int = LIMIT) -> FrameReader:
    return FrameReader(inbound if inbound is not None else Inbound(), max_frame=max_frame, seal=Seal(*key) if key is not None else None)


def whole(data: bytes) -> Iterator[bytes]:
    yield data


def single_bytes(data: bytes) -> Iterator[bytes]:
    for index in range(len(data)):
        yield data[index : index + 1]


def random_pieces(data: bytes, seed: int, most: int = 3000) -> Iterator[bytes]:
    rng = random.Random(seed)
    start = 0
    while start < len(data):
        size = rng.choice((1, 2, 31, 32, 33, rng.randint(1, most)))
        yield data[start : start + size]
        start += size


def read_in(reader: FrameReader, data: bytes, sizes: Iterator[int]) -> list[Batch]:
    """Put `data` in as a transport would: into `get_buffer`, at most the next of `sizes` at a time."""
    batches = []
    rest = memoryview(data)
    while rest:
        room = reader.get_buffer()
        assert len(room) > 0
        size = min(len(room), len(rest), next(sizes))
        room[:size] = rest[:size]
        batches += reader.received(size)
        rest = rest[size:]
    return batches
