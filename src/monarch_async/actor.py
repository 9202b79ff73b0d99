"""Actors: a class with endpoints, and what its code can know about where it runs.

A subclass of `Actor` is spawned on a mesh of processes; each process gets one instance. ``procs.spawn("name", Class, …)`` gives a mesh of
them, which to a type checker looks like the class itself: its endpoints have the adverbs, and it can be sliced and awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from monarch_async._core.binding import compile_binder
from monarch_async._core.codec import dumps_whole, loads
from monarch_async._core.events import Failure as MeshFailure
from monarch_async._runtime.context import ASYNC, SYNC, Handler, Message
from monarch_async._runtime.life import SAVE
from monarch_async._runtime.thread import ActorThread
from monarch_async.checkpoints import checkpoint_by_time, take_checkpoint
from monarch_async.endpoints import Binder, EndpointDefinition, check_names, definitions_of
from monarch_async.future import Future
from monarch_async.port import ResponsePort
from monarch_async.shape import MeshOps

__all__ = ["Actor"]

if TYPE_CHECKING:

    class _MeshFace(MeshOps):
        """What a mesh of actors has beside its endpoints, for type checkers: `spawn` is said to return the class."""

        def __await__(self) -> Generator[Any, None, Self]: ...
        def stop(self, reason: str = "") -> Future[None]: ...
        async def __aenter__(self) -> Self: ...
        async def __aexit__(self, *exc: object) -> None: ...
        @property
        def initialized(self) -> Future[Self]: ...

else:
    _MeshFace = object


_MESH_NAMES = frozenset(name for name in dir(MeshOps) if not name.startswith("_")) | {"stop", "initialized", "logger"}


class Actor(_MeshFace):
    """Base class of actors.

    Optional methods, ``def`` or ``async def``:

    * ``__supervise__(self, failure: MeshFailure) -> bool``: something that this actor spawned has failed; truthy if that is dealt with,
      otherwise this actor fails too.
    * ``__cleanup__(self, exc: BaseException | None)``: the actor is stopped, or failed of `exc`.
    * ``__checkpoint__(self)`` and ``__restore__(self, state)``, both or none: what the actor would need to go on from here, and how it does
      so after it was constructed again. Called by `checkpoint`, and as often as the restart policy's `checkpoint_every` says.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_names(cls, _MESH_NAMES)

    def __supervise__(self, failure: MeshFailure) -> Any:
        return False

    def checkpoint(self) -> Future[None]:
        """Take a checkpoint now: done when its owner's process has it, which is what the next life of this actor is given.

        The state is pickled before this returns, where ``__checkpoint__`` is a ``def``. Raises `UsageError` outside of an actor and for a
        class without ``__checkpoint__``, `TypeError` for what can't be pickled; the last good one is kept then. A state larger than the
        option `checkpoint_bytes` is an error of the future.
        """
        return take_checkpoint(self)

    @property
    def logger(self) -> logging.Logger:
        """A logger named after the class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")


class ActorBehavior:
    """A class and the arguments to construct it with, as a cell needs them. Travels to the process where the actor shall be."""

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.handlers: Mapping[str, Handler] = {}
        self.threaded = False

    def __reduce__(self) -> tuple[Any, ...]:
        if importable(self.cls):
            return _unpack_behavior, (self.cls, self.args, self.kwargs)
        return _unpack_by_value, (class_by_value(self.cls), self.args, self.kwargs)

    def construct(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

    async def restore(self, instance: Any, saved: bytes, thread: ActorThread | None) -> None:
        await _run(instance.__restore__, (loads(saved),), thread)

    async def cleanup(self, instance: Any, error: BaseException | None, thread: ActorThread | None) -> None:
        function = getattr(instance, "__cleanup__", None)
        if function is not None:
            await _run(function, (error,), thread)

    async def supervise(self, instance: Any, failure: MeshFailure, thread: ActorThread | None) -> bool:
        function = getattr(instance, "__supervise__", None)
        return function is not None and bool(await _run(function, (failure,), None))

    def port(self, message: Message) -> ResponsePort[Any]:
        return ResponsePort(message)


async def _run(function: Callable[..., Any], args: tuple[Any, ...], thread: ActorThread | None) -> Any:
    """Call a method of an actor, in its thread if it is synchronous and the actor has one."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    if thread is not None:
        return await thread.run(function, args, {}, None)
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


def importable(cls: type) -> bool:
    """Whether other processes can import the class by its name, instead of being sent its code."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return cls.__module__ != "__main__" and found is cls


_by_value: dict[type, bytes] = {}
_from_value: OrderedDict[bytes, type] = OrderedDict()
_KEPT = 256


def class_by_value(cls: type) -> bytes:
    """The code of a class. Actors that are spawned in one turn of the loop share it: making it costs many times what spawning does.

    It is compressed, so that the codec does not take it for a reference to ``__main__``.
    """
    code = _by_value.get(cls)
    if code is None:
        code = zlib.compress(dumps_whole(cls), 1)
        with contextlib.suppress(RuntimeError):  # no loop runs here: a thread, which does without
            asyncio.get_running_loop().call_soon(_by_value.pop, cls, None)
            _by_value[cls] = code
    return code


def _unpack_by_value(code: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActorBehavior:
    cls = _from_value.get(code)
    if cls is None:
        cls = _from_value[code] = loads(zlib.decompress(code))
        if len(_from_value) > _KEPT:
            _from_value.popitem(last=False)
    return _unpack_behavior(cls, args, kwargs)


_handlers: OrderedDict[type, tuple[Mapping[str, Handler], bool]] = OrderedDict()


def _unpack_behavior(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActorBehavior:
    behavior = ActorBehavior(cls, args, kwargs)
    known = _handlers.get(cls)
    if known is None:
        known = _handlers[cls] = _handlers_of(cls)
        if len(_handlers) > _KEPT:  # handlers hold their class, so no weak reference would do
            _handlers.popitem(last=False)
    behavior.handlers, behavior.threaded = known
    return behavior


def prepare(behavior: ActorBehavior) -> ActorBehavior:
    """The same behavior with its handlers, for an actor in this process."""
    return _unpack_behavior(behavior.cls, behavior.args, behavior.kwargs)


def _handlers_of(cls: type) -> tuple[Mapping[str, Handler], bool]:
    """Handlers by name; and whether all endpoints are synchronous, so that the constructor belongs in the actor's thread too.

    Plain methods are there under ``name()`` and, answering through a port, ``name(port)``, for `as_endpoint`.
    """
    definitions = definitions_of(cls)
    handlers = {name: definition.handler for name, definition in definitions.items()}
    handlers[SAVE] = Handler(checkpoint_by_time, ASYNC)
    threaded = bool(definitions) and all(definition.handler.kind == SYNC for definition in definitions.values())
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if inspect.isfunction(function) and not name.startswith("__"):
            kind = ASYNC if inspect.iscoroutinefunction(function) else SYNC
            handlers[f"{name}()"] = Handler(function, kind)
            handlers[f"{name}(port)"] = Handler(function, kind, explicit_port=True)
    return handlers, threaded


def check_class(cls: Any) -> dict[str, EndpointDefinition[..., Any]]:
    """The endpoints of what is to be spawned; `TypeError` if it is no actor class."""
    if not inspect.isclass(cls):
        raise TypeError(f"spawn takes a class and the arguments to construct it with, not {cls!r}: the instance is made in the process")
    if not issubclass(cls, Actor):
        raise TypeError(f"{cls.__qualname__} is no Actor: derive it from monarch_async.Actor")
    checked = _checked.get(cls)
    if checked is None:
        if hasattr(cls, "__checkpoint__") != hasattr(cls, "__restore__"):
            raise TypeError(f"{cls.__qualname__} needs both __checkpoint__ and __restore__, or none: what is saved is given back")
        checked = definitions_of(cls)
        for definition in checked.values():
            definition.binder  # noqa: B018  # raises for a method that lacks `self`, or the port
        _checked[cls] = checked
    return checked


_checked: WeakKeyDictionary[type, dict[str, EndpointDefinition[..., Any]]] = WeakKeyDictionary()


def takes_argument(cls: type, name: str) -> bool:
    """Whether the constructor of a class has an argument of that name."""
    return name in inspect.signature(cls.__init__).parameters  # type: ignore[misc]


_constructors: WeakKeyDictionary[type, Binder | None] = WeakKeyDictionary()


def check_arguments(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`TypeError` if the class can't be constructed with these arguments."""
    if cls not in _constructors:
        initialize = inspect.getattr_static(cls, "__init__")
        _constructors[cls] = compile_binder(initialize) if inspect.isfunction(initialize) else None
    bind = _constructors[cls]
    if bind is not None:
        bind(*args, **kwargs)
