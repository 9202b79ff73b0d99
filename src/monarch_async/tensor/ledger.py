"""The ledger of a group: the last operations of this rank, each with its state and where in the user's code it was called. Always on.

Rules: bounded; an entry is written in place while its operation goes on, and read as a copy.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextvars import ContextVar
from types import FrameType
from typing import NamedTuple

from monarch_async.instrument import on_collective

__all__ = ["Entry", "GroupReport", "Ledger", "LedgerEntry", "asked_at", "callers_line"]

KEPT = 256
asked_at: ContextVar[str] = ContextVar("asked_at", default="")
"""The line of the user's code that a task of this package works for, which is not on the task's stack."""
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class LedgerEntry(NamedTuple):
    """One operation as this rank sees it.

    `number` counts the operations of one epoch from 1; 0: it has none yet, since the group is being formed. `state` is ``"waiting"`` (for
    other ranks to call it), ``"running"``, ``"done"`` or ``"failed"``. Times are `time.monotonic` in seconds, 0.0 where it has not come
    to that. `line` is ``file.py:12``. `partner` is the rank of the other member, where there is but one.
    """

    epoch: int
    number: int
    operation: str
    shapes: str
    line: str
    state: str
    called: float
    started: float
    ended: float
    error: str
    partner: int | None

    def __str__(self) -> str:
        took = f" after {self.ended - self.called:.3f} s" if self.ended else f" for {time.monotonic() - self.called:.3f} s"
        why = f": {self.error}" if self.error else ""
        what = f"{self.operation} {self.shapes}".rstrip()
        return f"operation {self.number} ({what} at {self.line}) {self.state}{took}{why}"


class GroupReport(NamedTuple):
    """What one member says of a group: its ranks in the mesh, the epoch it is in (-1: in none yet), whether it is formed, its ledger."""

    ranks: tuple[int, ...]
    epoch: int
    ready: bool
    entries: list[LedgerEntry]
    last_done: str


class Entry:
    """The same, while it is written."""

    __slots__ = LedgerEntry._fields

    def __init__(self, operation: str, shapes: str, line: str) -> None:
        self.epoch, self.number = -1, 0
        self.operation, self.shapes, self.line = operation, shapes, line
        self.state = "waiting"
        self.called = time.monotonic()
        self.started = self.ended = 0.0
        self.error = ""
        self.partner: int | None = None

    def copy(self) -> LedgerEntry:
        return LedgerEntry(*(getattr(self, name) for name in LedgerEntry._fields))


class Ledger:
    """The last operations, oldest first, and the last that was finished."""

    __slots__ = ("_entries", "last_done")

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self.last_done = ""  # in words

    def open(self, operation: str, shapes: str, line: str) -> Entry:
        entry = Entry(operation, shapes, line)
        self._entries.append(entry)
        return entry

    def close(self, entry: Entry, error: BaseException | None) -> None:
        entry.ended = time.monotonic()
        if error is None:
            entry.state = "done"
            self.last_done = f"operation {entry.number}, {entry.operation}"
        else:
            entry.state, entry.error = "failed", f"{type(error).__name__}: {error}"[:500]
        for told in on_collective:
            told(entry.operation, entry.called, entry.started, entry.ended, entry.state)

    def entries(self) -> list[LedgerEntry]:
        return [entry.copy() for entry in self._entries]


def callers_line() -> str:
    """Where the user's code called into this package: ``file.py:12``."""
    told = asked_at.get()
    if told:
        return told
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
