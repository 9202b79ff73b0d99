"""Frames: what one link writes to one socket.

A frame is a fixed prelude, a header, a bulk and, where the link needs one, a seal (a MAC)::

    kind u8 | flags u8 | reserved u16 | header length u32 | bulk length u64 | sequence u64 | acknowledged u64
    header: msgpack        bulk: raw bytes        seal: 16 bytes or none

Rules:

* DATA and CHUNK frames are numbered 1, 2, 3, … for the life of a session; every frame acknowledges what has come in.
* The header of a DATA frame is one msgpack array of messages. With the flag `LARGE` it announces one message, whose
  body and buffers follow as a bulk: its first piece in this frame, the rest in CHUNK frames. Other frames may lie between those.
* The header of a LARGE frame is ``[message, length of its body, lengths of its buffers]``. In the bulk the body comes first and each
  buffer starts at a multiple of `ALIGN`, so that arrays may be built in place.
* A seal covers the whole frame and the count of frames before it on this connection: nothing can be changed, replayed, dropped or reordered.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgpack

from monarch_async.errors import ProtocolError

__all__ = [
    "ACK",
    "ALIGN",
    "CHUNK",
    "CLOSE",
    "DATA",
    "LARGE",
    "PING",
    "PONG",
    "PRELUDE",
    "SEAL_SIZE",
    "Seal",
    "bulk_layout",
    "join_messages",
    "pack_large",
    "pack_message",
    "unpack_large",
    "unpack_messages",
]

DATA, CHUNK, ACK, PING, PONG, CLOSE = 1, 2, 3, 4, 5, 6
KINDS = frozenset((DATA, CHUNK, ACK, PING, PONG, CLOSE))
NUMBERED = frozenset((DATA, CHUNK))
LARGE = 1
ALIGN = 64
SEAL_SIZE = 16
MAX_HEADER = 16 << 20

# Kinds of messages: the first field. The other fields are listed in docs/design.md.
CALL, REPLY, FAIL, PORT, CANCEL, CREDIT, STARTED, CLOSED = 0, 1, 2, 3, 4, 5, 6, 7
BODY_FIELD = {CALL: 5, REPLY: 2, PORT: 3}
"""Where the body is in a message that may be large."""

PRELUDE = struct.Struct("<BBHIQQQ")

_packer = msgpack.Packer(autoreset=True)
pack_message = _packer.pack
"""One message, an array, to bytes."""


def join_messages(packed: Sequence[bytes]) -> bytes:
    """The header of a DATA frame from messages that are already packed."""
    count = len(packed)
    head = bytes((0x90 | count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(packed)


def unpack_messages(header: bytes | memoryview) -> list[list[Any]]:
    """The messages of a DATA frame's header; `ProtocolError` if it holds anything else."""
    messages = _unpack(header)
    for message in messages:
        if type(message) is not list or not message or type(message[0]) is not int:
            raise ProtocolError("a frame's header holds something that is no message")
    return messages


def bulk_layout(body: int, buffers: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of the buffers in a bulk, and its whole length, for a body and buffers of these lengths (bytes)."""
    offsets = []
    end = body
    for length in buffers:
        start = -(-end // ALIGN) * ALIGN
        offsets.append(start)
        end = start + length
    return offsets, end


def pack_large(message: Sequence[Any], body: int, buffers: Sequence[int]) -> bytes:
    """The header of a LARGE frame: the message with an empty body, and the lengths of what lies in the bulk."""
    return _packer.pack([message, body, buffers])


def unpack_large(header: bytes | memoryview, limit: int) -> tuple[list[Any], int, list[int]]:
    """Message, length of its body, lengths of its buffers; `ProtocolError` past `limit` bytes in all or for anything malformed."""
    message, body, buffers = fields if len(fields := _unpack(header)) == 3 else ([], -1, [])
    lengths = [body, *buffers] if type(buffers) is list else [-1]
    if not _is_message(message) or message[0] not in BODY_FIELD or any(type(n) is not int or n < 0 for n in lengths):
        raise ProtocolError("the header of a large message is malformed")
    if len(message) <= BODY_FIELD[message[0]]:
        raise ProtocolError("a large message has no place for its body")
    if sum(lengths) > limit:
        raise ProtocolError(f"the peer announced a message of {sum(lengths)} bytes, over the option max_frame={limit}")
    return message, body, buffers


def _unpack(header: bytes | memoryview) -> list[Any]:
    try:
        fields = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a frame's header is no msgpack: {error!r}") from error
    if type(fields) is not list or not fields:
        raise ProtocolError("a frame's header holds no messages")
    return fields


def _is_message(value: Any) -> bool:
    return type(value) is list and bool(value) and type(value[0]) is int


class Seal:
    """The MAC of one direction of one connection: keyed BLAKE2b over frame count, prelude, header and bulk."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """The seal of the next frame."""
        mac = blake2b(self._count.to_bytes(8, "little"), digest_size=SEAL_SIZE, key=self._key)
        self._count += 1
        for part in parts:
            mac.update(part)
        return mac.digest()

    def check(self, seal: bytes, *parts: bytes | bytearray | memoryview) -> None:
        """`ProtocolError` unless `seal` is the next frame's."""
        if not hmac.compare_digest(seal, self.sign(*parts)):
            raise ProtocolError("a frame's seal is wrong: it was changed, replayed or lost on the way")
