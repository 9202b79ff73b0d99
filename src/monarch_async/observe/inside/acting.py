"""Reading an actor's instance, and acting on actors, in their own process or that of their owner."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import UsageError
from monarch_async.observe.inside.cells import Name, find_cells
from monarch_async.observe.inside.showing import shown

__all__ = ["evaluate", "restart", "state", "stop_member", "stop_mesh"]

LONGEST = 500
"""Characters of a value that are told."""
MOST = 100
"""Attributes that are told."""
PATIENCE = 10.0
"""Seconds that an awaited expression may take."""


def state(runtime: Runtime, names: Sequence[Name]) -> list[tuple[str, list[tuple[str, str, str]], int]]:
    """Name, attributes (name, type, what it is), and how many more there are."""
    found = []
    for cell in find_cells(runtime, names):
        instance = cell.instance
        slots = [name for cls in type(instance).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
        values = {name: getattr(instance, name) for name in slots if hasattr(instance, name)} | getattr(instance, "__dict__", {})
        attributes = [(name, type(value).__qualname__, shown(value, LONGEST)) for name, value in list(values.items())[:MOST]]
        found.append((str(cell.identity), attributes, max(0, len(values) - MOST)))
    return found


async def evaluate(runtime: Runtime, who: str, subject: str, expression: str, names: Sequence[Name]) -> list[tuple[str, str, str, str]]:
    """For each of these actors: name, repr of the value, its type, error."""
    try:
        code = compile(expression, "<eval>", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        raise UsageError(f"{expression!r} is no expression: {error}") from error
    outcomes = []
    for cell in find_cells(runtime, names):
        variables = {**vars(sys.modules[type(cell.instance).__module__]), "self": cell.instance}
        try:
            value = eval(code, variables)
            if inspect.isawaitable(value):
                async with asyncio.timeout(PATIENCE):
                    value = await value
        except Exception as error:  # whatever the expression raises is the answer
            outcomes.append((str(cell.identity), "", type(error).__name__, f"{type(error).__name__}: {error}"))
        else:
            outcomes.append((str(cell.identity), shown(value, 100 * LONGEST), type(value).__qualname__, ""))
    return outcomes


def restart(runtime: Runtime, who: str, subject: str, names: Sequence[Name]) -> list[tuple[str, str]]:
    """End the present life of actors, as a failure of theirs. Raises `UsageError` where nothing would start them again."""
    cells = list(find_cells(runtime, names))
    fixed = [str(cell.identity) for cell in cells if not cell.returns]
    if fixed:
        what = ", ".join(fixed[:5])
        raise UsageError(f"{what} has no restart policy, so nothing would start it again: spawn it with restart=Restart()")
    for cell in cells:
        cell.fail(RuntimeError(f"to be started again, by {who}"), "restart")
    return [(str(cell.identity), f"life {cell.identity.incarnation} was ended") for cell in cells]


def stop_member(runtime: Runtime, who: str, subject: str, names: Sequence[Name], reason: str) -> list[tuple[str, str]]:
    """Have actors stop themselves, once the handlers that run have ended."""
    cells = list(find_cells(runtime, names))
    for cell in cells:
        cell.stop_next(reason or f"by {who}")
    return [(str(cell.identity), "was told to stop") for cell in cells]


async def stop_mesh(runtime: Runtime, who: str, subject: str, name: str, kind: str, reason: str) -> int:
    """Stop the meshes of this name that are owned here, of ``actors`` or ``processes``; returns how many members they had."""
    wards: dict[int, Any] = {}
    members = 0
    for _, _, key, member in runtime.ownership.members():
        if member.identity.mesh == name and (kind == "actors") is bool(key):
            wards[id(member.ward)] = member.ward
            members += 1
    for ward in wards.values():
        await ward.stop(reason or f"by {who}")
    return members
