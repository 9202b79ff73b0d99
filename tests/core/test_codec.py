"""Values survive the trip, buffers are not copied, what can't be sent is refused with its place, what can't be read harms nobody."""

from __future__ import annotations

import ctypes
import functools
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async._core import codec
from monarch_async._core.stories import type_name
from monarch_async.errors import DecodeError

SRC = Path(codec.__file__).parents[2]


def round_trip(value: Any) -> Any:
    """As between two processes: the receiver's buffers are its own and writable."""
    body, buffers = codec.dumps(value)
    return codec.loads(body, [bytearray(view) for view in buffers])


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None  # type: ignore[assignment]


class Unsent:
    """Has a reducer, and is never sent."""


class SetstateRaises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["error"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40_000),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | inner.map(Point)
        | inner.map(lambda value: pickle.PickleBuffer(bytearray(repr(value).encode())).raw().tobytes())
    ),
    max_leaves=12,
)


@given(values)
def test_values_survive(value: Any) -> None:
    """Whatever Python's containers hold comes back equal, over the link and copied within the process."""
    assert value == round_trip(value)
    assert value == codec.copy_value(value)
    assert value == codec.loads(codec.dumps_whole(value))


@given(values)
@settings(max_examples=50)
def test_values_survive_with_reducers(value: Any) -> None:
    """The same while a reducer is registered, which takes another pickler: the bytes are the same."""
    codec.register_reducer(Unsent, lambda unsent: (Unsent, ()))
    try:
        assert value == round_trip(value)
        assert codec.dumps(value) == (pickle.dumps(value, 5), [])
    finally:
        codec._reducers.pop(Unsent)
        codec._table.pop(Unsent)


def test_threshold() -> None:
    """Buffers of 16 KiB stay out of the body as views of the sender's memory; smaller ones are in it."""
    small, large = numpy.zeros(codec.OUT_OF_BAND - 1, "u1"), numpy.zeros(codec.OUT_OF_BAND, "u1")
    body, buffers = codec.dumps([small, large])
    assert [codec.OUT_OF_BAND] == [view.nbytes for view in buffers]
    assert ("B", 1, True) == (buffers[0].format, buffers[0].ndim, buffers[0].c_contiguous)
    large[0] = 7
    assert 7 == buffers[0][0]
    assert len(body) + codec.OUT_OF_BAND == codec.size_of(body, buffers)


def test_size_of_counts_bytes() -> None:
    """Sizes are in bytes, for views of wider items too."""
    assert 2 + 8 + 3 == codec.size_of(b"ab", [memoryview(bytearray(8)).cast("i"), b"xyz"])
    assert 2 == codec.size_of(bytearray(b"ab"))


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(30_000.0).reshape(100, 300),
        numpy.asfortranarray(numpy.arange(30_000.0).reshape(100, 300)),
        numpy.arange(60_000.0)[::2],
        numpy.arange(30_000.0).reshape(100, 300).T,
        numpy.zeros((0, 3)),
        numpy.array(3.0),
        numpy.array(["a", {"b": 1}, None], dtype=object),
        numpy.array([(1, 2.0)] * 3000, dtype=[("i", "i4"), ("f", "f8")]),
        numpy.array(["2026-01-01"] * 3000, dtype="M8[D]"),
        numpy.arange(3000, dtype=">i8"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays(array: Any) -> None:
    """NumPy arrays of all kinds arrive equal, writable, and in their order of axes."""
    for arrived in (round_trip(array), codec.copy_value(array)):
        assert array.dtype == arrived.dtype
        assert array.shape == arrived.shape
        assert array.tolist() == arrived.tolist()
        assert arrived.flags.writeable
        assert not numpy.shares_memory(array, arrived) or not array.size
        if array.size and (array.flags.c_contiguous or array.flags.f_contiguous):
            assert array.strides == arrived.strides


@pytest.mark.parametrize("size", [10, 50_000])
def test_read_only_array_stays_read_only(size: int) -> None:
    """An array that may not be written to may not be at the receiver either, and a copy does not share its memory."""
    array = numpy.arange(size)
    array.flags.writeable = False
    for arrived in (round_trip(array), codec.copy_value(array)):
        assert not arrived.flags.writeable
        assert (array == arrived).all()
        assert not numpy.shares_memory(array, arrived)


def test_copy_shares_nothing() -> None:
    """What a copied value holds can be changed without the original's noticing."""
    value: dict[str, Any] = {"list": [1], "array": numpy.zeros(100_000), "bytes": bytearray(b"abc")}
    twin = codec.copy_value(value)
    twin["list"].append(2)
    twin["array"][0] = 1
    twin["bytes"][0] = 0
    assert [1] == value["list"]
    assert 0 == value["array"][0]
    assert bytearray(b"abc") == value["bytes"]


def test_functions_and_local_classes_go_by_value() -> None:
    """Lambdas, closures and local classes work, with their large buffers out of band."""
    weights = numpy.arange(10_000.0)

    class Local:
        def total(self) -> Any:
            return weights.sum()

    body, buffers = codec.dumps((lambda x: x + weights[1], Local()))
    assert [weights.nbytes] == [view.nbytes for view in buffers]
    function, local = codec.loads(body, [bytearray(view) for view in buffers])
    assert 3.0 == function(2)
    assert weights.sum() == local.total()


MAIN = """
    import subprocess, sys
    from monarch_async._core import codec

    class Thing:
        def name(self): return "first"

    def helper(): return Thing().name()

    def ask():
        body, buffers = codec.dumps((Thing(), helper))
        code = ("import sys; from monarch_async._core import codec; thing, helper = codec.loads(sys.stdin.buffer.read());"
                "sys.stdout.buffer.write(codec.dumps((thing, thing.name(), helper()))[0])")
        done = subprocess.run([sys.executable, "-c", code], input=body, capture_output=True)
        assert not done.returncode, done.stderr.decode()
        thing, name, helped = codec.loads(done.stdout)
        assert isinstance(thing, Thing), type(thing)
        print(name, helped)

    ask()
    old = Thing()
    class Thing:
        def name(self): return "second"
    ask()
    print(codec.loads(codec.dumps(old)[0]).name())
    print(codec.copy_value(helper) is helper, isinstance(codec.copy_value(Thing()), Thing), codec.copy_value(old).name())
"""


def test_main_goes_by_value() -> None:
    """Classes and functions of ``__main__`` work in another process, also after being redefined, and come home as what they are."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MAIN)], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert "" == done.stderr
    assert ["first first", "second second", "first", "True True first"] == done.stdout.splitlines()


def test_code_sent_by_value_keeps_its_file_name() -> None:
    """A traceback from another process shows where a function of ``__main__`` or a closure stands."""
    function = _closure(1)
    body, buffers = codec.dumps(function)
    assert __file__ == function.__code__.co_filename
    assert __file__ == codec.loads(body, buffers).__code__.co_filename


class Model:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def _closure(value: Any) -> Any:
    return lambda: value


def iter_nothing() -> Iterator[None]:
    yield from ()


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (((1, Model([0, {"k": LOCK}])), {}), "args[1].inner[1]['k'] (_thread.lock)"),
        (((), {"x": Model(LOCK)}), "kwargs['x'].inner (_thread.lock)"),
        (LOCK, "value (_thread.lock)"),
        (_closure(LOCK), "value variable 'value' (_thread.lock)"),
        (functools.partial(print, LOCK), "value.args[0] (_thread.lock)"),
        (Model(LOCK).__init__, "value.__self__.inner (_thread.lock)"),  # type: ignore[misc]
        ({"generator": iter_nothing()}, "value['generator'] (builtins.generator)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusal_names_the_place(value: Any, where: str) -> None:
    """What can't be pickled is named with its path and type, the reason, and what to do."""
    with pytest.raises(TypeError) as caught:
        codec.dumps(value)
    assert str(caught.value).startswith(f"can't send {where}: cannot pickle ")
    assert "__getstate__" in str(caught.value)
    with pytest.raises(TypeError):
        codec.copy_value(value)


def test_refusal_whatever_the_error() -> None:
    """Errors that are neither PicklingError nor TypeError are refusals too: pointers, recursion, one's own `__getstate__`."""

    class Own:
        def __getstate__(self) -> Any:
            raise ValueError("not now")

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, text in ((ctypes.pointer(ctypes.c_int()), "pointers"), (deep, "recursion"), (Own(), "not now")):
        with pytest.raises(TypeError, match=text) as caught:
            codec.dumps(value)
        assert caught.value.__cause__ is not None
        assert len(str(caught.value)) < 1000
    while deep:  # level by level: freeing it at once would recurse as deeply
        deep = deep.pop()


def test_non_contiguous_buffer_is_refused() -> None:
    """A buffer with gaps can't travel, in the body or beside it."""
    with pytest.raises(TypeError, match="contiguous"):
        codec.dumps(pickle.PickleBuffer(memoryview(bytearray(100_000))[::2]))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (SetstateRaises(ValueError("boom")), "builtins.ValueError"),
        (SetstateRaises(SystemExit(3)), "builtins.SystemExit"),
        (SetstateRaises(GeneratorExit()), "builtins.GeneratorExit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_failing_reconstructor(value: Any, name: str) -> None:
    """Whatever a reconstructor raises is a DecodeError with its story, and the next message is read."""
    body, _ = codec.dumps(value)
    with pytest.raises(DecodeError) as caught:
        codec.loads(body)
    error = caught.value
    assert name == error.type_name
    assert str(error).startswith(f"{name.removeprefix('builtins.')}: ")
    assert "__setstate__" in error.remote_traceback
    assert name == type_name(type(error.__cause__))
    assert [1] == round_trip([1])


def test_keyboard_interrupt_is_not_swallowed() -> None:
    """Ctrl-C while unpickling is the user's, not the payload's."""
    body, _ = codec.dumps(SetstateRaises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        codec.loads(body)


def test_missing_module_has_a_hint() -> None:
    """A module that isn't importable here is named, with what to do."""
    with pytest.raises(DecodeError, match="No module named 'nowhere'") as caught:
        codec.loads(b"cnowhere\nThing\n.")
    assert "make it importable here" in caught.value.__notes__[0]


@given(st.data())
def test_garbage_is_a_decode_error(data: st.DataObject) -> None:
    """Cut and changed bodies give a value or a DecodeError, nothing else."""
    body = bytearray(pickle.dumps({"a": [1, 2.5, "x", (None, b"y")]}, 5))
    cut = data.draw(st.integers(0, len(body)))
    flip = data.draw(st.integers(0, len(body) - 1))
    body[flip] = data.draw(st.sampled_from([0, 1, 46, 46, 255, 40, 41, 75]))
    try:
        codec.loads(bytes(body[:cut]))
    except DecodeError:
        pass


def test_missing_buffers_are_a_decode_error() -> None:
    """A body that wants more buffers than came with it is refused."""
    body, _ = codec.dumps(numpy.zeros(100_000))
    with pytest.raises(DecodeError, match="out-of-band"):
        codec.loads(body)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, True),
        (True, True),
        (1, True),
        (1.5, True),
        ("x", True),
        (b"x", True),
        ((), True),
        ((1, ("two", (3.0, None))), True),
        (bytearray(b"x"), False),
        ([1], False),
        ((1, [2]), False),
        ((1, (2, {})), False),
        (frozenset(), False),
        (1j, False),
        (type("Sub", (int,), {})(1), False),
        (type("Named", (tuple,), {})((1,)), False),
    ],
)
def test_is_plain(value: Any, expected: bool) -> None:
    """Only exact immutable built-ins, all through, may skip pickling."""
    assert expected is codec.is_plain(value)


def test_is_plain_on_deep_tuples() -> None:
    """Nesting past any sense is not plain, rather than an error."""
    deep: Any = ()
    for _ in range(5000):
        deep = (deep,)
    assert not codec.is_plain(deep)


def test_cloudpickle_is_not_imported_for_plain_values() -> None:
    """A process that sends nothing by value doesn't pay for cloudpickle's import."""
    code = "import sys; from monarch_async._core import codec; codec.dumps([1]); print('cloudpickle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, timeout=60, check=True)
    assert b"False\n" == done.stdout
