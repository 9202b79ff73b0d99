"""``breakpoint()`` in a worker process: the handler waits, a debugger somewhere else speaks with it, and everything else goes on.

* In a ``def`` endpoint, or any thread, that thread waits.
* In an ``async def`` endpoint the handler waits where its actor is run in steps (see `stepping`): with the option ``debug``, or where a
  debugger has asked for its next message.
* Anywhere else on the loop nothing can wait but the loop: so the breakpoint is passed, with a note that says how to stop there. Code that
  only has a breakpoint somewhere is run as any other.
* Who has set a `sys.breakpointhook` of their own, or the environment variable ``PYTHONBREAKPOINT``, gets that, and nothing of this.

One thread has one session at a time, which lasts from ``breakpoint()`` until it goes on without breakpoints or the handler has ended.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import sys
import threading
from collections.abc import Awaitable
from importlib import import_module
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import ASYNC, Handler, Message, current_message
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stepping import Abandoned, Stepper, StepThreads, begin_steps, current_stepper, steps_of
from monarch_async._runtime.wrapping import unwrap, wrap
from monarch_async.errors import UsageError

if TYPE_CHECKING:
    from monarch_async._runtime.remote_pdb import RemotePdb

__all__ = ["Debugger", "Stop"]

_PDB = "monarch_async._runtime.remote_pdb"
"""Loaded at the first breakpoint."""
_WATCHING = "monarch_async.observe."

Stop = tuple[int, str, int, str, str, str, int, bool, str]
"""A session: number, mesh, rank, endpoint, thread, file and line where it stands, whether it waits for a command, pdb's last words."""


class _Session:
    """One thread in pdb."""

    def __init__(self, debugger: Debugger, number: int, message: Message | None) -> None:
        self.number = number
        self.message = message
        self.thread = threading.current_thread().name
        self.pdb: RemotePdb = import_module(_PDB).RemotePdb(self._read, self._over)
        self.place = ("", 0)
        self.waits = False
        self.text = ""
        self._debugger = debugger
        self._loop = debugger.runtime.loop
        self._stepper = current_stepper()
        self._commands: SimpleQueue[str | None] = SimpleQueue()
        self._parked: asyncio.Future[None] | None = None  # what the handler waits for, in steps with the loop
        self._given_up = False
        self._listeners: list[asyncio.Future[None]] = []  # who waits until it waits again, or is over
        if self._stepper is not None:
            self._stepper.on_cancel, self._stepper.on_end = self.give_up, self.pdb.end

    # In its thread.

    def _read(self) -> str:
        """The next command for pdb; waits for it."""
        message = self.message
        if message is not None and self._stepper is None:
            message.blocked_on = self  # type: ignore[assignment]
        try:
            command = None if self._is_given_up() else self._wait()
        except Abandoned:
            self.pdb.end()
            raise
        finally:
            self.waits = False
            if message is not None and message.blocked_on is self:  # type: ignore[comparison-overlap]
                message.blocked_on = None
        if command is None:
            self.pdb.clear_all_breaks()
            return "continue\n"
        return command + "\n"

    def _is_given_up(self) -> bool:
        return self._given_up or (self.message is not None and self.message.cancelled)

    def _wait(self) -> str | None:
        frame = self.pdb.curframe
        if frame is not None:
            self.place = (frame.f_code.co_filename, frame.f_lineno)
        self.text = self.pdb.take_printed()
        self.waits = True
        if self._stepper is None:
            self._tell()
            return self._commands.get()
        self._parked = self._loop.create_future()
        self._tell()
        self._stepper.park(self._parked)
        return self._commands.get_nowait()

    def _over(self) -> None:
        self.text = self.pdb.take_printed()
        self._debugger.forget(self)
        self._tell()

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._told)
        except RuntimeError:
            pass  # the loop is closed: nobody listens

    # On the loop.

    def _told(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            if not listener.done():
                listener.set_result(None)

    def give_up(self) -> None:
        """Its caller wants no answer any more: the handler goes on, and pdb stops in it no more."""
        self._given_up = True
        self._commands.put(None)

    cancel = give_up
    """What a cell calls that cancels a handler whose thread is blocked."""

    async def command(self, line: str) -> tuple[str, str, str]:
        """Give pdb a line; when it waits for the next, or is over: what it has said, which of these, what it would ask with."""
        if not self.waits or self._given_up:
            raise UsageError(f"session {self.number} does not wait for a command: its handler runs")
        self.waits = False
        listener: asyncio.Future[None] = self._loop.create_future()
        self._listeners.append(listener)
        self._commands.put(line)
        if self._parked is not None:
            self._parked.set_result(None)
        await listener
        return self.text, "waits" if self.waits else "over", self.pdb.prompt

    def describe(self) -> Stop:
        message = self.message
        identity = message.cell.identity if message is not None else None
        mesh, rank = (identity.mesh, identity.rank) if identity is not None else ("", 0)
        endpoint = message.endpoint if message is not None else ""
        return self.number, mesh, rank, endpoint, self.thread, *self.place, self.waits, self.text


class Debugger:
    """All sessions of a process. Make it in the loop's thread: from then on ``breakpoint()`` calls it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._sessions: dict[int, _Session] = {}  # by thread
        self._armed: set[Cell] = set()  # actors whose next handler stops at its first line
        self._noted: set[tuple[str, int]] = set()  # where a breakpoint was passed
        runtime.parts["debugger"] = self
        if sys.breakpointhook is sys.__breakpointhook__:
            sys.breakpointhook = self.stop
        if runtime.options.debug:
            runtime.on_life.append(self._lives)

    def _lives(self, cell: Cell) -> None:
        # In asyncio's debug mode its loop is for one thread.
        if sys.breakpointhook == self.stop and not _set_otherwise() and not self.runtime.loop.get_debug():
            begin_steps(self.runtime, cell)

    # In the thread that stops.

    def stop(self, *args: Any, **kwargs: Any) -> Any:
        """What ``breakpoint()`` calls."""
        if _set_otherwise() or os.getpid() != self._pid:
            return sys.__breakpointhook__(*args, **kwargs)
        frame = sys._getframe(1)
        if threading.get_ident() == self.runtime.thread and current_stepper() is None:
            self._pass(frame)
            return None
        session = self._session()
        _say(f"breakpoint at {_where(frame)}{_name(session)}: `pdb` in the console goes there")
        session.pdb.stop_at(frame)
        return None

    def _session(self) -> _Session:
        thread = threading.get_ident()
        session = self._sessions.get(thread)
        if session is None or session.pdb.over:
            session = self._sessions[thread] = _Session(self, next(self._numbers), current_message.get())
        return session

    def forget(self, session: _Session) -> None:
        """It is over."""
        self._sessions = {thread: other for thread, other in self._sessions.items() if other is not session}

    def _pass(self, frame: FrameType) -> None:
        """Here only the loop itself could wait."""
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in self._noted:
            self._noted.add(place)
            message = current_message.get()
            if self.runtime.options.debug or message is None:
                how = "breakpoints stop in what a handler runs itself"
            else:
                how = f"MONARCH_ASYNC_DEBUG=1, or `pdb next {message.cell.identity.mesh}` in the console, has it stop there"
            _say(f"breakpoint at {_where(frame)} was passed, since everything in this process would have to wait there; {how}")

    # For those who look into the process.

    def stops(self) -> list[Stop]:
        return [session.describe() for session in list(self._sessions.values())]

    async def command(self, number: int, line: str) -> tuple[str, str, str]:
        """Give a session a line for pdb; see `_Session.command`. Raises `UsageError` if it does not wait for one."""
        for session in list(self._sessions.values()):
            if session.number == number:
                return await session.command(line)
        raise UsageError(f"session {number} is over")

    def stop_next(self, mesh: str, rank: int) -> list[str]:
        """Have the next handler of these actors, of every rank where it is -1, stop at its first line; returns their names."""
        found = [cell for cell in self.runtime.cells.values() if cell.identity.mesh == mesh and rank in (-1, cell.identity.rank)]
        for cell in found:
            self._armed.add(cell)
            wrap(cell, self, functools.partial(self._arming, cell), innermost=True)
        return [str(cell.identity) for cell in found]

    def _arming(self, cell: Cell, name: str, handler: Handler) -> Handler:
        function = handler.function
        inside = _inside(function)

        async def run(*args: Any, **kwargs: Any) -> Any:
            if not self._disarm(cell):
                return await function(*args, **kwargs)
            known = steps_of(inside)
            if known is not None:
                return await Stepper(known[0], self._stopping(known[1](*args, **kwargs)))
            threads = StepThreads(self.runtime, str(cell.identity))
            try:
                return await Stepper(threads, self._stopping(inside(*args, **kwargs)))
            finally:
                threads.close()

        def run_in_thread(*args: Any, **kwargs: Any) -> Any:
            if not self._disarm(cell):
                return function(*args, **kwargs)
            self._stop_next()
            return inside(*args, **kwargs)

        armed = functools.wraps(function)(run if handler.kind == ASYNC else run_in_thread)
        return Handler(armed, handler.kind, handler.concurrent, handler.explicit_port)

    async def _stopping(self, handling: Awaitable[Any]) -> Any:
        self._stop_next()
        return await handling

    def _disarm(self, cell: Cell) -> bool:
        if cell not in self._armed:
            return False
        self._armed.discard(cell)
        self.runtime.loop.call_soon_threadsafe(unwrap, cell, self)
        return True

    def _stop_next(self) -> None:
        session = self._session()
        _say(f"stopped{_name(session)}, as was asked for: `pdb` in the console goes there")
        session.pdb.stop_next()


def _set_otherwise() -> bool:
    """Whether the environment says what a breakpoint does."""
    return bool(os.environ.get("PYTHONBREAKPOINT"))


def _inside(function: Any) -> Any:
    """What others watch by functions of their own around it. They see nothing of a message in which a debugger stops at once."""
    while getattr(function, "__module__", "").startswith(_WATCHING) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _name(session: _Session) -> str:
    """Not its rank, so that equal lines of several ranks are shown as one."""
    message = session.message
    return f" in {message.cell.identity.mesh}.{message.endpoint}" if message is not None else f" in thread {session.thread}"


def _where(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
