"""Calls that are sent again: `options(retry=n)` declares an endpoint safe to run more than once.

A call whose actor died is sent again, to the next life of that actor, up to `n` times; its deadline goes on. What the endpoint itself
raises is an answer, and no reason to ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._runtime.context import Message, Waiter
from monarch_async.errors import ActorDied, MonarchError

__all__ = ["Resend", "Retrying"]

Resend = Callable[[Waiter, dict[str, Any] | None], None]
"""Sends the call again, under its number; takes who waits, and what it carries beside its arguments."""


class Retrying:
    """Stands between one request and who waits for it."""

    __slots__ = ("_deadline", "_extras", "_left", "_loop", "_resend", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, waiter: Waiter, times: int, extras: dict[str, Any] | None, resend: Resend) -> None:
        self._loop = loop
        self._waiter = waiter
        self._left = times
        self._extras = extras
        self._resend = resend
        self._deadline = loop.time() + extras["d"] if extras is not None and "d" in extras else None

    @property
    def awaited_by(self) -> Message | None:
        return self._waiter.awaited_by

    @property
    def _given_up(self) -> bool:
        futures = self._waiter.futures()
        return bool(futures) and all(future.done() for future in futures)

    def futures(self) -> Sequence[asyncio.Future[Any]]:
        return self._waiter.futures()

    def settle(self, request: int, value: Any) -> None:
        self._waiter.settle(request, value)

    def fail(self, request: int, error: BaseException) -> None:
        if not isinstance(error, ActorDied) or not self._left or self._given_up:
            self._waiter.fail(request, error)
            return
        self._left -= 1
        self._loop.call_soon(self._send_again, request, error)  # not here: where the actor is gone for good, each would end in the next

    def _send_again(self, request: int, error: BaseException) -> None:
        if self._given_up:
            self._waiter.fail(request, error)
            return
        extras = self._extras
        if extras is not None and self._deadline is not None:
            extras = {**extras, "d": max(self._deadline - self._loop.time(), 1e-6)}
        try:
            self._resend(self, extras)
        except MonarchError as refused:  # its mailbox is full, say
            refused.__cause__ = error
            self._waiter.fail(request, refused)
