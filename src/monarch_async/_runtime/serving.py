"""Messages to a runtime itself: its functions are called at once, in order, not through a mailbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from monarch_async._core.codec import loads
from monarch_async._runtime.context import Message, State
from monarch_async._runtime.tasks import TaskSet

__all__ = ["LATER", "serve"]

LATER = object()
"""What a function of the service returns if it has seen to the answer itself."""


def serve(service: Mapping[str, Callable[..., Any]], tasks: TaskSet, log: logging.Logger, message: Message) -> None:
    """A message to this runtime itself."""
    function = service.get(message.endpoint)
    try:
        if function is None:
            raise AttributeError(f"no service {message.endpoint!r} here")
        args, kwargs = message.args or (loads(message.body, message.buffers or ()) if message.body else ((), {}))
        message.state = State.RUNNING
        result = function(message, *args, **kwargs)
    except Exception as error:
        message.state = State.DONE
        message.origin.refuse(message, error)
        return
    if result is LATER:
        return
    if isinstance(result, Awaitable):
        message.task = tasks.start(_serve_later(log, message, result), name=f"service {message.endpoint}")
        if isinstance(result, Coroutine):
            # A task that is cancelled before its first step never comes to it. Closing one that has ended does nothing.
            message.task.add_done_callback(lambda _: result.close())
    elif message.request:
        message.state = State.DONE
        message.origin.answer(message, result)


async def _serve_later(log: logging.Logger, message: Message, result: Awaitable[Any]) -> None:
    try:
        value = await result
    except asyncio.CancelledError as error:
        message.state = State.DONE
        if message.request:
            message.origin.refuse(message, error)
        raise
    except Exception as error:
        message.state = State.DONE
        if message.request:
            message.origin.refuse(message, error)
        else:
            log.exception("service %s failed", message.endpoint)
    else:
        message.state = State.DONE
        if message.request:
            message.origin.answer(message, value)
