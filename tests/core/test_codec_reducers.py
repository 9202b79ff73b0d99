"""Reducers of the codec: they hold for one codec only, know the message they are in, and leave nothing behind."""

from __future__ import annotations

import copyreg
import ctypes
import gc
import pickle
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from monarch_async._core import codec

LOCK = threading.Lock()


def round_trip(value: Any) -> Any:
    """As between two processes: the receiver's buffers are its own and writable."""
    body, buffers = codec.dumps(value)
    return codec.loads(body, [bytearray(view) for view in buffers])


class Point:
    pass


class Marked:
    """Goes by a reducer in the tests that register one."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Nested:
    """Pickles another value while it is pickled."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        return codec.loads, codec.dumps(self.inner)


@pytest.fixture
def with_reducer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[codec.Scope]]:
    """`Marked` has a reducer that collects the scopes it saw."""
    scopes: list[codec.Scope] = []

    def reduce(marked: Marked) -> tuple[Any, ...]:
        scopes.append(codec.message_scope())
        return Marked, (("reduced", marked.value),)

    reducers = dict(codec._reducers)
    codec.register_reducer(Marked, reduce)
    yield scopes
    codec._reducers.clear()
    codec._reducers.update(reducers)
    codec._table.pop(Marked)


def test_reducers_hold_for_both_picklers(with_reducer: list[codec.Scope]) -> None:
    """A registered type goes by its reducer, also where cloudpickle takes over, and by its own way elsewhere."""
    assert ("reduced", 1) == round_trip(Marked(1)).value
    marked, function = round_trip((Marked(2), lambda: 3))
    assert ("reduced", 2) == marked.value
    assert 3 == function()
    assert ("reduced", 4) == codec.copy_value(Marked(4)).value
    assert 5 == pickle.loads(pickle.dumps(Marked(5))).value


def test_reducers_leave_copyreg_alone(with_reducer: list[codec.Scope], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered with copyreg holds beside our reducers, also when registered later."""
    monkeypatch.setitem(copyreg.dispatch_table, Point, lambda point: (OrderedDict, ()))
    assert OrderedDict() == round_trip(Point())
    codec._table.pop(Point)


def test_scope_is_one_message(with_reducer: list[codec.Scope]) -> None:
    """Reducers share notes within a message, get new ones for the next, and a message pickled inside another has its own."""
    codec.dumps([Marked(1), Marked(2)])
    codec.dumps(Marked(3))
    codec.dumps([Marked(4), Nested(Marked(5)), Marked(6)])
    first, second, third, fourth, fifth, sixth = with_reducer
    assert first is second
    assert third is not first
    assert fourth is sixth
    assert fifth is not fourth
    with pytest.raises(RuntimeError, match="no message is being pickled"):
        codec.message_scope()


def test_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer that asks again sees the whole message once more, with its notes, and what it said first is not sent."""

    def reduce(marked: Marked) -> tuple[Any, ...]:
        scope = codec.message_scope()
        scope.again = True
        scope.notes["count"] = scope.notes.get("count", 0) + 1
        return Marked, ((scope.last, scope.notes["count"], numpy.zeros(100_000)),)

    codec.register_reducer(Marked, reduce)
    try:
        body, buffers = codec.dumps([Marked(1), Marked(2)])
    finally:
        codec._reducers.pop(Marked)
        codec._table.pop(Marked)
    assert 2 == len(buffers)
    assert [(True, 3), (True, 4)] == [marked.value[:2] for marked in codec.loads(body, buffers)]


def test_failed_message_leaves_nothing(with_reducer: list[codec.Scope]) -> None:
    """After a refusal the next message is whole: no half body, no memo, no buffer of the one before."""
    with pytest.raises(TypeError):
        codec.dumps([Marked(0), numpy.zeros(100_000), LOCK])
    body, buffers = codec.dumps([1, "x"])
    assert (pickle.dumps([1, "x"], 5), []) == (body, buffers)


def test_nothing_of_a_message_is_kept(with_reducer: list[codec.Scope]) -> None:
    """The pickler kept for the next message holds nothing of the last one, and a large one is freed at once, without the collector."""
    gc.disable()
    try:
        for size in (10, 200_000):
            array = numpy.zeros(size)
            gone = weakref.ref(array)
            codec.dumps([array, Marked(b"x" * size)])
            del array
            assert None is gone()
    finally:
        gc.enable()


def test_threads_do_not_mix(with_reducer: list[codec.Scope]) -> None:
    """Threads that pickle at the same time get each their own message."""
    failures: list[Any] = []

    def work(number: int) -> None:
        for turn in range(300):
            value = [Marked((number, turn)), [number] * 50]
            marked, numbers = round_trip(value)
            if (("reduced", (number, turn)), [number] * 50) != (marked.value, numbers):
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures


def test_install_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a module is installed before the first message after its import, and not asked again once it is done."""
    calls: list[bool] = []

    def install() -> bool:
        calls.append(len(calls) > 0)
        return calls[-1]

    monkeypatch.setattr(codec, "_awaited", codec._awaited)
    monkeypatch.setattr(codec, "_install", codec._install)
    codec.when_imported("a_module_to_come", install)
    codec.dumps(1)
    assert [] == calls
    monkeypatch.setitem(sys.modules, "a_module_to_come", sys)
    for _ in range(4):
        codec.dumps(1)
    assert [False, True] == calls


class Elsewhere:
    """Its bytes are not where it is, but for who wants all of them in the body."""


def test_a_buffer_may_stand_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy within this process it arrives as what its exporter says, uncopied; the reducer is told what is wanted of it."""
    seen: list[tuple[bool, bool]] = []
    here = object()

    def reduce(obj: Elsewhere) -> tuple[Any, ...]:
        scope = codec.message_scope()
        seen.append((scope.local, scope.whole))
        memory: Any = (ctypes.c_ubyte * codec.OUT_OF_BAND)()
        memory.__here__ = here
        return _same, (pickle.PickleBuffer(memory),)

    codec.register_reducer(Elsewhere, reduce)
    try:
        assert codec.copy_value(Elsewhere()) is here
        body, buffers = codec.dumps(Elsewhere())
        assert bytearray(codec.OUT_OF_BAND) == codec.loads(body, [bytearray(view) for view in buffers])
        assert codec.OUT_OF_BAND == len(codec.loads(codec.dumps_whole(Elsewhere())))
        assert [(True, False), (False, False), (False, False), (False, True)] == seen
        assert codec.copy_value([Elsewhere(), bytearray(codec.OUT_OF_BAND)])[0] is here
    finally:
        del codec._reducers[Elsewhere], codec._table[Elsewhere]


def _same(value: Any) -> Any:
    return value
