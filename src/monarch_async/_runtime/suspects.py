"""Calls that wait for a handler which waits for them.

A call carries the chain of handlers that led to it. If one of them is what the actor is handling right now, the call can't begin before that
handler ends; and if the handler is suspended on the very request that led to the call, neither ever will. Such a call is refused
with `DeadlockError`. Both facts can become true in either order, so each new one is a reason to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._runtime.context import Message, State, Waiter
from monarch_async.errors import DeadlockError

__all__ = ["Suspects"]


class Suspects:
    """Queued messages of one actor that a chain connects to the handler that runs, each with that handler's request."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[Message, int]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def clear(self) -> None:
        """The handler has ended."""
        self._entries.clear()

    def note(self, message: Message, chain: Sequence[Any], key: int, current: Message) -> bool:
        """Whether the chain of `message` leads through what actor `key` handles now."""
        for actor, number, request, _ in chain:
            if actor == key and number == current.number:
                self._entries.append((message, request))
                return True
        return False

    def look(self, current: Message | None, find_waiter: Callable[[int], Waiter | None], label: str) -> None:
        """Refuse those that `current` is suspended on."""
        for entry in list(self._entries):
            message, request = entry
            if message.state is not State.QUEUED or current is None:
                self._entries.remove(entry)
                continue
            waiter = find_waiter(request)
            if waiter is not None and waiter.awaited_by is current:
                self._entries.remove(entry)
                chain = (*(step[3] for step in (message.extras or {}).get("c", ())), f"{label}.{message.endpoint}")
                message.state = State.DONE
                text = f"deadlock: {' → '.join(chain)}: each waits for the next, and the last for a handler before it"
                message.origin.refuse(message, DeadlockError(text, chain=chain))
