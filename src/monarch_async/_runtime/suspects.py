"""Calls that wait for a handler which waits for them.

A call carries the chain of handlers that led to it. If one of them is what the actor is handling right now, the call can't begin before
that handler ends. If that handler is suspended on the very request that led to the call, and so is each handler between them on its own,
none of them ever will: the call is refused with `DeadlockError`.

A handler may begin to wait after its call has arrived, or never. So a suspect is looked at when it comes, and again at every tick of the
runtime; the handlers in between, which may be in other processes, are asked now and then while this one waits. Who waits for each other
in a circle stays so; so it does not matter that they are not asked all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from monarch_async._runtime.context import Message, Origin, State, Waiter
from monarch_async._runtime.tasks import TaskSet
from monarch_async._runtime.waits import leads_to
from monarch_async.errors import DeadlockError

__all__ = ["Observer", "Step", "Suspects", "is_awaited"]

Step = tuple[int, int, int, str]
"""A handler in a chain: actor key, number of the message it handles, request it made, display name."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class Observer(Protocol):
    """The runtime, as far as it knows who waits."""

    loop: asyncio.AbstractEventLoop
    tasks: TaskSet
    others_wait: Callable[[Origin, Sequence[Step]], Coroutine[Any, Any, bool]]
    """Whether all these handlers, of which the last made a call that came from the origin, are suspended on their requests."""

    def find_waiter(self, request: int) -> Waiter | None:
        """Who waits for a request that this process made."""


def is_awaited(waiter: Waiter | None, handler: Message, task: asyncio.Task[Any] | None) -> bool:
    """Whether `handler`, which runs in `task` or in the actor's thread, is suspended on what `waiter` waits for."""
    if waiter is None:
        return False
    return waiter.awaited_by is handler or (task is not None and any(leads_to(future, task) for future in waiter.futures()))


class _Suspect:
    """A queued message; the request that the running handler made on the way to it; the steps from there on."""

    __slots__ = ("ask_at", "message", "pause", "request", "rest")

    def __init__(self, message: Message, request: int, rest: Sequence[Step]) -> None:
        self.message = message
        self.request = request
        self.rest = rest
        self.ask_at = 0.0
        self.pause = FIRST_PAUSE


class Suspects:
    """Those among the queued messages of one actor."""

    __slots__ = ("_entries", "_label")

    def __init__(self, label: str) -> None:
        self._label = label
        self._entries: list[_Suspect] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def clear(self) -> None:
        """The handler has ended."""
        self._entries.clear()

    def note(self, message: Message, chain: Sequence[Step], key: int, current: Message) -> bool:
        """Whether the chain of `message` leads through what actor `key` handles now."""
        for index, (actor, number, request, _) in enumerate(chain):
            if actor == key and number == current.number:
                self._entries.append(_Suspect(message, request, chain[index + 1 :]))
                return True
        return False

    def look(self, current: Message | None, task: asyncio.Task[Any] | None, observer: Observer) -> None:
        """Refuse those that can never begin. `current` runs in `task`."""
        now = observer.loop.time()
        for suspect in list(self._entries):
            if suspect.message.state is not State.QUEUED or current is None:
                self._entries.remove(suspect)
            elif is_awaited(observer.find_waiter(suspect.request), current, task):
                if not suspect.rest:
                    self._refuse(suspect)
                elif now >= suspect.ask_at:
                    suspect.ask_at = now + suspect.pause
                    suspect.pause = min(2 * suspect.pause, LONGEST_PAUSE)
                    observer.tasks.start(self._ask(suspect, current, task, observer), name=f"looking for a deadlock of {self._label}")

    async def _ask(self, suspect: _Suspect, current: Message, task: asyncio.Task[Any] | None, observer: Observer) -> None:
        """Refuse it if the handlers between are all suspended too."""
        all_wait = await observer.others_wait(suspect.message.origin, suspect.rest)
        if all_wait and suspect in self._entries and is_awaited(observer.find_waiter(suspect.request), current, task):
            self._refuse(suspect)

    def _refuse(self, suspect: _Suspect) -> None:
        self._entries.remove(suspect)
        message = suspect.message
        if message.state is not State.QUEUED:
            return
        chain = (*(step[3] for step in (message.extras or {}).get("c", ())), f"{self._label}.{message.endpoint}")
        message.state = State.DONE
        text = f"deadlock: {' → '.join(chain)}: each waits for the next, and the last for a handler before it"
        message.origin.refuse(message, DeadlockError(text, chain=chain))
