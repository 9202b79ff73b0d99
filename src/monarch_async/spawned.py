"""What the members of a mesh are started with, and what becomes of the first try."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch_async._core.events import Failure
from monarch_async._core.stories import format_error
from monarch_async._runtime.context import Message
from monarch_async.errors import ActorDied, ActorError

__all__ = ["FirstLives", "Spawned", "failure_from"]


class Spawned(NamedTuple):
    """What every life of every member is started with, as the service `spawn` takes it."""

    key: int
    name: str
    class_name: str
    behavior: Any  # pickled where there may be another life
    owner: int
    limit: int
    place: bytes


class FirstLives:
    """Waits for the first constructors, each for itself."""

    awaited_by: Message | None = None

    def __init__(self, told: Callable[[int, BaseException | None], None], requests: Sequence[int]) -> None:
        self._told = told
        self._ranks = {request: rank for rank, request in enumerate(requests)}

    def futures(self) -> Sequence[asyncio.Future[Any]]:
        return ()

    def settle(self, request: int, value: Any) -> None:
        self._told(self._ranks[request], None)

    def fail(self, request: int, error: BaseException) -> None:
        self._told(self._ranks[request], error)


def failure_from(name: str, class_name: str, ranks: Sequence[int], error: BaseException, endpoint: str) -> Failure:
    """What to tell an owner of members that could not be constructed."""
    type_name, text, story = format_error(error)
    if isinstance(error, ActorError) and error.type_name:
        type_name, text, story = error.type_name, error.text, error.remote_traceback
    died = isinstance(error, ActorDied)
    return Failure(
        mesh=name,
        class_name=class_name,
        ranks=tuple(sorted(ranks)),
        reason=text if died else f"{type_name.rpartition('.')[2]} in {endpoint}: {text}",
        endpoint=endpoint,
        exit_code=error.exit_code if isinstance(error, ActorDied) else None,
        signal=error.signal if isinstance(error, ActorDied) else None,
        error=type_name,
        traceback=story,
        meshes=(name,),
    )
