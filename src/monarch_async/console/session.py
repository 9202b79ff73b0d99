"""A session at the prompt: inputs are run in the loop, one after the other, and Ctrl-C goes to what runs.

Theory: the loop runs in the main thread and the prompt is read without blocking it, so everything else in the loop goes on meanwhile. Each
input runs as a task of its own, all in one `contextvars` context, as if the session were one long coroutine.

*Ctrl-C* (SIGINT) while an input runs: if its own code is executing at that moment, `KeyboardInterrupt` is raised there, as in any
program; if it waits for something, its task is cancelled, and with it the remote call it waits for. So it is where it has called the
runtime, which is not to be torn out of what it does and will be back soon. If neither comes about (other code holds the loop), the next
Ctrl-C raises `KeyboardInterrupt` in whatever executes. The session goes on in any case.

The session's namespace is the module ``__main__``: what is defined there travels to other processes by value, as it was when it was sent,
so a class can be redefined at will.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import inspect
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType
from typing import Any, Protocol

from monarch_async.console.compiling import Compiler
from monarch_async.console.completion import Completions, complete
from monarch_async.console.show import INNER, format_error, format_value

__all__ = ["Mode", "Prompt", "Session"]

PROMPT, CONTINUED = ">>> ", "... "


class Prompt(Protocol):
    """Reads inputs from somebody."""

    async def read(self) -> str:
        """A complete input. Raises `EOFError` at the end, `KeyboardInterrupt` where what was typed is given up."""


class Mode(Protocol):
    """Takes the lines of the prompt in place of Python, until it is over."""

    @property
    def prompt(self) -> str: ...

    @property
    def over(self) -> bool: ...

    async def handle(self, line: str) -> None: ...

    def leave(self) -> None:
        """The user has had enough of it."""


class Finder(Protocol):
    """Knows which inputs are commands."""

    @property
    def names(self) -> list[str]: ...

    def find(self, source: str, namespace: Mapping[str, Any]) -> Callable[[], Awaitable[None]] | None: ...


class Session:
    """Runs inputs with `names` at hand. `module` is what ``__main__`` is meanwhile."""

    def __init__(self, names: Mapping[str, Any], write: Callable[[str], object] | None = None) -> None:
        self.module = ModuleType("__main__")
        self.namespace = self.module.__dict__
        self.namespace.update(names)
        self.namespace.setdefault("__builtins__", builtins)
        self.compiler = Compiler()
        self.status: int | None = None  # set when the session shall end
        self.commands: Finder | None = None
        self.mode: Mode | None = None
        self.write = write or _print
        self._context = contextvars.copy_context()
        self._running: asyncio.Task[None] | None = None
        self._in_user_code = False
        self._interrupted = False  # by Ctrl-C, while this input ran
        self._cancelling = False  # that is not carried out yet

    @property
    def prompts(self) -> tuple[str, str]:
        """What stands before the first line of an input, and before the others."""
        return (self.mode.prompt, "") if self.mode is not None else (PROMPT, CONTINUED)

    def is_complete(self, source: str) -> bool:
        """Whether this can be run as it is, or is wrong; else more lines have to come."""
        return self.mode is not None or self._command(source) is not None or self.compiler.is_complete(source)

    def complete(self, text: str) -> Completions:
        """What can follow at the cursor."""
        if self.mode is not None:
            return Completions(len(text), [])
        start, names = complete(text, self.namespace)
        if self.commands is not None and text and text.isalpha():
            names = sorted({*names, *(name for name in self.commands.names if name.startswith(text))})
        return Completions(start, names)

    async def interact(self, prompt: Prompt) -> int:
        """Read and run inputs until there are no more, or one ends the session; returns the exit status."""
        while self.status is None:
            try:
                source = await prompt.read()
            except EOFError:
                if self.mode is None:
                    break
                self.mode.leave()
                self.mode = None
                continue
            except KeyboardInterrupt:
                continue
            if source.strip() or self.mode is not None:
                await self.run(source)
        return self.status or 0

    async def run(self, source: str) -> bool:
        """Run one input and show what comes of it; False where it raised."""
        mode, command = self.mode, self._command(source)
        if mode is not None:
            went_well = await self._run(lambda: mode.handle(source))
            if mode.over:
                self.mode = None
            return went_well
        if command is not None:
            return await self._run(command)
        try:
            code = self.compiler.compile(source)
        except (SyntaxError, ValueError, OverflowError) as error:
            self.write(format_error(error.with_traceback(None)))
            return False
        return await self._run(FunctionType(code, self.namespace))

    def _command(self, source: str) -> Callable[[], Awaitable[None]] | None:
        return self.commands.find(source, self.namespace) if self.commands is not None else None

    async def run_script(self, source: str, name: str) -> bool:
        """Run a whole file, as Python does; False where it raised."""
        try:
            code = self.compiler.compile_script(source, name)
        except (SyntaxError, ValueError, OverflowError) as error:
            self.write(format_error(error.with_traceback(None)))
            return False
        return await self._run(FunctionType(code, self.namespace))

    async def _run(self, function: Callable[[], Any]) -> bool:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._execute(function), name="input", context=self._context)
        self._running = task
        try:
            await asyncio.wait([task])
        finally:
            self._running = None
            self._interrupted = self._cancelling = False
        return not task.cancelled() and task.exception() is None and task.result() is None

    async def _execute(self, function: Callable[[], Any]) -> Any:
        """`None` where it went well."""
        try:
            self._in_user_code = True
            result = function()
            if inspect.iscoroutine(result):
                await result
        except SystemExit as ending:
            self.status = _status(ending)
            return ending
        except KeyboardInterrupt as error:
            self.write("KeyboardInterrupt")
            return error
        except asyncio.CancelledError as error:
            self.write("cancelled" if self._interrupted else format_error(error))
            return error
        except BaseException as error:
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            self.write(format_error(error))
            return error
        finally:
            self._in_user_code = False
        return None

    def display(self, value: object) -> None:
        """What `sys.displayhook` does here."""
        if value is None:
            return
        if type(value).__name__ == "Quitter":
            raise SystemExit  # typed without parentheses
        builtins._ = value  # type: ignore[attr-defined]
        self.write(format_value(value))

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT."""
        task = self._running
        if task is None:
            return  # the prompt deals with its own
        loop = task.get_loop()
        if self._cancelling or (self._in_user_code and asyncio.current_task(loop) is task and not _in_runtime(frame)):
            self._cancelling = False
            raise KeyboardInterrupt
        self._interrupted = self._cancelling = True
        loop.call_soon_threadsafe(self._cancel, task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        self._cancelling = False
        task.cancel()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Be ``__main__``, display values, take Ctrl-C. Only in the main thread."""
        assert threading.current_thread() is threading.main_thread()
        main, display, handler = sys.modules["__main__"], sys.displayhook, signal.getsignal(signal.SIGINT)
        sys.modules["__main__"] = self.module
        sys.displayhook = self.display
        signal.signal(signal.SIGINT, self.interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            sys.displayhook = display
            sys.modules["__main__"] = main


def _in_runtime(frame: FrameType | None) -> bool:
    """Whether the input has called into the runtime or asyncio, and that has not returned."""
    while frame is not None and frame.f_code is not Session._execute.__code__:
        if frame.f_code.co_filename.startswith(INNER):
            return True
        frame = frame.f_back
    return False


def _print(text: str) -> None:
    print(text, flush=True)


def _status(ending: SystemExit) -> int:
    code = ending.code
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
