"""A message on its way through an actor, and which one is being handled here.

The message is the context of its handler: what `context()` tells comes from it. One object per message, on the hot path, so it is
a plain record with slots.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

__all__ = [
    "ASYNC",
    "SYNC",
    "Account",
    "Handler",
    "Message",
    "Origin",
    "State",
    "Waiter",
    "current_cell",
    "current_message",
]


class State(enum.IntEnum):
    """Where a message is. A cancelled one is dropped when its turn comes; a stopping one has been told to stop."""

    QUEUED = 0
    RUNNING = 1
    CANCELLED = 2
    STOPPING = 3
    DONE = 4


class Waiter(Protocol):
    """Who waits for the answer to a request. Called on the loop, at most once per request."""

    @property
    def awaited_by(self) -> Message | None:
        """The handler whose thread is blocked on it, if any."""

    def futures(self) -> Sequence[asyncio.Future[Any]]:
        """What has to be awaited to wait for the answer; nothing where other answers would do as well."""

    def settle(self, request: int, value: Any) -> None: ...

    def fail(self, request: int, error: BaseException) -> None: ...


class Origin(Protocol):
    """Where a message came from and its answer goes: a link, or this very process."""

    def answer(self, message: Message, value: Any) -> None:
        """Send the result of the handler, or, if it can't be sent, the error that says so."""

    def refuse(self, message: Message, error: BaseException) -> None:
        """Send an exception instead."""

    def credit(self, key: int, messages: int, size: int) -> None:
        """So many messages that want no answer, and bytes of them, have left the mailbox of actor `key`."""

    def tell_started(self, message: Message) -> None:
        """Let the caller know that the handler has begun."""


class Account(Protocol):
    """What is under way to one actor, of which `mesh` and `rank` tell the name; see `lane`."""

    key: int
    mesh: str
    rank: int

    def credit(self, messages: int, size: int) -> None:
        """So many messages, and bytes of them, are not under way any more."""

    def reset(self) -> None:
        """Nothing is."""


ASYNC, SYNC = 0, 1


class Handler:
    """One endpoint of a class: `function(instance, *args, **kwargs)`.

    `kind` says whether it is a coroutine function or runs in the actor's thread; `concurrent` handlers overlap; one with
    `explicit_port` gets a port as its first argument and answers through it.
    """

    __slots__ = ("concurrent", "explicit_port", "function", "kind", "simple")

    def __init__(self, function: Any, kind: int, concurrent: bool = False, explicit_port: bool = False) -> None:
        self.function = function
        self.kind = kind
        self.concurrent = concurrent
        self.explicit_port = explicit_port
        self.simple = kind == ASYNC and not concurrent and not explicit_port


class Message:
    """A call or cast in an actor's hands.

    Extras, where there are any: ``d`` seconds left until the deadline; ``c`` the chain of handlers that led here, each as actor key,
    number of the message it handles, request it made, display name; ``r`` if it only asks whether the actor is up.
    """

    __slots__ = (
        "args",
        "blocked_on",
        "body",
        "buffers",
        "cell",
        "deadline",
        "endpoint",
        "extras",
        "lane",
        "late",
        "number",
        "origin",
        "rank",
        "request",
        "state",
        "task",
        "timer",
        "told",
        "waiter",
    )

    def __init__(
        self,
        origin: Origin,
        endpoint: str,
        request: int,
        rank: Any,
        body: bytes,
        buffers: Sequence[memoryview] | None,
        extras: dict[str, Any] | None,
    ) -> None:
        self.origin = origin
        self.endpoint = endpoint
        self.request = request  # 0: no answer is wanted, or an error was the answer
        self.rank = rank  # position in the addressed slice, as `mesh.wire_rank` writes it
        self.body = body
        self.buffers = buffers
        self.extras = extras
        self.state = State.QUEUED
        self.cell: Any = None  # the cell that handles it, once it does
        self.args: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # for a local message: instead of a body
        self.waiter: Waiter | None = None  # for a local message: who waits
        self.deadline: float | None = None
        self.task: Any = None  # the task of a concurrent handler
        self.number = 0  # given when the handler makes its first call
        self.told = False  # the caller knows that the handler has begun
        self.blocked_on: asyncio.Future[Any] | None = None  # what the handler's thread waits for
        self.lane: Any = None  # for a local message: the account it is booked on
        self.timer: asyncio.TimerHandle | None = None  # stops the handler at its deadline
        self.late = False  # the deadline has passed: that is why it is stopped

    def finish(self) -> None:
        """Its handler has ended. What it brought is not kept, since the context that it was handled in lives on."""
        self.state = State.DONE
        self.args = None
        if self.buffers is not None:  # as in all that are large
            self.buffers, self.body = None, b""

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given up."""
        return self.state == State.STOPPING or self.state == State.CANCELLED


current_message: ContextVar[Message | None] = ContextVar("monarch_async_message", default=None)

current_cell: ContextVar[Any] = ContextVar("monarch_async_cell", default=None)
"""The cell whose constructor, `__cleanup__` or `__supervise__` runs here: its code outside of any message."""
