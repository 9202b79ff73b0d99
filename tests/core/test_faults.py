"""Exceptions across processes: everything raised arrives, as itself where it can, as text where it can't, and kills nobody."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._core import codec
from monarch_async._core.faults import decode_fault, encode_fault
from monarch_async.errors import (
    ActorDied,
    ActorError,
    CallTimeout,
    ChannelFull,
    DeadlockError,
    DecodeError,
    PortClosed,
    ProtocolError,
)


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class NoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("constructed without arguments")


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class CountsInits(ValueError):
    inits = 0

    def __init__(self, text: str) -> None:
        super().__init__(text)
        CountsInits.inits += 1


class OwnReduce(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left, self.right = left, right

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnReduce, (self.left, self.right)


class Explodes(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    raise SystemExit(4)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Slotted(Exception):
    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where


class Picky(Exception):
    def __init_subclass__(cls, *, required: int) -> None:
        super().__init_subclass__()


@dataclass(frozen=True)
class Frozen(Exception):
    number: int


def raised(exc: BaseException) -> BaseException:
    """`exc` with a traceback."""
    try:
        raise exc
    except BaseException as caught:
        return caught


def sent(exc: BaseException, actor: str = "worker[1]") -> Any:
    return decode_fault(encode_fault(raised(exc), actor=actor))


def test_caught_by_both_types() -> None:
    """What a handler raised is caught by its own type and by ActorError, and tells where and why."""
    error = sent(KeyError("x"))
    assert isinstance(error, KeyError)
    assert isinstance(error, ActorError)
    assert ("builtins.KeyError", "'x'", "worker[1]") == (error.type_name, error.text, error.actor)
    assert str(error).startswith("KeyError: 'x'")
    assert "in raised" in str(error)
    assert ("x",) == error.args
    assert "KeyError" == type(error).__name__
    assert KeyError is type(error.__cause__)
    assert ("x",) == error.__cause__.args


@pytest.mark.parametrize("exc", [KeywordOnly(code=3), NoArguments(), Frozen(number=7), Slotted("here")], ids=lambda exc: type(exc).__name__)
def test_awkward_constructors_keep_their_type(exc: Exception) -> None:
    """A constructor that pickle could not call is no obstacle, since none is called: type, message, attributes and traceback arrive."""
    error = sent(exc)
    assert isinstance(error, type(exc))
    assert isinstance(error, ActorError)
    assert str(exc) == error.text
    assert "in raised" in error.remote_traceback
    for name in ("code", "number", "where"):
        assert getattr(exc, name, None) == getattr(error, name, None)


def test_exception_with_a_lock_arrives_as_text() -> None:
    """What can't be pickled costs the type, not the class name, the message or the traceback; a note says why."""
    error = sent(HoldsLock("jammed"))
    assert ActorError is type(error)
    assert "HoldsLock: jammed" in str(error)
    assert "in raised" in error.remote_traceback
    assert "cannot pickle '_thread.lock' object" in error.__notes__[0]


def test_constructor_is_not_called() -> None:
    """Neither the original's `__init__` nor its side effects run at the caller."""
    exc = CountsInits("once")
    assert 1 == CountsInits.inits
    assert isinstance(sent(exc), CountsInits)
    assert 1 == CountsInits.inits


def test_own_reduce_is_used() -> None:
    """A class that knows how to pickle itself is pickled that way."""
    error = sent(OwnReduce(1, 2))
    assert isinstance(error, OwnReduce)
    assert (1, 2) == (error.left, error.right)


@pytest.mark.parametrize(
    ("exc", "names"),
    [
        (FileNotFoundError(2, "No such file", "a.txt"), ("errno", "strerror", "filename")),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ("encoding", "object", "start", "end", "reason")),
        (ImportError("nope", name="mod", path="/p"), ("name", "path", "msg")),
        (SyntaxError("bad", ("f.py", 1, 2, "x y")), ("filename", "lineno", "text", "msg")),
        (asyncio.IncompleteReadError(b"ab", 5), ("partial", "expected")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_fields_of_builtin_exceptions(exc: Exception, names: tuple[str, ...]) -> None:
    """Fields that live in C and not in `__dict__` arrive: on the joint exception, and in any case on its cause."""
    error = sent(exc)
    assert isinstance(error, type(exc))
    for name in names:
        assert getattr(exc, name) == getattr(error.__cause__, name)
        if name != "text":  # ActorError's
            assert getattr(exc, name) == getattr(error, name)


@pytest.mark.parametrize(
    "exc",
    [
        asyncio.CancelledError("stop"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(1),
        BaseExceptionGroup("g", [SystemExit(1)]),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_what_would_stop_the_loop_is_text_only(exc: BaseException) -> None:
    """What isn't an Exception, or can't be raised in a coroutine, arrives as a plain ActorError with its name."""
    error = sent(exc)
    assert ActorError is type(error)
    assert f"{type(exc).__module__}.{type(exc).__qualname__}" == error.type_name


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (ActorDied("gone", mesh="m", rank=2, incarnation=1, signal=9, started=True, reason="killed"), ("rank", "signal", "started")),
        (CallTimeout("after 3 s"), ()),
        (DeadlockError("cycle", chain=("A.f", "B.g")), ("chain",)),
        (ChannelFull("full", limit=10, option="mailbox_messages"), ("limit", "option")),
        (PortClosed("closed"), ()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_own_exceptions_arrive_as_themselves(exc: Exception, expected: tuple[str, ...]) -> None:
    """This package's exceptions keep class, message and attributes, and get the remote traceback as one note, over any number of hops."""
    error = sent(sent(exc), actor="second")
    assert type(exc) is type(error)
    assert str(exc) == str(error)
    for name in expected:
        assert getattr(exc, name) == getattr(error, name)
    assert 1 == len(error.__notes__)
    assert error.__notes__[0].startswith("Remote traceback of second:")
    assert "Remote traceback of worker[1]:" in error.__notes__[0]


def test_decode_error_arrives_as_itself() -> None:
    """A payload that couldn't be unpickled is told to the caller with the cause's name."""
    with pytest.raises(DecodeError) as failure:
        codec.loads(b"\x80\x05garbage")
    error = decode_fault(encode_fault(failure.value, actor="worker"))
    assert DecodeError is type(error)
    assert str(error).startswith("_pickle.UnpicklingError: ")


def test_second_hop_keeps_the_first() -> None:
    """An error that an actor passes on keeps its type, message and origin, and shows both tracebacks."""

    def second_actor_awaits() -> None:
        raise first

    first = sent(KeyError("x"), actor="inner")
    first.add_note("noted by the second actor")
    with pytest.raises(KeyError) as caught:
        second_actor_awaits()
    error: Any = decode_fault(encode_fault(caught.value, actor="outer"))
    assert isinstance(error, KeyError)
    assert isinstance(error, ActorError)
    assert ("builtins.KeyError", "'x'", "inner") == (error.type_name, error.text, error.actor)
    story = error.remote_traceback
    assert story.index("in raised") < story.index("Passed on by outer") < story.index("in second_actor_awaits")
    assert ["noted by the second actor"] == error.__notes__
    assert KeyError is type(error.__cause__)


def test_wrapped_error_tells_both() -> None:
    """An error raised from a remote one shows the remote one's traceback as its cause."""
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("step failed") from sent(KeyError("x"))
    error = decode_fault(encode_fault(caught.value, actor="outer"))
    assert isinstance(error, RuntimeError)
    assert "Remote traceback:" in str(error)
    assert "KeyError: 'x'" in str(error)
    assert "The above exception was the direct cause" in str(error)


def test_group_keeps_its_members() -> None:
    """The group of a TaskGroup is one at the caller: `except*` takes it apart, and every member's text is in the traceback."""
    error = sent(ExceptionGroup("two", [ValueError("first"), KeywordOnly(code=5)]))
    assert isinstance(error, ExceptionGroup)
    assert isinstance(error, ActorError)
    assert [ValueError, KeywordOnly] == [type(member) for member in error.exceptions]
    assert "ValueError: first" in error.remote_traceback
    assert "KeywordOnly: code 5" in error.remote_traceback
    caught: list[Exception] = []
    try:
        raise error
    except* ValueError as group:
        caught += group.exceptions
    except* KeywordOnly as group:
        caught += group.exceptions
    assert ["first", "code 5"] == [str(member) for member in caught]


@pytest.mark.parametrize("exc", [Explodes("boom"), Picky("boom")], ids=lambda exc: type(exc).__name__)
def test_type_that_can_not_be_restored_falls_back(exc: Exception) -> None:
    """A reconstructor that raises, even SystemExit, or a type that can't be subclassed costs the type only."""
    error = sent(exc)
    assert ActorError is type(error)
    assert str(error).startswith(f"{__name__}.{type(exc).__name__}: boom")
    assert "Not an instance of" in error.__notes__[0]


def test_missing_module_falls_back() -> None:
    """An exception of a module that the caller hasn't got arrives as text."""
    namespace: dict[str, Any] = {"__name__": "nowhere_to_be_found"}
    exec("class Foreign(Exception): pass", namespace)
    kind = namespace["Foreign"]
    module = types.ModuleType("nowhere_to_be_found")
    module.Foreign = kind  # type: ignore[attr-defined]
    sys.modules["nowhere_to_be_found"] = module
    try:
        data = encode_fault(raised(kind("lost")), actor="a")
    finally:
        del sys.modules["nowhere_to_be_found"]
    error: Any = decode_fault(data)
    assert ActorError is type(error)
    assert "nowhere_to_be_found.Foreign: lost" in str(error)
    assert "No module named" in error.__notes__[0]


def test_local_and_redefined_classes() -> None:
    """A class that can't be found by name travels by value."""

    class Local(LookupError):
        pass

    error = sent(Local("inside"))
    assert isinstance(error, Local)
    assert "Local" == type(error).__name__


def test_unprintable_exception() -> None:
    """An exception whose `__str__` raises is reported all the same."""
    assert "raised RuntimeError" in sent(Unprintable("x")).text


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error)), codec.copy_value])
@pytest.mark.parametrize("exc", [KeyError("x"), KeywordOnly(code=3), FileNotFoundError(2, "No such file", "a"), OwnReduce(1, 2)], ids=repr)
def test_joint_exception_can_be_stored_and_sent(copied: Any, exc: Exception) -> None:
    """A received exception can be pickled, copied and sent on like any value."""
    error = sent(exc)
    error.add_note("kept")
    twin = copied(error)
    assert type(error) is type(twin)
    assert str(error) == str(twin)
    assert error.args == twin.args
    assert type(exc) is type(twin.__cause__)
    assert ["kept"] == twin.__notes__


def test_one_type_for_each_original() -> None:
    """Joint types are made once, so that errors compare by type."""
    assert type(sent(KeyError(1))) is type(sent(KeyError(2)))


def test_sizes_are_bounded() -> None:
    """A huge message or deep traceback is cut in the middle, and a huge pickle left out, with a note."""

    def deep(level: int) -> None:
        if level:
            (deep, other)[level % 2](level - 1)
        raise ValueError("é" * 1_000_000)

    def other(level: int) -> None:
        deep(level)

    with pytest.raises(ValueError, match="é") as caught:
        deep(300)
    data = encode_fault(caught.value, actor="a")
    error: Any = decode_fault(data)
    assert len(data) < 200_000
    assert ActorError is type(error)
    assert error.remote_traceback.startswith("Traceback (most recent call last)")
    assert error.remote_traceback.endswith("é\n")
    assert "bytes left out" in error.remote_traceback
    assert "pickles to" in error.__notes__[0]


@given(st.text(st.characters(exclude_categories=())))
def test_any_text(text: str) -> None:
    """Every text arrives, lone surrogates too."""
    assert text == sent(ValueError(text)).text


@given(st.binary(max_size=200))
def test_garbage_is_the_peers_fault(data: bytes) -> None:
    """Bytes that are no fault raise ProtocolError and nothing else."""
    with pytest.raises(ProtocolError):
        decode_fault(data)


@given(st.data())
def test_mutated_faults(data: st.DataObject) -> None:
    """A fault with changed bytes gives an exception or ProtocolError, never another failure."""
    fault = bytearray(encode_fault(raised(KeyError("x")), actor="a"))
    for _ in range(data.draw(st.integers(1, 4))):
        fault[data.draw(st.integers(0, min(60, len(fault) - 1)))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode_fault(bytes(fault)), Exception)
    except ProtocolError:
        pass


class OutOfRoom(MemoryError):
    pass


@pytest.mark.parametrize("exc", [MemoryError("no room"), OutOfRoom("no room")], ids=lambda exc: type(exc).__name__)
def test_memory_errors_keep_their_type(exc: Exception) -> None:
    """`MemoryError`, which Python makes in a way of its own, arrives as itself too, over any number of hops."""
    error = sent(sent(exc))
    assert isinstance(error, type(exc))
    assert isinstance(error, ActorError)
    assert ("no room",) == error.args
