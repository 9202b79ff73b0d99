"""Frames' parts: headers pack and unpack, malformed messages are told apart, seals hold."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._core.framing import (
    ALIGN,
    BODY_FIELD,
    CALL,
    CANCEL,
    CLOSED,
    CREDIT,
    CREDIT_FOR,
    DEVICE_ANSWER,
    DEVICE_ASK,
    DEVICE_DROP,
    DEVICE_DROPPED,
    DEVICE_RETURNED,
    FAIL,
    GATE,
    INTRODUCE,
    LENT,
    LIFE,
    LOST,
    MARK,
    MAX_ITEMS,
    PASSED,
    PORT,
    RECALLED,
    RELAYED,
    REPLIES,
    REPLY,
    RETIRED,
    RETURNED,
    SIGNATURES,
    SKIPPED,
    STARTED,
    TREE,
    UNSEEN,
    bulk_layout,
    join_messages,
    pack_large,
    pack_message,
    unpack_large,
    unpack_messages,
)
from monarch_async.errors import ProtocolError
from tests.core.mutate import mutant_count, mutants

ON_DEVICE = [3, 1, 0, 70_000, 8 << 20, bytes(16), bytes(64)]

GOOD: list[list[Any]] = [
    [CALL, 2**63, "step", 5, -1, b"body"],
    [CALL, 1, "step", 0, 0, b"", None],
    [CALL, 1, "step", 0, 0, b"", {"d": 1.5, "c": [[1, 2, 3, "x"]], "t": b"trace"}],
    [REPLY, 1, b"x"],
    [FAIL, 1, b"fault"],
    [PORT, 1, 2, b"body", None],
    [PORT, 1, 2, b"", b"fault"],
    [CANCEL, 1, "deadline"],
    [CREDIT, 1, 2, 3],
    [STARTED, 1],
    [CLOSED, 1],
    [TREE, 1, "step", [["uid", 0, 5, 1, 0], ["other", [1, ["gpus"], [2]], 6, 1, 0]], b"body", None],
    [TREE, 1, "step", [], b"", {"d": 1.5}],
    [RELAYED, 1, "step", 5, 0, b"body", None, "uid", 1, 0],
    [RELAYED, 1, "step", 0, [1, ["gpus"], [2]], b"", {"d": 1.5}, "uid", 2, 1],
    [REPLIES, [1, 2], b"x"],
    [CREDIT_FOR, "uid", 1, 2, 3],
    [MARK, 1],
    [GATE, 1],
    [PASSED, "uid", 1, 0, "session"],
    [INTRODUCE, {"uid": "uid"}, 1, 0, ""],
    [LOST, "uid", {"text": "gone"}, True],
    [SKIPPED, 1, 0, ""],
    [LIFE, 7, 1],
    [LENT, [CALL, 7, "put", 8, 0, b"body", None], [[1, 2, 4096, 8192]], [[0, 0, 8192], [0, 64, 1]], False],
    [LENT, [REPLY, 8, b""], [[1, 2, 0, 4096], [2, 3, 0, 4096]], [[1, 0, 5], [0, 0, 9]], True],
    [RETURNED, [1, 2]],
    [RETIRED, [2]],
    [UNSEEN, [2]],
    [RECALLED, ["session"], [2]],
    [LENT, [CALL, 7, "put", 8, 0, b"body", None], [[1, 2, 4096, 8192]], [[0, 0, 8192], [1, 0, 70_000]], False, [ON_DEVICE]],
    [LENT, [REPLY, 8, b""], [[1, 2, 0, 4096]], [[0, 0, 4096]], True, []],
    [DEVICE_ASK, ON_DEVICE],
    [DEVICE_ANSWER, bytes(16), 0, "it does not see the device"],
    [DEVICE_RETURNED, [3]],
    [DEVICE_DROP, [1]],
    [DEVICE_DROPPED, [1]],
]

BAD: list[Any] = [
    None,
    7,
    "call",
    {0: 1},
    {6: 1, 7: 2},
    [],
    [[]],
    [CALL],
    [True, 1],
    [99, 1],
    [-1, 1],
    [CALL, "1", "step", 0, 0, b""],
    [CALL, 1, b"step", 0, 0, b""],
    [CALL, 1, "step", [1], 0, b""],
    [CALL, 1, "step", 0, 0, "text"],
    [CALL, 1, "step", 0, 0, b"", [1]],
    [CALL, 1, "step", 0, 0, b"", None, 1],
    [REPLY, None, b""],
    [REPLY, 1.0, b""],
    [FAIL, 1, ["fault"]],
    [PORT, 1, 2, b"body"],
    [CREDIT, 1, 2],
    [STARTED, True],
    [CLOSED, msgpack.ExtType(5, b"x")],
    [TREE, 1, "step", b"members", b"", None],
    [TREE, 1, "step", [], b""],
    [RELAYED, 1, "step", 5, 0, b"body", None, 7, 1, 0],
    [REPLIES, 1, b"x"],
    [CREDIT_FOR, 1, 2, 3],
    [GATE, "1"],
    [INTRODUCE, "uid", 1, 0],
    [LOST, "uid", {}, 1],
    [SKIPPED, 1],
    [LIFE, 7],
    [LENT, [REPLY, 8, b"x"], [], []],
    [LENT, [STARTED, 1], [], [], False],
    [LENT, [LENT, [REPLY, 8, b"x"], [], [], False], [], [], False],
    [LENT, [REPLY, 8, 9], [], [], False],
    [LENT, [REPLY, 8, b"x"], [[1, 2, 0]], [], False],
    [LENT, [REPLY, 8, b"x"], [[1, 2, -1, 4096]], [], False],
    [LENT, [REPLY, 8, b"x"], [[1, 2, 0, 4096]], [[0, 4095, 2]], False],
    [LENT, [REPLY, 8, b"x"], [[1, 2, 0, 4096]], [[1, 0, 1]], False],
    [LENT, [REPLY, 8, b"x"], [[1, 2, 0, 4096]], [[0, 0, 1]], True],
    [LENT, [REPLY, 8, b""], [[1, 2, 0, 4096]], [], True],
    [RETURNED, 1],
    [RETIRED, b"x"],
    [UNSEEN, b"x"],
    [RECALLED, [2]],
    [LENT, [REPLY, 8, b"x"], [], [[0, 0, 70_001]], False, [ON_DEVICE]],
    [LENT, [REPLY, 8, b"x"], [], [[1, 0, 1]], False, [ON_DEVICE]],
    [LENT, [REPLY, 8, b"x"], [], [[0, 0, 1]], False, [[3, 1, 0, 70_000]]],
    [LENT, [REPLY, 8, b"x"], [], [], False, ["loan"]],
    [DEVICE_ASK, ON_DEVICE[:-1]],
    [DEVICE_ASK, [*ON_DEVICE[:2], 8 << 20, *ON_DEVICE[3:]]],
    [DEVICE_ASK, [*ON_DEVICE[:2], -1, *ON_DEVICE[3:]]],
    [DEVICE_ANSWER, "uuid", 0, ""],
    [DEVICE_DROP, 1],
]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 70_000 // 3])
def test_messages_travel_in_one_header(count: int) -> None:
    """Any number of messages, on both sides of msgpack's short form, come out as they were packed."""
    messages = [GOOD[index % len(GOOD)] for index in range(count)]
    assert messages == unpack_messages(join_messages([pack_message(message) for message in messages]))


def test_every_kind_has_a_signature() -> None:
    """No kind of message is without a rule, and the good examples cover all of them."""
    assert sorted(SIGNATURES) == sorted({message[0] for message in GOOD})
    assert dict.fromkeys(BODY_FIELD, bytes) == {kind: SIGNATURES[kind][0][field] for kind, field in BODY_FIELD.items()}


@pytest.mark.parametrize("message", BAD, ids=repr)
def test_malformed_messages(message: Any) -> None:
    """Whatever is well-formed msgpack but no message is refused, alone and behind a good one."""
    for messages in ([message], [GOOD[0], message]):
        with pytest.raises(ProtocolError):
            unpack_messages(msgpack.packb(messages))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x90",
        b"\xc1",
        b"\x91",
        b"\x80",
        b"\x05",
        b"\x91\x90\x00",
        b"\x91\x81\x90\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2000,
        b"\x91\xa1\xff",
    ],
    ids=repr,
)
def test_headers_that_are_none(header: bytes) -> None:
    """Cut, endless, deeply nested, trailing, unhashable keys, no text: always the same typed error."""
    with pytest.raises(ProtocolError):
        unpack_messages(header)
    with pytest.raises(ProtocolError):
        unpack_large(header, 1 << 20)


def test_nested_arrays_are_bounded() -> None:
    """A header whose nested arrays all announce more items than a frame may have is refused by the announcement."""
    with pytest.raises(ProtocolError, match="exceeds"):
        unpack_messages((b"\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big")) * 500 + bytes(100_000))


@given(st.integers(0, 1000), st.lists(st.integers(0, 1000), max_size=20))
def test_layout(body: int, sizes: list[int]) -> None:
    """Body first, buffers in order at multiples of `ALIGN`, without overlap, and nothing behind the last."""
    offsets, total = bulk_layout(body, sizes)
    end = body
    for offset, size in zip(offsets, sizes, strict=True):
        assert end <= offset < end + ALIGN
        assert offset % ALIGN == 0
        end = offset + size
    assert end == total


def test_a_large_header_travels() -> None:
    """Message and lengths come out as they went in; the limit holds for the bulk as laid out, padding included."""
    message = [CALL, 1, "step", 5, 0, b"", {"d": 1.0}]
    header = pack_large(message, 10, [100, 0, 7])
    total = bulk_layout(10, [100, 0, 7])[1]
    assert (message, 10, [100, 0, 7]) == unpack_large(header, total)
    with pytest.raises(ProtocolError, match="max_frame"):
        unpack_large(header, total - 1)


@pytest.mark.parametrize(
    "fields",
    [
        [GOOD[0], 1, []],  # it has a body already
        [[CANCEL, 1, "x"], 1, []],
        [[CALL, 1, "step", 5, 0], 1, []],
        [[], 1, []],
        [GOOD[1], -1, []],
        [GOOD[1], True, []],
        [GOOD[1], 1.0, []],
        [GOOD[1], 1, [-1]],
        [GOOD[1], 1, ["1"]],
        [GOOD[1], 1, None],
        [GOOD[1], 1],
        [GOOD[1], 1, [], 0],
        [None, 1, []],
    ],
    ids=repr,
)
def test_large_headers_that_are_none(fields: Any) -> None:
    """Each way in which the announcement of a large message may be malformed is refused."""
    with pytest.raises(ProtocolError):
        unpack_large(msgpack.packb(fields), 1 << 20)


def test_mutated_headers() -> None:
    """Mutants of headers come out as messages of known kinds and types, or as the typed error."""
    header = join_messages([pack_message(message) for message in GOOD])
    for what, mutant in mutants(header, mutant_count(0.01), 7):
        try:
            messages = unpack_messages(mutant)
        except ProtocolError:
            continue
        assert all(tuple(map(type, message)) in SIGNATURES[message[0]] for message in messages), what
