"""The list of a process's actors and endpoints in its slot, by which the agent tells whose handler a stack is in.

Rules: only the loop's thread writes it, at each new actor, so that it is there before that actor handles anything. What does not fit is
left out, and then no actor is named, since another might be meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any

import msgpack

from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Handler
from monarch_async._runtime.pulse import HANDLERS, Slot, room
from monarch_async._runtime.stacks import Code

__all__ = ["Roster", "read_roster"]

_COMPLETE, _IN_PART = msgpack.packb(True), msgpack.packb(False)


class Roster:
    """The list of `cells` in a slot."""

    def __init__(self, slot: Slot, cells: Mapping[int, Cell]) -> None:
        self._slot = slot
        self._cells = cells
        self._packed = b""
        self._complete = True
        self._listed = 0  # actors of which it was written
        self._newest = 0  # the key of the last of them

    def add(self, cell: Cell) -> None:
        """There is a new actor."""
        self._listed += 1
        self._newest = cell.key
        if not self._complete:
            return
        entry = _entry(cell)
        self._complete = len(self._packed) + len(entry) < room(HANDLERS)
        if self._complete:
            self._packed += entry
        self._write()

    def is_outdated(self) -> bool:
        """Whether actors have ended. For any thread."""
        keys = list(self._cells)
        return (len(keys), keys[-1] if keys else 0) != (self._listed, self._newest)

    def renew(self) -> None:
        """Write it anew."""
        keys = list(self._cells)
        packed, size, self._complete = [], 0, True
        for key in reversed(keys):
            entry = _entry(self._cells[key])
            size += len(entry)
            if size >= room(HANDLERS):
                self._complete = False
                break
            packed.append(entry)
        self._packed = b"".join(packed)
        self._listed, self._newest = len(keys), keys[-1] if keys else 0
        self._write()

    def _write(self) -> None:
        self._slot.write_text(HANDLERS, (_COMPLETE if self._complete else _IN_PART) + self._packed)


def read_roster(slot: Slot) -> list[tuple[str, str, Code]]:
    """Actor, endpoint and where its code begins, of all that are listed. The actor is ``""`` where the list is not complete."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(slot.read_text(HANDLERS))
    complete = next(iter(unpacker), False)
    return [
        (actor if complete else "", endpoint, (file, line, function))
        for actor, files in unpacker
        for file, entries in files.items()
        for function, line, endpoint in entries
    ]


def _entry(cell: Cell) -> bytes:
    files: dict[str, list[tuple[str, int, str]]] = {}
    for name, handler in cell.handlers.items():
        code = _code_of(handler)
        if code is not None:
            files.setdefault(code.co_filename, []).append((code.co_name, code.co_firstlineno, name))
    packed: bytes = msgpack.packb([str(cell.identity), files])
    return packed


def _code_of(handler: Handler) -> CodeType | None:
    """The code that the user has written, below decorators that say so."""
    function: Any = handler.function
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
