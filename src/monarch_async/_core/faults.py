"""Exceptions between processes: what a handler raised, as the caller sees it.

A fault is a msgpack array: type name, message, traceback text, actor, pickled exception or nil, map or nil. The texts always arrive;
the pickle is a bonus. From it the caller gets a *joint* exception: an `ActorError` that is also an instance of the original's type,
so that both ``except KeyError`` and ``except ActorError`` catch it, with the original as its ``__cause__``.

Rules:

* Encoding never raises, and a fault is bounded: 16 KiB of message, 64 KiB of traceback (head and tail), 1 MiB of pickle.
* An exception is taken apart into class, arguments and attributes where it keeps Python's own way of pickling, and put together without
  calling its ``__init__``: a required keyword argument is no obstacle. Where it has a ``__reduce__`` of its own, that is used.
* What can't be pickled, put together or joined (an attribute that is a lock, a module missing here, a type that can't be
  subclassed) arrives as a plain `ActorError`, with a note that says why.
* What isn't an `Exception` (``SystemExit``, ``KeyboardInterrupt``, ``asyncio.CancelledError``) crosses as text only, since raised again
  it would stop the caller's loop; so do ``StopIteration`` and ``StopAsyncIteration``, which coroutines can't raise.
* This package's own exceptions arrive as themselves. An `ActorError` passed on by a second actor keeps type, message and actor of where
  it was raised; each hop's traceback is appended.
* A joint exception is pickled as its parts, since its class can't be found by name anywhere.
"""

from __future__ import annotations

import copyreg
import traceback
import types
from typing import Any
from weakref import WeakValueDictionary

import msgpack

from monarch_async._core.codec import dumps_whole, loads
from monarch_async._core.stories import format_error, type_name
from monarch_async.errors import ActorError, ProtocolError, fold_errors

__all__ = ["decode_fault", "encode_fault"]

_TEXT = 16 * 1024  # bytes, as the other two
_STORY = 64 * 1024
_PICKLE = 1024 * 1024
_ORIGINAL = "_original"  # attribute of a joint exception
_FIELDS = {"type_name", "text", "remote_traceback", "actor", "errors", _ORIGINAL}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for what is defined in Python
_TEXT_ONLY = (StopIteration, StopAsyncIteration)

_joint_types: WeakValueDictionary[type, type] = WeakValueDictionary()


def encode_fault(exc: BaseException, *, actor: str) -> bytes:
    """The fault to send for `exc`, raised in the actor with the display name `actor`."""
    name, text, story = format_error(exc)
    if isinstance(exc, ActorError) and exc.type_name:
        hop = ["".join(traceback.format_tb(exc.__traceback__)), *fold_errors(exc.errors)]
        name, text = exc.type_name, exc.text
        story = f"{exc.remote_traceback.rstrip()}\n\nPassed on by {actor or 'another actor'}:\n" + "\n".join(hop)
        actor = exc.actor or actor
    pickled: bytes | None = None
    extra: dict[str, str] | None = None
    if isinstance(exc, Exception) and not isinstance(exc, _TEXT_ONLY):
        try:
            pickled = dumps_whole(_take_apart(exc))
        except Exception as trouble:
            # Pickling runs the user's code, which may fail in any way; the text goes all the same, and the note tells.
            extra = {"why": _shorten(format_error(trouble)[1], _TEXT)}
        if pickled is not None and len(pickled) > _PICKLE:
            extra = {"why": f"it pickles to {len(pickled)} bytes, more than {_PICKLE}"}
            pickled = None
    fault = [name, _shorten(text, _TEXT), _shorten(story, _STORY), actor, pickled, extra]
    return msgpack.packb(fault, unicode_errors="surrogatepass")  # type: ignore[no-any-return]


def decode_fault(data: bytes | bytearray | memoryview) -> Exception:
    """The exception to raise at the caller: an `ActorError`, or one of this package's own. Raises `ProtocolError` for other bytes."""
    try:
        name, text, story, actor, pickled, extra = msgpack.unpackb(data, unicode_errors="surrogatepass")
        if not all(isinstance(item, str) for item in (name, text, story, actor)) or not isinstance(extra, dict | None):
            raise ValueError("a field has the wrong type")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the peer sent {len(data)} bytes as a fault that are none: {error}") from error
    fields = {"type_name": name, "text": text, "remote_traceback": story, "actor": actor}
    why = (extra or {}).get("why", "")
    if pickled is not None:
        try:
            return _arrive(_put_together(loads(pickled)), fields)
        except Exception as trouble:
            # Putting together runs the user's code too.
            cause_name, cause_text, _ = format_error(trouble.__cause__ or trouble)
            why = f"{cause_name}: {cause_text}"
    failure = ActorError(f"{name}: {text}")
    failure.__dict__.update(fields)
    if why:
        failure.add_note(f"Not an instance of {name} here: {why}")
    return failure


def _shorten(text: str, limit: int) -> str:
    """Head and tail of `text`, `limit` bytes of UTF-8 at most beside the line that tells what is missing."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= limit:
        return text
    half = limit // 2
    head, tail = data[:half].decode("utf-8", "ignore"), data[-half:].decode("utf-8", "ignore")
    return f"{head}\n… {len(data) - 2 * half} bytes left out …\n{tail}"


def _native(kind: type) -> Any:
    """The nearest base that is written in C: it fixes the layout, and its `__new__` and `__init__` fill that."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _contents(exc: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and attributes, as Python's own pickling of exceptions has them, and what lies in slots."""
    reduced = _native(type(exc)).__reduce__(exc)
    state = dict(reduced[2]) if len(reduced) > 2 and reduced[2] else {}
    for name in copyreg._slotnames(type(exc)):  # type: ignore[attr-defined]
        if hasattr(exc, name):
            state[name] = getattr(exc, name)
    return reduced[1], state


def _take_apart(exc: BaseException) -> Any:
    """What to pickle for `exc`: (class, arguments, attributes), or `exc` itself where its class pickles in a way of its own."""
    if isinstance(exc, ActorError) and _ORIGINAL in exc.__dict__:
        parts = _take_apart(exc.__dict__[_ORIGINAL])
        if isinstance(parts, tuple):  # what was added to the joint exception, notes for example, goes along
            parts[2].update((name, value) for name, value in exc.__dict__.items() if name not in _FIELDS)
        return parts
    kind = type(exc)
    if (kind.__reduce_ex__, kind.__reduce__, kind.__setstate__) != (
        object.__reduce_ex__,
        _native(kind).__reduce__,
        BaseException.__setstate__,
    ):
        return exc
    arguments, state = _contents(exc)
    if isinstance(exc, BaseExceptionGroup):
        arguments = (exc.message, [_take_apart(member) for member in exc.exceptions])
    return kind, arguments, state


def _put_together(parts: Any) -> Exception:
    if isinstance(parts, tuple):
        kind, arguments, state = parts
        if issubclass(kind, BaseExceptionGroup):
            arguments = (arguments[0], [_put_together(member) for member in arguments[1]])
        parts = _make(kind, arguments, state)
    if not isinstance(parts, Exception):
        raise TypeError(f"a {type_name(type(parts))} is not an Exception")
    return parts


def _make(kind: type, arguments: tuple[Any, ...], state: dict[str, Any]) -> Any:
    native = _native(kind)
    # `MemoryError` keeps a stock of its own, and refuses to make what is laid out as its other base.
    maker = BaseException if native is MemoryError and issubclass(kind, ActorError) else native
    exc = maker.__new__(kind, *arguments)
    native.__init__(exc, *arguments)
    for name, value in state.items():
        try:
            object.__setattr__(exc, name, value)  # past a `__setattr__` that forbids it, as in frozen dataclasses
        except AttributeError:
            exc.__dict__[name] = value  # behind a property
    return exc


def _arrive(original: Exception, fields: dict[str, str]) -> Exception:
    """`original` as the caller sees it."""
    if not isinstance(original, ActorError) and not type(original).__module__.startswith("monarch_async."):
        return _join(original, fields)
    if isinstance(original, ActorError) and original.type_name:
        original.__dict__.update(fields)
    else:
        original.__dict__.pop("__notes__", None)  # the story has them
        original.add_note(f"Remote traceback of {fields['actor'] or 'another actor'}:\n{fields['remote_traceback'].rstrip()}")
    return original


def _join(original: Exception, fields: dict[str, Any]) -> ActorError:
    kind = type(original)
    joint_type = _joint_types.get(kind)
    if joint_type is None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        methods = {"__reduce_ex__": _reduce_joint, "__reduce__": _reduce_joint}
        joint_type = types.new_class(kind.__name__, (ActorError, kind), exec_body=lambda space: space.update(names | methods))
        _joint_types[kind] = joint_type
    joint: ActorError = _make(joint_type, *_contents(original))
    joint.__dict__.update(fields)
    joint.__dict__[_ORIGINAL] = original
    object.__setattr__(joint, "__cause__", original)
    return joint


def _reduce_joint(joint: ActorError, protocol: int = 2) -> tuple[Any, ...]:
    state = {name: value for name, value in joint.__dict__.items() if name != _ORIGINAL}
    return _rejoin, (_take_apart(joint.__dict__[_ORIGINAL]), state)


def _rejoin(parts: Any, state: dict[str, Any]) -> ActorError:
    return _join(_put_together(parts), state)
