"""Messages to a runtime itself whose answer takes time."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine
from typing import Any

from monarch_async._runtime.context import Message
from monarch_async._runtime.serving import serve
from monarch_async._runtime.tasks import TaskSet


class Answers:
    """An origin that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def answer(self, message: Message, value: Any) -> None:
        self.told.append(value)

    def refuse(self, message: Message, error: BaseException) -> None:
        self.told.append(type(error))

    def credit(self, key: int, messages: int, size: int) -> None:
        raise AssertionError("a service has no mailbox")

    def tell_started(self, message: Message) -> None:
        raise AssertionError("a service has no handlers")


async def _later() -> str:
    await asyncio.sleep(0)
    return "here it is"


async def test_one_that_comes_as_the_runtime_ends_is_left_in_order() -> None:
    """Cancelled before the first step of its task it is closed, and Python finds no coroutine that nobody awaited; another is answered."""
    log = logging.getLogger(__name__)
    tasks, origin, begun = TaskSet(asyncio.get_running_loop(), log), Answers(), list[Coroutine[Any, Any, str]]()

    def service(message: Message) -> Coroutine[Any, Any, str]:
        begun.append(_later())
        return begun[-1]

    first, second = (Message(origin, "later", request, 0, b"", None, None) for request in (1, 2))
    serve({"later": service}, tasks, log, first)
    await first.task
    assert ["here it is"] == origin.told
    serve({"later": service}, tasks, log, second)
    await tasks.close()
    assert [inspect.CORO_CLOSED] * 2 == [inspect.getcoroutinestate(coroutine) for coroutine in begun]
    assert ["here it is"] == origin.told
