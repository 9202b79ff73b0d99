"""The pdb of a process without a terminal: it reads commands that are sent to it, and keeps what it prints for whoever sent them.

Rules: it belongs to one thread, which waits while pdb waits for a command. It leaves the thread alone when the session ends: by a command
that goes on without breakpoints, with the handler, or because its caller has given up.
"""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["RemotePdb"]

_RUNTIME = (
    "monarch_async._runtime.*",
    "asyncio",
    "asyncio.*",
    "threading",
    "contextvars",
    "concurrent.futures.*",
    "monarch_async.observe.*",
)
_OUTER = ("monarch_async._runtime.", "monarch_async.observe.", "threading", "concurrent.futures.")


class _Commands:
    """What pdb reads from."""

    def __init__(self, read: Callable[[], str]) -> None:
        self.readline = read


class RemotePdb(pdb.Pdb):
    """A `pdb.Pdb` that asks `read` for each command, a line. `ended` is called, once, when it has left its thread."""

    def __init__(self, read: Callable[[], str], ended: Callable[[], None]) -> None:
        self.printed = io.StringIO()
        self._ended = ended
        super().__init__(stdin=_Commands(read), stdout=self.printed, skip=_RUNTIME, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.use_rawinput = False
        self.over = False
        self._outermost: FrameType | None = None

    def stop_at(self, frame: FrameType) -> None:
        """Ask for a command before the next line of this frame."""
        self.set_trace(frame)
        self.botframe = self._outermost = _outermost(frame)

    def stop_next(self) -> None:
        """Ask for a command at the first line of what this thread calls next."""
        self.reset()
        sys.settrace(self.trace_dispatch)

    def take_printed(self) -> str:
        """What it has printed since the last time, without its prompt."""
        text = self.printed.getvalue()
        self.printed.seek(0)
        self.printed.truncate()
        return text.removesuffix(self.prompt)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self.end()

    def set_quit(self) -> None:
        super().set_quit()
        self.end()

    def dispatch_call(self, frame: FrameType, arg: Any) -> Any:
        if self.botframe is None:
            self._outermost = frame
        return super().dispatch_call(frame, arg)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        traced = super().dispatch_return(frame, arg)
        if frame is self._outermost and not frame.f_code.co_flags & _SUSPENDS:
            self.end()
            return None
        return traced

    def end(self) -> None:
        """Let the thread, which calls this, go on without it."""
        sys.settrace(None)
        if not self.over:
            self.over = True
            self._ended()

    def do_interact(self, arg: str) -> None:
        """Not here: there is no terminal."""
        self.error("not in a process without a terminal; use ! to run statements")

    do_run = do_restart = do_debug = do_interact


_SUSPENDS = 0x20 | 0x80 | 0x200
"""A generator or coroutine returns many times; its end is seen by who runs it."""


def _outermost(frame: FrameType) -> FrameType:
    """The first call that is not the runtime's own."""
    while frame.f_back is not None and not str(frame.f_back.f_globals.get("__name__", "")).startswith(_OUTER):
        frame = frame.f_back
    return frame
