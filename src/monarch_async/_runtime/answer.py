"""Who waits for one answer of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch_async._runtime.context import Message

__all__ = ["Answer"]


class Answer:
    """Waits for one answer of a service."""

    __slots__ = ("awaited_by", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.awaited_by: Message | None = None
        self.future: asyncio.Future[Any] = loop.create_future()

    def futures(self) -> Sequence[asyncio.Future[Any]]:
        return (self.future,)

    def settle(self, request: int, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, request: int, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # it is no news for the log if nobody waits any more
