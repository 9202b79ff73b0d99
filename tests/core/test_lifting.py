"""Large bytes and texts beside a pickle: whatever they are, and whatever is between them, what arrives is what was sent."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async._core import codec
from monarch_async._core.lifting import LIFTED, Lifter
from monarch_async._core.views import reduce_view

FRAME = 1 << 16


@pytest.fixture(autouse=True)
def reducers() -> None:
    """As in any process that has sent such a value, or has imported torch."""
    codec.register_reducer(memoryview, reduce_view)


def round_trip(value: Any) -> Any:
    body, buffers = codec.dumps(value)
    return codec.loads(body, [bytearray(view) for view in buffers])


SIZES = st.sampled_from([0, 1, 300, FRAME - 1, FRAME, FRAME + 1, LIFTED - 1, LIFTED, LIFTED + 1])
LARGE = st.one_of(
    SIZES.map(bytes),
    SIZES.map(lambda size: bytearray(b"\x95") * size),
    SIZES.map(lambda size: "x" * size),
    SIZES.map(lambda size: "é\udc80" * (size // 4)),
    SIZES.map(lambda size: numpy.full(size, 7, "u1")),
    SIZES.map(lambda size: [1.5] * (size // 9)),
    SIZES.map(lambda size: [*range(size // 4)]),
)
VALUES = st.recursive(
    LARGE | st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """Arrays compare in a way of their own."""
    if isinstance(value, numpy.ndarray):
        return "array", value.tobytes()
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(VALUES)
@settings(max_examples=150)
def test_what_arrives_is_what_was_sent(value: Any) -> None:
    """By type and value, with arrays, which are buffers too, before, between and after; and nothing large is left in the body."""
    body, buffers = codec.dumps(value)
    assert plain(value) == plain(codec.loads(body, [bytearray(view) for view in buffers]))
    assert pickle.loads(pickle.dumps(plain(value), 5)) == plain(value)


@pytest.mark.parametrize("value", [bytes(LIFTED), bytearray(LIFTED), "x" * LIFTED], ids=["bytes", "bytearray", "str"])
def test_it_is_not_copied(value: Any) -> None:
    """The body is small; the buffer is the value's own memory, but for text, whose bytes are others; below the limit it is in the body."""
    body, (buffer,) = codec.dumps([1, value, 2])
    assert len(body) < 100
    assert LIFTED == buffer.nbytes
    assert (buffer.obj is value) == (not isinstance(value, str))
    arrived = codec.loads(body, [bytearray(buffer)])
    assert [1, value, 2] == arrived
    assert type(arrived[1]) is type(value)
    body, buffers = codec.dumps(value[1:])
    assert [] == buffers
    assert len(body) > LIFTED - 10


def test_one_value_in_two_places_is_one() -> None:
    """As in any pickle."""
    value = bytearray(LIFTED)
    first, second = round_trip([value, value])
    assert first is second
    first.append(1)
    value.append(1)  # nothing holds its memory any more


def test_order_among_other_buffers() -> None:
    """Each gets its own, whichever kind comes first."""
    value = [numpy.full(20_000, 1, "u1"), bytes([2]) * LIFTED, numpy.full(20_000, 3, "u1"), "4" * LIFTED, bytearray(b"\5") * LIFTED]
    value += [numpy.full(20_000, 6, "u1"), bytes([7]) * FRAME, numpy.full(20_000, 8, "u1")]
    assert plain(value) == plain(round_trip(value))
    assert 7 == len(codec.dumps(value)[1])


def test_it_is_not_taken_for_what_it_looks_like() -> None:
    """Bytes, and numbers at the end of a frame, that read as the beginning of a large value of just the length of what follows."""
    for size in (FRAME, LIFTED, LIFTED + 5):
        looks = b"B" + struct.pack("<I", size)
        for kind in (bytes, bytearray):
            value = [kind(bytes(LIFTED - 5) + looks), bytes(size), kind(bytes(FRAME - 5) + looks), bytes(size)]
            assert value == round_trip(value)
        number = struct.unpack(">d", b"abc" + looks)[0]
        floats = [number] * 40_000
        assert [floats, bytes(size)] == round_trip([floats, bytes(size)])


def test_another_pickler_writes_as_it_likes() -> None:
    """What does not come in the expected chunks stays in the pickle."""
    pickles: list[list[bytes | bytearray]] = [
        [b"\x80\x05\x95" + struct.pack("<Q", 99) + b"short", bytes(LIFTED), b"."],
        [b"\x80\x05B" + struct.pack("<I", LIFTED + 1), bytes(LIFTED), b"\0."],
        [b"\x80\x05", b"C\x01x", b"unheard of", bytes(LIFTED)],
    ]
    for chunks in pickles:
        before = b"".join(chunks)
        assert [] == [*Lifter().lift(chunks)]
        assert before == b"".join(chunks)


def test_a_process_without_reducers_lifts_from_the_second_on() -> None:
    """Small messages are faster there without a reducer, so it gets one when the first large value is sent."""

    code = (
        "from monarch_async._core import codec\n"
        f"value = bytes({LIFTED})\n"
        "first, second = codec.dumps(value), codec.dumps(value)\n"
        "print(len(first[1]), len(second[1]))\n"
        "assert codec.loads(*first) == codec.loads(*second) == value\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "0 1\n" == done.stdout
