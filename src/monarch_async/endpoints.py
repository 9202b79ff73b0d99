"""Endpoints: the methods of an actor that others may call, and the ways of calling them.

``@endpoint`` marks a method. On a mesh, ``mesh.method`` is an `Endpoint` with the adverbs `call`, `call_one`, `choose`, `stream` and
`broadcast`. They send when they are called, in program order, and return at once; a wrong call raises `TypeError` before anything
is sent. On the actor itself, ``self.method`` is the plain method.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload

from monarch_async._core.binding import compile_binder
from monarch_async._runtime.context import ASYNC, SYNC, Handler
from monarch_async.errors import UsageError
from monarch_async.future import Future
from monarch_async.port import Port
from monarch_async.sent import Sent, Stream
from monarch_async.value_mesh import ValueMesh

__all__ = ["Endpoint", "EndpointDefinition", "check_names", "concurrent_endpoint", "definitions_of", "endpoint"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Binder = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


class EndpointDefinition(Generic[P, R_co]):
    """A method that was marked as an endpoint."""

    name: str

    def __init__(self, function: Any, *, concurrent: bool = False, explicit_response_port: bool = False) -> None:
        if isinstance(function, EndpointDefinition):
            raise TypeError(f"{function.name} is an endpoint already: mark it once")
        if not callable(function) or isinstance(function, (staticmethod, classmethod)):
            raise TypeError(f"an endpoint is a method with 'self', not {function!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator: return a value, or send parts through a Port")
        if concurrent and not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{function.__qualname__} can't be concurrent: only async def overlaps, in the actor's thread one call follows the other"
            )
        self.function = function
        self.name = function.__name__
        self.concurrent = concurrent
        self.explicit_response_port = explicit_response_port
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._binder: Binder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A class that is sent by value takes its endpoints along: their functions, and nothing that is made from those."""
        return _define, (self.function, self.concurrent, self.explicit_response_port)

    @property
    def binder(self) -> Binder:
        """Checks the arguments of a call, without `self` and the port."""
        if self._binder is None:
            self._binder = compile_binder(self.function, 2 if self.explicit_response_port else 1)
        return self._binder

    @property
    def handler(self) -> Handler:
        kind = ASYNC if inspect.iscoroutinefunction(self.function) else SYNC
        return Handler(self.function, kind, self.concurrent, self.explicit_response_port)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Endpoint[P, R_co]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        return self.function.__get__(instance, owner)


def _define(function: Any, concurrent: bool, explicit_response_port: bool) -> EndpointDefinition[..., Any]:
    return EndpointDefinition(function, concurrent=concurrent, explicit_response_port=explicit_response_port)


class Endpoint(Generic[P, R_co]):
    """An endpoint of a mesh of actors. Implemented by `sending.MeshEndpoint`; this is what type checkers see."""

    __slots__ = ()

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co]]:
        """Call it on every member. The first error raises at once, as an `ActorError` that knows the errors of all points."""
        raise NotImplementedError

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call it on the only member. `ValueError` if there are several."""
        raise NotImplementedError

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call it on one member, picked at random."""
        raise NotImplementedError

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Stream[R_co]:
        """Call it on every member; iterate (``async for``) over the results in the order they arrive."""
        raise NotImplementedError

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> Sent:
        """Send it to every member and want no answer. Awaiting what it returns waits for room in the mailboxes."""
        raise NotImplementedError

    def options(self, *, timeout: float | None = None, retry: int = 0, return_exceptions: bool = False) -> Endpoint[P, R_co]:
        """A variant: a deadline in seconds; errors as values of `call`; calls that are sent again to the next life of an actor that died.

        `retry` says how often, and that it does no harm to run the endpoint again.
        """
        raise NotImplementedError

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Inside the actor: the plain method. On a mesh: `TypeError`, choose an adverb."""
        raise NotImplementedError


@overload
def endpoint(function: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointDefinition[P, R]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], R], /) -> EndpointDefinition[P, R]: ...
@overload
def endpoint(
    *, explicit_response_port: Literal[True], concurrent: bool = ..., propagate: Any = ..., instrument: bool = ...
) -> _ExplicitDecorator: ...
@overload
def endpoint(
    *, concurrent: bool = ..., explicit_response_port: Literal[False] = ..., propagate: Any = ..., instrument: bool = ...
) -> _Decorator: ...
def endpoint(
    function: Callable[..., Any] | None = None,
    /,
    *,
    concurrent: bool = False,
    explicit_response_port: bool = False,
    propagate: Any = None,
    instrument: bool = True,
) -> Any:
    """Mark a method as an endpoint.

    ``async def`` methods run on the process's event loop, ``def`` methods in the actor's own thread, where they may block. An actor
    handles one message at a time; `concurrent` endpoints start in order and overlap. With `explicit_response_port` the method gets a
    `Port` as its first argument and answers through it, whenever it likes. `propagate` and `instrument` are accepted for Monarch's sake.
    """

    def mark(method: Callable[..., Any]) -> EndpointDefinition[..., Any]:
        return EndpointDefinition(method, concurrent=concurrent, explicit_response_port=explicit_response_port)

    return mark if function is None else mark(function)


def concurrent_endpoint(function: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointDefinition[P, R]:
    """``@endpoint(concurrent=True)``."""
    return cast("EndpointDefinition[P, R]", EndpointDefinition(function, concurrent=True))


class _Decorator(Protocol):
    """What ``@endpoint(…)`` returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointDefinition[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> EndpointDefinition[P, R]: ...


class _ExplicitDecorator(Protocol):
    """The same for a method whose first argument is the port to answer through."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, Port[R], P], Awaitable[None]], /) -> EndpointDefinition[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, Port[R], P], None], /) -> EndpointDefinition[P, R]: ...


def check_names(cls: type, taken: Collection[str]) -> None:
    """`TypeError` if an endpoint of the class could not be reached through a mesh, whose own names are `taken`."""
    for name in _find_definitions(cls):  # not kept: a class that is being unpickled is still without its methods
        if name.startswith("_") or name in taken:
            why = "it is private" if name.startswith("_") else "a mesh has something of its own by it"
            raise TypeError(f"{cls.__qualname__}.{name}: {name!r} can't be the name of an endpoint: {why}; call it something else")


_definitions: weakref.WeakKeyDictionary[type, dict[str, EndpointDefinition[..., Any]]] = weakref.WeakKeyDictionary()


def definitions_of(cls: type) -> dict[str, EndpointDefinition[..., Any]]:
    """The endpoints of a class by name, found once. Raises `TypeError` for an override that lost its mark."""
    found = _definitions.get(cls)
    if found is None:
        found = _definitions[cls] = _find_definitions(cls)
    return found


def _find_definitions(cls: type) -> dict[str, EndpointDefinition[..., Any]]:
    found: dict[str, EndpointDefinition[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, EndpointDefinition):
                found[name] = value
            elif name in found and inspect.isfunction(value):
                raise TypeError(f"{base.__qualname__}.{name} overrides an endpoint but is none: mark it with @endpoint")
    return found


def check_timeout(timeout: float | None) -> None:
    """`UsageError` unless this can be a deadline."""
    if timeout is not None and not timeout > 0:
        raise UsageError(f"a timeout is a positive number of seconds, not {timeout!r}")
