"""Checkpoints: what an actor would need to go on from here, kept by its owner's process for its next life.

Rules:

* Of each member the last one is kept. One that can't be taken changes nothing: the last good one stays. Which is the last is decided by
  when it was begun.
* One by time is taken between two messages, in the thread of an actor that has one; the next messages do not wait until it is kept, and
  the next one by time is taken so many seconds after that.
* A life saves itself alone. Code of one that is over, as a handler that has not let itself be cancelled, can't take one for the next.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

from monarch_async._core.codec import dumps_whole
from monarch_async._core.events import Identity
from monarch_async._runtime.asking import ask
from monarch_async._runtime.behavior import CellState
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Message, current_cell, current_message
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import current_runtime
from monarch_async.errors import ActorDied, UsageError
from monarch_async.future import Future, as_future

__all__ = ["checkpoint_by_time", "take_checkpoint"]


def take_checkpoint(actor: Any) -> Future[None]:
    """See `Actor.checkpoint`."""
    message = current_message.get()
    cell: Cell | None = message.cell if message is not None else current_cell.get()
    if cell is None or cell.owner is None:
        raise UsageError("only an actor can take a checkpoint of itself, and this is no code of an actor")
    if getattr(actor, "__checkpoint__", None) is None:
        raise UsageError(f"{type(actor).__qualname__} has no __checkpoint__ method: define it, and __restore__, to take checkpoints")
    if cell.instance is not actor and (message is not None or cell.instance is not None or cell.state is not CellState.STARTING):
        raise UsageError(f"this is code of a life of {cell.identity} that is over: it can't take a checkpoint for the next one")
    life, number = cell.identity, next(cell.saves)
    state = actor.__checkpoint__()
    runtime = current_runtime()
    saved = None if inspect.isawaitable(state) else dumps_whole(state)
    if saved is not None and threading.get_ident() == runtime.thread:  # it is on its way before anything that comes after it
        return as_future(runtime, _keep(runtime, cell, life, number, saved))

    async def keep() -> None:
        await _keep(runtime, cell, life, number, saved if saved is not None else dumps_whole(await state))

    return as_future(runtime, keep())


def _keep(runtime: Runtime, cell: Cell, life: Identity, number: int, saved: bytes) -> asyncio.Future[Any]:
    """Give a checkpoint to the owner's process."""
    address, owner = cell.owner
    return ask(runtime, address, "save", owner, runtime.me.uid, cell.key, life.incarnation, number, saved)


async def checkpoint_by_time(actor: Any) -> None:
    message = current_message.get()
    assert message is not None
    cell: Cell = message.cell
    life, number = cell.identity, next(cell.saves)
    try:
        saved = await _state(actor, cell, message)
        kept = _keep(current_runtime(), cell, life, number, saved)
    except Exception as error:  # whatever the class's own code raises: the actor goes on
        _complain(actor, error)
        cell.save_later()
        return

    def done(kept: asyncio.Future[Any]) -> None:
        error = None if kept.cancelled() else kept.exception()
        if error is not None and not isinstance(error, ActorDied):  # the end of its owner's process is the actor's too
            _complain(actor, error)
        if cell.identity == life:
            cell.save_later()

    kept.add_done_callback(done)


async def _state(actor: Any, cell: Cell, message: Message) -> bytes:
    if cell.behavior.threaded and not inspect.iscoroutinefunction(actor.__checkpoint__):
        saved: bytes = await cell.own_thread().run(lambda: dumps_whole(actor.__checkpoint__()), (), {}, message)
        return saved
    state = actor.__checkpoint__()
    return dumps_whole(await state if inspect.isawaitable(state) else state)


def _complain(actor: Any, error: BaseException) -> None:
    actor.logger.error("a checkpoint failed, the last good one is kept: %s: %s", type(error).__name__, error)
