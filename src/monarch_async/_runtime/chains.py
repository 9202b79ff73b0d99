"""Where handlers stand that are suspended: the chain of coroutines from the handler down to what it awaits."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import SYNC, Message
from monarch_async._runtime.stacks import Code, frames_of, is_plumbing, render

__all__ = ["chain_of", "stand_of", "story_of"]

DEEPEST = 100


def stand_of(cell: Cell, message: Message) -> tuple[list[Code], str]:
    """Where a handler stands: its calls, outermost first, and the innermost function that awaits. For any thread of its process."""
    handler = cell.handlers.get(message.endpoint)
    if handler is not None and handler.kind == SYNC and cell.thread is not None:
        frame = sys._current_frames().get(cell.thread.thread.ident or 0)
        frames = [entry for entry in reversed(frames_of(frame)) if not is_plumbing(entry[0])]
        return frames, ""
    task = message.task or cell.task
    if task is None:
        return [], ""
    if task is asyncio.current_task(cell.runtime.loop):
        return [], "runs now"
    return chain_of(task.get_coro())


def chain_of(awaitable: Any) -> tuple[list[Code], str]:
    """The frames of user code in a chain of coroutines, outermost first, and the innermost function that awaits."""
    frames: list[Code] = []
    inner = ""
    for _ in range(DEEPEST):
        frame = next((found for name in ("cr_frame", "gi_frame", "ag_frame") if (found := getattr(awaitable, name, None))), None)
        if frame is None:
            break
        code = frame.f_code
        if not is_plumbing(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        if code.co_name == "__await__" and is_plumbing(code.co_filename) and "coroutine" in frame.f_locals:
            awaitable = frame.f_locals["coroutine"]  # which is resumed there, or run in steps
            continue
        inner = code.co_qualname
        awaitable = next((found for name in ("cr_await", "gi_yieldfrom", "ag_await") if (found := getattr(awaitable, name, None))), None)
    if not inner and awaitable is not None:
        inner = type(awaitable).__name__
    return frames, inner


def story_of(cell: Cell, message: Message, age: float) -> str:
    """A handler and where it stands, as text."""
    frames, inner = stand_of(cell, message)
    return f"{cell.identity}.{message.endpoint} for {age:.1f} s, in {inner or 'its thread'}:\n{render(frames[::-1])}"
