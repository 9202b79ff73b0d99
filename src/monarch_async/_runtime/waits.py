"""Whether a task is suspended on a future, directly or through what asyncio puts in between.

The walk goes from the future to who would go on when it is done: a task that awaits it, `gather`, `shield`, `wait_for`, a `TaskGroup`,
or `wait` for all, and from there to who awaits those. It reads asyncio's own callbacks, of which a future keeps a list. What it does not
know it takes for no waiting: so a real wait may be missed, and none is made up.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Iterator
from typing import Any

__all__ = ["leads_to", "waiting_for"]


def leads_to(future: asyncio.Future[Any], task: asyncio.Task[Any]) -> bool:
    """Whether `task` can't go on before `future` is done."""
    return any(found is task for found in waiting_for(future))


def waiting_for(future: asyncio.Future[Any]) -> Iterator[asyncio.Future[Any]]:
    """What can't go on before `future` is done: itself, and the futures and tasks behind it."""
    seen: set[int] = set()
    open_ends = [future]
    while open_ends:
        end = open_ends.pop()
        yield end
        if id(end) in seen or end.done():
            continue
        seen.add(id(end))
        callbacks: Any = getattr(end, "_callbacks", None) or ()
        for callback, _ in callbacks:
            open_ends += _waiting(callback)


def _waiting(callback: Any) -> Iterator[asyncio.Future[Any]]:
    """The futures that `callback` will finish, or the task that it will wake."""
    if isinstance(callback, functools.partial):  # wait_for, in Python 3.11
        yield from (argument for argument in callback.args if isinstance(argument, asyncio.Future))
        return
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        yield owner
    elif isinstance(owner, asyncio.TaskGroup):
        all_done = getattr(owner, "_on_completed_fut", None)
        if all_done is not None:
            yield all_done
    elif inspect.isfunction(callback) and callback.__module__ == "asyncio.tasks":
        variables = _variables(callback)
        if variables.get("return_when", asyncio.ALL_COMPLETED) == asyncio.ALL_COMPLETED or variables.get("counter") == 1:
            yield from (found for name in ("outer", "waiter") if isinstance(found := variables.get(name), asyncio.Future))


def _variables(function: Any) -> dict[str, Any]:
    """What a nested function refers to in the one around it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found
