"""Controllers: actors of which a job has one, known to all its processes by name.

Rules: a controller lives in the client's process and is owned by the program. Which one a name means is decided there, one request after
the other; so whoever asks, and however many do at once, gets the same actor. One that has failed is replaced by the next request.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from monarch_async._runtime.asking import ask
from monarch_async._runtime.context import Message
from monarch_async._runtime.runtime import Runtime
from monarch_async.actor import Actor, check_arguments, check_class
from monarch_async.ambient import client_services, current_runtime
from monarch_async.future import Future, as_future
from monarch_async.procs import this_proc

__all__ = ["get_or_spawn_controller"]

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)

_known: WeakKeyDictionary[Runtime, dict[str, Any]] = WeakKeyDictionary()
"""The controllers of each job, by name."""


def get_or_spawn_controller(name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> Future[A]:
    """The actor of this name, of which there is one in the job; made of the class and arguments if there is none yet.

    Raises `TypeError` at once for what is no actor class or doesn't fit its constructor; the future has the constructor's error, or a
    `TypeError` if the name belongs to an actor of another class.
    """
    if not name or not isinstance(name, str):
        raise TypeError(f"a controller needs a name, not {name!r}")
    check_class(cls)
    check_arguments(cast("Any", cls), args, kwargs)
    runtime = current_runtime()
    return as_future(runtime, _ask(runtime, name, cls, args, kwargs))


async def _ask(runtime: Runtime, *request: Any) -> Any:
    return await ask(runtime, runtime.client, "controller", *request)


async def _controller(message: Message, name: str, cls: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find or make one; in the client's process."""
    runtime = current_runtime()
    known = _known.setdefault(runtime, {})
    mesh = known.get(name)
    if mesh is not None:
        cell = runtime.cells.get(mesh._key)
        if cell is None or cell.evidence is not None:
            mesh = None
        elif mesh._cls.__qualname__ != cls.__qualname__:
            raise TypeError(f"the controller {name!r} is a {mesh._cls.__qualname__}, not a {cls.__qualname__}: use another name")
    if mesh is None:
        # In a context of its own: whoever asks first does not own it.
        mesh = known[name] = contextvars.Context().run(this_proc().spawn, name, cls, *args, **kwargs)
    return await mesh


client_services["controller"] = _controller
