"""Frames: what one link writes to one socket.

A frame is a fixed prelude, a header, a bulk and, where the link needs one, a seal (a MAC)::

    kind u8 | flags u8 | reserved u16 | header length u32 | bulk length u64 | sequence u64 | acknowledged u64
    header: msgpack        bulk: raw bytes        seal: 16 bytes or none

Rules:

* DATA and CHUNK frames are numbered 1, 2, 3, … for the life of a session; every frame acknowledges what has come in. Other frames are
  a bare prelude with the number 0.
* The header of a DATA frame is one msgpack array of messages. With the flag `LARGE` it announces one message, whose
  body and buffers follow as a bulk: its first piece in this frame, the rest in CHUNK frames. Other frames may lie between those.
* The header of a LARGE frame is ``[message, length of its body, lengths of its buffers]``. In the bulk the body comes first and each
  buffer starts at a multiple of `ALIGN`, so that arrays may be built in place.
* A seal (`seal`) covers the whole frame and the count of frames before it on this connection: nothing can be changed, replayed, dropped or
  reordered.
* Messages are checked here, once, against `SIGNATURES`: what is delivered has a known kind and fields of the right types. A message
  that isn't so is a bug of the peer, and ends the connection; to drop it alone would leave somebody waiting for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import NoneType
from typing import Any

import msgpack

from monarch_async.errors import ProtocolError

__all__ = [
    "ACK",
    "ALIGN",
    "BODY_FIELD",
    "CALL",
    "CANCEL",
    "CHUNK",
    "CLOSE",
    "CLOSED",
    "CREDIT",
    "CREDIT_FOR",
    "DATA",
    "DEVICE_ANSWER",
    "DEVICE_ASK",
    "DEVICE_DROP",
    "DEVICE_DROPPED",
    "DEVICE_RETURNED",
    "FAIL",
    "GATE",
    "INTRODUCE",
    "LARGE",
    "LENT",
    "LIFE",
    "LOST",
    "MARK",
    "MAX_HEADER",
    "MAX_ITEMS",
    "PASSED",
    "PING",
    "PONG",
    "PORT",
    "PRELUDE",
    "RECALLED",
    "RELAYED",
    "REPLIES",
    "REPLY",
    "RETIRED",
    "RETURNED",
    "SIGNATURES",
    "SKIPPED",
    "STARTED",
    "TREE",
    "UNSEEN",
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
MAX_HEADER = 16 << 20
"""The longest header, in bytes."""
MAX_ITEMS = 1 << 16
"""The most messages in a frame, or buffers in a message. Also bounds what a few bytes of nested msgpack can make the reader allocate."""

# Kinds of messages: the first field. The other fields are listed in docs/design.md.
CALL, REPLY, FAIL, PORT, CANCEL, CREDIT, STARTED, CLOSED = 0, 1, 2, 3, 4, 5, 6, 7
# Those of the tree; see `_runtime/tree.py` and `_runtime/fanout.py`.
TREE, RELAYED, REPLIES, CREDIT_FOR, MARK, GATE, PASSED, INTRODUCE, LOST, SKIPPED = 8, 9, 10, 11, 12, 13, 14, 15, 16, 17
LIFE = 18
# Those of shared memory; see `_runtime/lending.py`.
LENT, RETURNED, RETIRED, UNSEEN, RECALLED = 19, 20, 21, 22, 23
# Those of memory on devices; see `_runtime/device_lending.py`.
DEVICE_ASK, DEVICE_ANSWER, DEVICE_RETURNED, DEVICE_DROP, DEVICE_DROPPED = 24, 25, 26, 27, 28
BODY_FIELD = {CALL: 5, REPLY: 2, PORT: 3, TREE: 4, RELAYED: 5}
"""Where the body is in a message that may be large."""

_CALL = (int, int, str, int, int, bytes)
_SLICED = (int, int, str, int, list, bytes)  # the rank in a slice goes with the names and sizes of its dimensions
_PORT = (int, int, int, bytes)
SIGNATURES: dict[int, tuple[tuple[type, ...], ...]] = {
    CALL: tuple((*fields, *extras) for fields in (_CALL, _SLICED) for extras in ((), (NoneType,), (dict,))),
    REPLY: ((int, int, bytes),),
    FAIL: ((int, int, bytes),),
    PORT: ((*_PORT, NoneType), (*_PORT, bytes)),
    CANCEL: ((int, int, str),),
    CREDIT: ((int, int, int, int),),
    STARTED: ((int, int),),
    CLOSED: ((int, int),),
    TREE: tuple((int, int, str, list, bytes, extras) for extras in (NoneType, dict)),
    RELAYED: tuple((int, int, str, int, rank, bytes, extras, str, int, int) for rank in (int, list) for extras in (NoneType, dict)),
    REPLIES: ((int, list, bytes),),
    CREDIT_FOR: ((int, str, int, int, int),),
    MARK: ((int, int),),
    GATE: ((int, int),),
    PASSED: ((int, str, int, int, str),),
    INTRODUCE: ((int, dict, int, int, str),),
    LOST: ((int, str, dict, bool),),
    SKIPPED: ((int, int, int, str),),
    LIFE: ((int, int, int),),
    LENT: ((int, list, list, list, bool), (int, list, list, list, bool, list)),
    RETURNED: ((int, list),),
    RETIRED: ((int, list),),
    UNSEEN: ((int, list),),
    RECALLED: ((int, list, list),),
    DEVICE_ASK: ((int, list),),
    DEVICE_ANSWER: ((int, bytes, int, str),),
    DEVICE_RETURNED: ((int, list),),
    DEVICE_DROP: ((int, list),),
    DEVICE_DROPPED: ((int, list),),
}
"""The types that the fields of a message may have, by kind. A new kind, or a new field, has to be entered here."""

_kinds_by_signature = {
    signature: frozenset(kind for kind, known in SIGNATURES.items() if signature in known)
    for known in SIGNATURES.values()
    for signature in known
}
_NONE: frozenset[int] = frozenset()
_CHECKED = frozenset((LENT, DEVICE_ASK))
_ON_DEVICE = (int, int, int, int, int, bytes, bytes)
"""A loan on a device: number, segment, offset, size, the segment's size, UUID of the device, the segment's handle."""

PRELUDE = struct.Struct("<BBHIQQQ")

_unpackb = msgpack.unpackb
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
    try:
        messages: list[list[Any]] = _unpackb(header, strict_map_key=False, max_array_len=MAX_ITEMS)
        if len(messages) == 1 and type(messages) is list:  # the usual frame of a call or an answer
            (message,) = messages
            if type(message) is list and message[0] in _kinds_by_signature.get(tuple(map(type, message)), _NONE):
                if message[0] in _CHECKED:
                    _check_loans(message)
                return messages
    except (ValueError, TypeError, LookupError, msgpack.UnpackException, RecursionError):
        pass  # what is wrong with it is found out below
    messages = _unpack(header)
    kind: Any = None
    types: list[type] = []  # of a message that was found right: most are like the one before
    try:
        for message in messages:
            found = [*map(type, message)]
            if found != types or message[0] != kind or type(message) is not list:
                if message[0] not in _kinds_by_signature.get(tuple(found), _NONE) or type(message) is not list:
                    raise ProtocolError(f"a frame's header holds something that is no message: {_describe(message)}")
                types, kind = found, message[0]
            if kind in _CHECKED:
                _check_loans(message)
    except (TypeError, LookupError) as error:  # no sequence, or an empty one
        raise ProtocolError(f"a frame's header holds something that is no message: {error}") from error
    return messages


def _check_loans(fields: list[Any]) -> None:
    if fields[0] == DEVICE_ASK:
        _check_on_device(fields[1])
    else:
        _check_lent(*fields)


def _check_on_device(loan: Any) -> None:
    if type(loan) is not list or tuple(map(type, loan)) != _ON_DEVICE or min(loan[:5]) < 0 or loan[2] + loan[3] > loan[4]:
        raise ProtocolError(f"a loan of memory on a device is malformed: {loan!r}")


def _check_lent(_: int, message: list[Any], loans: list[Any], places: list[Any], whole: bool, on_devices: Sequence[Any] = ()) -> None:
    """`ProtocolError` unless what a LENT message brings is a message that may be large, and all figures are numbers that can be."""
    kinds = _kinds_by_signature.get(tuple(map(type, message)), _NONE)
    if not kinds or message[0] not in kinds or message[0] not in BODY_FIELD:
        raise ProtocolError(f"what is said to come with shared memory is no such message: {_describe(message)}")
    if whole and (message[BODY_FIELD[message[0]]] or not places):
        raise ProtocolError("a message has two bodies, or none")
    for loan in loans:
        if type(loan) is not list or len(loan) != 4 or any(type(figure) is not int or figure < 0 for figure in loan):
            raise ProtocolError(f"a loan of shared memory is malformed: {loan!r}")
    for loan in on_devices:
        _check_on_device(loan)
    sizes = [loan[3] for loan in (*loans, *on_devices)]
    for place in places:
        if type(place) is not list or len(place) != 3 or any(type(figure) is not int or figure < 0 for figure in place):
            raise ProtocolError(f"a place in shared memory is malformed: {place!r}")
        index, start, size = place
        if index >= len(sizes) or start + size > sizes[index]:
            raise ProtocolError(f"a place in shared memory is outside of what was lent: {place!r}")


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
    return _packer.pack([message, body, buffers])  # type: ignore[no-any-return]


def unpack_large(header: bytes | memoryview, limit: int) -> tuple[list[Any], int, list[int]]:
    """Message, length of its body, lengths of its buffers; `ProtocolError` past `limit` bytes in all or for anything malformed."""
    fields = _unpack(header)
    if len(fields) != 3 or type(fields[0]) is not list or not fields[0] or type(fields[2]) is not list:
        raise ProtocolError("the header of a large message is malformed")
    message, body, buffers = fields
    kinds = _kinds_by_signature.get(tuple(map(type, message)), _NONE)
    if not kinds or message[0] not in kinds or message[0] not in BODY_FIELD:  # a kind of an unknown signature may not even hash
        raise ProtocolError(f"what is announced as a large message is none: {_describe(message)}")
    if message[BODY_FIELD[message[0]]]:
        raise ProtocolError("a large message has a second body in its header")
    if any(type(length) is not int or length < 0 for length in (body, *buffers)):
        raise ProtocolError("the header of a large message gives lengths that are none")
    total = bulk_layout(body, buffers)[1]
    if total > limit:
        raise ProtocolError(f"the peer announced a message of {total} bytes, over the option max_frame={limit}")
    return message, body, buffers


def _unpack(header: bytes | memoryview) -> list[Any]:
    try:
        fields = _unpackb(header, strict_map_key=False, max_array_len=MAX_ITEMS)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:  # TypeError: a list as the key of a map
        raise ProtocolError(f"a frame's header is no msgpack: {error!r}") from error
    if type(fields) is not list or not fields:
        raise ProtocolError("a frame's header holds no messages")
    return fields


def _describe(message: Any) -> str:
    if type(message) is not list:
        return f"a {type(message).__name__}"
    kind = message[0] if message and type(message[0]) is int else "?"
    return f"kind {kind} with fields of types {', '.join(type(field).__name__ for field in message[:16])}"
