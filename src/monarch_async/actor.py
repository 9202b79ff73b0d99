"""Actors: a class with endpoints, and what its code can know about where it runs.

A subclass of `Actor` is spawned on a mesh of processes; each process gets one instance. ``procs.spawn("name", Class, …)`` gives a mesh of them,
which to a type checker looks like the class itself: its endpoints have the adverbs, and it can be sliced and awaited.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Self

from monarch_async._core.events import Failure as MeshFailure
from monarch_async._runtime.context import ASYNC, SYNC, Handler, Message
from monarch_async._runtime.thread import ActorThread
from monarch_async.endpoint import EndpointDefinition, definitions_of
from monarch_async.port import ResponsePort
from monarch_async.shape import MeshOps

__all__ = ["Actor"]

if TYPE_CHECKING:

    class _MeshFace(MeshOps):
        """What a mesh of actors has beside its endpoints, for type checkers: `spawn` is said to return the class."""

        def __await__(self) -> Generator[Any, None, Self]: ...
        async def stop(self, reason: str = "") -> None: ...
        async def __aenter__(self) -> Self: ...
        async def __aexit__(self, *exc: object) -> None: ...
        @property
        def initialized(self) -> Any: ...

else:
    _MeshFace = object


class Actor(_MeshFace):
    """Base class of actors.

    Optional methods, ``def`` or ``async def``:

    * ``__supervise__(self, failure: MeshFailure) -> bool``: something that this actor spawned has failed; truthy if that is dealt with,
      otherwise this actor fails too.
    * ``__cleanup__(self, exc: BaseException | None)``: the actor is stopped, or failed of `exc`.
    """

    def __supervise__(self, failure: MeshFailure) -> Any:
        return False

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
        return _unpack_behavior, (self.cls, self.args, self.kwargs)

    def construct(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

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


_handlers: dict[type, tuple[Mapping[str, Handler], bool]] = {}


def _unpack_behavior(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActorBehavior:
    behavior = ActorBehavior(cls, args, kwargs)
    known = _handlers.get(cls)
    if known is None:
        known = _handlers[cls] = _handlers_of(cls)
    behavior.handlers, behavior.threaded = known
    return behavior


def prepare(behavior: ActorBehavior) -> ActorBehavior:
    """The same behavior with its handlers, for an actor in this process."""
    return _unpack_behavior(behavior.cls, behavior.args, behavior.kwargs)


def _handlers_of(cls: type) -> tuple[Mapping[str, Handler], bool]:
    """Handlers by name; and whether all endpoints are synchronous, so that the constructor belongs in the actor's thread too.

    Plain methods are there under ``name()``, for `as_endpoint`.
    """
    definitions = definitions_of(cls)
    handlers = {name: definition.handler for name, definition in definitions.items()}
    threaded = bool(handlers) and all(handler.kind == SYNC for handler in handlers.values())
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if inspect.isfunction(function) and not name.startswith("__"):
            handlers[f"{name}()"] = Handler(function, ASYNC if inspect.iscoroutinefunction(function) else SYNC)
    return handlers, threaded


def check_class(cls: Any) -> dict[str, EndpointDefinition[..., Any]]:
    """The endpoints of what is to be spawned; `TypeError` if it is no actor class."""
    if not inspect.isclass(cls):
        raise TypeError(f"spawn takes a class and the arguments to construct it with, not {cls!r}: the instance is made in the process")
    if not issubclass(cls, Actor):
        raise TypeError(f"{cls.__qualname__} is no Actor: derive it from monarch_async.Actor")
    return definitions_of(cls)
