"""Values to bytes and back: what a message's body is.

A body is one pickle of protocol 5. Buffers of 16 KiB and more (NumPy arrays, tensors by their reducers, anything that
hands out `pickle.PickleBuffer`) stay beside it, uncopied, so that the link can write them from where they lie; smaller ones
are cheaper inside. `bytes`, `bytearray` and `str` of 256 KiB and more stay beside it too (`lifting`); the receiver makes copies of them.

Rules:

* Plain `pickle` first, since it is several times faster. `cloudpickle` takes over where that fails (lambdas, local classes,
  classes redefined since) and where the bytes name ``__main__``: the other process has another ``__main__``, so what is
  defined there travels by value. A string that merely says so costs time, not correctness.
* Out-of-band buffers are views of the sender's memory: whoever keeps them past the call must expect later changes to show.
* The codec knows no refs and no tensors. Reducers for such types are registered; a reducer may keep notes for the length of
  one message (`Scope`), and may ask for that message to be pickled once more when it has learnt something too late.
* A value that can't be pickled is the caller's fault: `TypeError`, which names the place in the value. A body that can't be
  unpickled is the sender's: `DecodeError`. Nothing that a reconstructor raises gets past it, not even `SystemExit` from a
  module without a main guard.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from threading import local
from typing import Any

from monarch_async._core.lifting import LIFTED, Lifter
from monarch_async._core.parts import parts_of
from monarch_async._core.stories import format_error, type_name
from monarch_async._core.views import reduce_view
from monarch_async.errors import DecodeError

__all__ = [
    "OUT_OF_BAND",
    "Buffer",
    "Buffers",
    "Scope",
    "copy_value",
    "dumps",
    "dumps_whole",
    "is_plain",
    "loads",
    "message_scope",
    "register_reducer",
    "size_of",
    "when_imported",
]

OUT_OF_BAND = 16 * 1024
"""Buffers of this many bytes and more stay out of the body."""

Buffer = bytes | bytearray | memoryview
Reducer = Callable[[Any], Any]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_NESTING = 50
_PROBES = 300  # how many parts of a value are tried before the search for what doesn't pickle ends
_KEPT_BODY = 1024  # a writer that wrote more is not used again: its memo never shrinks, and is cleared in full for each message

_modules = sys.modules
_partial = functools.partial
_pickle = pickle.dumps
_unpickle = pickle.loads

_reducers: dict[type, Reducer] = {}
_table: dict[type, Reducer] = {}  # copyreg's entries, then ours: one exact dict, since the C pickler asks it for every object
_table_size = -1  # of copyreg's table when ours was made
_awaited = ""  # no module has this name
_install: Callable[[], bool] = bool


class Buffers(list[memoryview]):
    """The out-of-band buffers of one message. `placed` is for whoever sends it; the others are there with bytes on devices (`parcels`)."""

    __slots__ = ("devices", "placed", "settled", "split")
    devices: frozenset[int]
    settled: Buffers
    split: Any

    def __init__(self, views: Iterable[memoryview] = ()) -> None:
        super().__init__(views)
        self.placed: Any = None


class Scope:
    """What reducers remember during one message: `notes` by owner; `again` set asks for a second pass, in which `last` is true.

    `local`: a copy for this process, where a buffer arrives as what its exporter has for `__here__`. `whole`: all goes into the body.
    """

    __slots__ = ("again", "last", "local", "notes", "whole")

    def __init__(self, local: bool = False, whole: bool = False) -> None:
        self.again = False
        self.last = False
        self.local, self.whole = local, whole
        self.notes: dict[str, Any] = {}


class _Pickler(pickle.Pickler):
    """The C pickler with our reducers."""

    dispatch_table = _table


class _Writer:
    """A pickler with its output. Making one costs more than pickling a small message, so each thread keeps one."""

    __slots__ = ("buffers", "chunks", "lifter", "limit", "local", "pickler", "scope")

    def __init__(self, pickler: Any, limit: int) -> None:
        self.limit, self.local = limit, False
        self.buffers = Buffers()
        self.chunks: list[bytes | bytearray] = []
        self.lifter: Lifter | None = None
        self.scope: Scope | None = None
        output = types.SimpleNamespace(write=self.chunks.append)
        self.pickler = pickler(output, 5, buffer_callback=self._keep)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        if self.chunks:  # what has been written comes before it
            self._lift()
        return _keep_large(self.buffers, self.limit, buffer)

    def _lift(self) -> None:
        if self.limit == OUT_OF_BAND:
            self.lifter = self.lifter or Lifter()
            self.buffers.extend(self.lifter.lift(self.chunks))

    def write(self, obj: Any) -> tuple[bytes, Buffers]:
        """Pickle `obj`, twice when a reducer asks for it, and keep nothing of it."""
        try:
            self.pickler.dump(obj)
            if self.scope is not None and self.scope.again:
                self.scope.last = True
                self.chunks.clear()
                self.buffers.clear()
                self.lifter = None
                self.pickler.clear_memo()
                self.pickler.dump(obj)
            if len(self.chunks) > 1:
                self._lift()
                return b"".join(self.chunks), self.buffers
            return self.chunks[0], self.buffers  # type: ignore[return-value]  # the pickler's own bytes: no value comes first
        finally:
            self.lifter = None
            self.pickler.clear_memo()
            self.chunks.clear()
            self.buffers = Buffers()
            self.scope = None


class _Thread(local):
    """`def` endpoints pickle in their own threads."""

    def __init__(self) -> None:
        self.idle: _Writer | None = None
        self.active: _Writer | None = None  # set while a message is pickled; what runs then may pickle another one


_thread = _Thread()


def register_reducer(kind: type, reducer: Reducer) -> None:
    """Pickle objects of exactly `kind` by `reducer(obj)`, which returns what `__reduce__` would. Other pickles are untouched."""
    _reducers[kind] = reducer
    _refresh_table()


def when_imported(module: str, install: Callable[[], bool]) -> None:
    """Call `install` before the first message after `module` was imported, and again until it returns true.

    There is one such place, so that the check costs every message no more than a look into a dict.
    """
    global _awaited, _install
    _awaited, _install = module, install


def message_scope() -> Scope:
    """The notes of the message now being pickled by this thread. For reducers; raises `RuntimeError` elsewhere."""
    writer = _thread.active
    if writer is None:
        raise RuntimeError("no message is being pickled: reducers of the codec work only under codec.dumps")
    if writer.scope is None:
        writer.scope = Scope(writer.local, whole=writer.limit > OUT_OF_BAND)
    return writer.scope


def dumps(obj: Any, by_name: bool = False) -> tuple[bytes, Buffers]:
    """Body and out-of-band buffers (contiguous, of bytes). Raises `TypeError` when `obj` can't be pickled.

    `by_name` is for bytes that stay in this process: what is defined in ``__main__`` may be referred to.
    """
    if _awaited in _modules:
        _run_awaited()
    try:
        if _reducers:
            body, buffers = _dump_reduced(obj, by_name)
        else:
            buffers = Buffers()
            body = _pickle(obj, 5, buffer_callback=_partial(_keep_large, buffers, OUT_OF_BAND))
            if len(body) >= LIFTED:  # here nothing can be lifted; others of this size may follow
                register_reducer(memoryview, reduce_view)
        # As a test for "contains", `in` and `find` cost two and three times as much on small bodies.
        if by_name or not body.partition(b"__main__")[1]:
            return body, buffers
    except (AttributeError, pickle.PicklingError, TypeError) as error:
        # Not from the start: where there is no reducer at all, small messages are faster.
        if memoryview not in _reducers and "memoryview" in str(error):
            register_reducer(memoryview, reduce_view)
            return dumps(obj, by_name)
    except MemoryError:
        raise
    except Exception as error:
        raise _refusal(obj, error) from error
    return _dump_by_value(obj, OUT_OF_BAND, by_name)


def dumps_whole(obj: Any) -> bytes:
    """Everything in the body. Raises `TypeError` like `dumps`."""
    body, buffers = dumps(obj)
    if not buffers:
        return body
    return _dump_by_value(obj, sys.maxsize)[0]


def loads(body: Buffer, buffers: Sequence[Any] = ()) -> Any:
    """The value. Raises `DecodeError`, with the story of what was raised, whatever the bytes are."""
    try:
        return _unpickle(body, buffers=buffers) if buffers else _unpickle(body)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _decode_error(error) from error


def copy_value(obj: Any) -> Any:
    """A copy that shares nothing mutable with `obj`, by a pickle round trip within this process.

    What is defined in ``__main__`` stays the same object here, since it can be found by name. Raises `TypeError` when it can't be
    pickled and `DecodeError` when it can't be put together again, as a message to another process would.
    """
    body, buffers = dumps(obj, True)
    return loads(body, [bytearray(view) if (here := getattr(view.obj, "__here__", None)) is None else here for view in buffers])


def is_plain(obj: Any, _depth: int = 0) -> bool:
    """Whether `obj` is immutable all through: None, bool, int, float, str, bytes, and tuples of them, by exact type."""
    kind = type(obj)
    if kind in _PLAIN:
        return True
    if kind is not tuple or _depth > _NESTING:
        return False
    for item in obj:  # a generator expression costs twice as much
        if type(item) in _PLAIN:
            continue
        if not is_plain(item, _depth + 1):
            return False
    return True


def size_of(body: Buffer, buffers: Iterable[Buffer] = ()) -> int:
    """Bytes that a message holds, for the accounts."""
    size = len(body)
    for buffer in buffers:
        size += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
    return size


def _keep_large(buffers: list[memoryview], limit: int, buffer: pickle.PickleBuffer) -> bool:
    """Whether the pickler should put `buffer` into the body."""
    view = buffer.raw()
    if view.nbytes < limit:
        return True
    buffers.append(view)
    return False


def _dump_reduced(obj: Any, local: bool = False) -> tuple[bytes, Buffers]:
    """Pickle with the reducers, by the thread's own writer unless that is at work further up the stack."""
    if len(copyreg.dispatch_table) != _table_size:
        _refresh_table()
    thread = _thread
    outer = thread.active
    writer = thread.idle if outer is None else None
    if writer is None:
        writer = _Writer(_Pickler, OUT_OF_BAND)
    writer.local, thread.idle, thread.active = local, None, writer
    try:
        body, buffers = writer.write(obj)
    finally:
        thread.active = outer
    if len(body) <= _KEPT_BODY and outer is None:
        thread.idle = writer
    return body, buffers


def _dump_by_value(obj: Any, limit: int, local: bool = False) -> tuple[bytes, Buffers]:
    writer = _Writer(_by_value_pickler(), limit)
    writer.local = local
    outer, _thread.active = _thread.active, writer
    try:
        return writer.write(obj)
    except MemoryError:
        raise
    except Exception as error:
        raise _refusal(obj, error) from error
    finally:
        _thread.active = outer


def _refresh_table() -> None:
    global _table_size
    _table_size = len(copyreg.dispatch_table)
    _table.update(copyreg.dispatch_table)  # never cleared: another thread may be pickling
    _table.update(_reducers)


def _run_awaited() -> None:
    global _awaited
    if _install():
        _awaited = ""


@functools.cache
def _by_value_pickler() -> Any:
    # cloudpickle is half of what importing this package would cost, and most processes never need it.
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def with_file(code: types.CodeType) -> tuple[Any, ...]:
        # cloudpickle hides where code is from; in a traceback from another process that is what the user wants to know.
        make, fields = reduce_code(code)
        return make, tuple(code.co_filename if field == "<dynamic-code>" else field for field in fields)

    table = ChainMap(_reducers, {types.CodeType: with_file}, *cloudpickle.Pickler.dispatch_table.maps)
    return type("ByValue", (cloudpickle.Pickler,), {"dispatch_table": table})


def _decode_error(error: BaseException) -> DecodeError:
    name, text, story = format_error(error)
    failure = DecodeError(f"{name}: {text}")
    failure.type_name, failure.text, failure.remote_traceback = name, text, story
    if isinstance(error, ImportError):
        failure.add_note("What was sent refers to a module that this process can't import: make it importable here (PYTHONPATH, install).")
    return failure


def _refusal(obj: Any, error: Exception) -> TypeError:
    """Say which part of `obj` doesn't pickle, and what to do."""
    path, culprit, cause = "value", obj, error
    if type(obj) is tuple and len(obj) == 2 and type(obj[0]) is tuple and type(obj[1]) is dict:
        path = ""  # a call's arguments: its parts are named below
    budget = _PROBES
    for _ in range(0 if isinstance(error, RecursionError) else _NESTING):
        for suffix, part in parts_of(culprit, path):
            budget -= 1
            failure = _failure(part) if budget >= 0 else None
            if failure is not None:
                path, culprit, cause = suffix, part, failure
                break
        else:
            break
    _, reason, _ = format_error(cause)
    where = f"{path or 'the arguments'} ({type_name(type(culprit))})"
    return TypeError(
        f"can't send {where}: {reason}; send the data it is made of and build it at the receiver, "
        "or leave it out of the pickle with __getstate__ or __reduce__"
    )


def _failure(part: Any) -> Exception | None:
    writer = _Writer(_by_value_pickler(), 0)
    outer, _thread.active = _thread.active, writer
    try:
        writer.write(part)
    except Exception as error:
        return error
    finally:
        _thread.active = outer
    return None
