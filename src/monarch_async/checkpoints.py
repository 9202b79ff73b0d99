"""Checkpoints: what an actor would need to go on from here, kept by its owner's process for its next life.

Of each member the last one is kept. One that can't be taken changes nothing: the last good one stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from monarch_async._core.codec import dumps_whole
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import current_cell, current_message
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import ask
from monarch_async.ambient import current_runtime
from monarch_async.errors import UsageError
from monarch_async.future import Future, as_future

__all__ = ["checkpoint_by_time", "take_checkpoint"]


def take_checkpoint(actor: Any) -> Future[None]:
    """See `Actor.checkpoint`."""
    message = current_message.get()
    cell = message.cell if message is not None else current_cell.get()
    function = getattr(actor, "__checkpoint__", None)
    if cell is None or cell.owner is None:
        raise UsageError("only an actor can take a checkpoint of itself, and this is no code of an actor")
    if function is None:
        raise UsageError(f"{type(actor).__qualname__} has no __checkpoint__ method: define it, and __restore__, to take checkpoints")
    state = function()
    runtime = current_runtime()
    return as_future(runtime, _keep(runtime, cell, state if inspect.isawaitable(state) else dumps_whole(state)))


async def _keep(runtime: Runtime, cell: Cell, state: Awaitable[Any] | bytes) -> None:
    """Give a checkpoint to the owner's process."""
    saved = state if isinstance(state, bytes) else dumps_whole(await state)
    address, owner = cell.owner
    await ask(runtime, address, "save", owner, runtime.me.uid, cell.key, cell.identity.incarnation, saved)


async def checkpoint_by_time(actor: Any) -> None:
    try:
        await take_checkpoint(actor)
    except Exception as error:  # whatever the class's own code raises: the actor goes on, and so does its last good checkpoint
        actor.logger.error("a checkpoint failed, the last good one is kept: %s: %s", type(error).__name__, error)
