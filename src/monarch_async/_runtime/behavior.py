"""What a cell is told about its actor, and what it needs of the runtime it is in."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from monarch_async._core.events import Evidence, Failure
from monarch_async._runtime.context import Handler, Message, Origin, Waiter
from monarch_async._runtime.debt import Debt
from monarch_async._runtime.suspects import Step
from monarch_async._runtime.tasks import TaskSet
from monarch_async._runtime.thread import ActorThread
from monarch_async.options import Options

__all__ = ["Behavior", "CellState", "Residence"]


class CellState(enum.StrEnum):
    """Where an actor is in its life."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Behavior(Protocol):
    """What an actor does, as its cell sees it."""

    handlers: Mapping[str, Handler]
    threaded: bool  # constructor and cleanup run in the actor's own thread

    def construct(self) -> Any:
        """Make the instance."""

    async def restore(self, instance: Any, saved: bytes, thread: ActorThread | None) -> None:
        """Give a new instance the state of a former life."""

    async def cleanup(self, instance: Any, error: BaseException | None, thread: ActorThread | None) -> None:
        """The instance is not used any more; `error` is why, when it failed."""

    async def supervise(self, instance: Any, failure: Failure, thread: ActorThread | None) -> bool:
        """Something that the actor owns has failed; whether that is dealt with."""

    def port(self, message: Message) -> Any:
        """The port through which a handler with `explicit_port` answers."""


class Residence(Protocol):
    """The runtime, as a cell sees it. `busy` holds the cells that have something to do."""

    loop: asyncio.AbstractEventLoop
    options: Options
    tasks: TaskSet
    log: logging.Logger
    busy: set[Any]
    indebted: set[Debt]
    ticking: bool
    on_life: list[Callable[[Any], None]]  # told of each life of an actor before it begins; may change its handlers

    @property
    def local(self) -> Origin:
        """This process, as where a message comes from."""

    def start_ticking(self) -> None: ...

    def failed(self, cell: Any, error: BaseException, endpoint: str) -> None:
        """The actor failed: tell its owner."""

    def left(self, cell: Any, reason: str) -> None:
        """An actor that may come back has ended of its own accord: tell its owner."""

    def forget(self, cell: Any) -> None:
        """The actor is gone."""

    others_wait: Callable[[Origin, Sequence[Step]], Coroutine[Any, Any, bool]]

    def find_waiter(self, request: int) -> Waiter | None:
        """Who waits for a request that this process made."""

    def dead_letter(self, actor: object, endpoint: str, evidence: Evidence) -> None:
        """A message that wants no answer could not be delivered."""
