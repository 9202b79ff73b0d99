"""The plain prompt: readline where Python has it, lines from a thread, nothing to install.

The thread reads so that the loop goes on. Signals reach only the main thread, so Ctrl-C could not end the reading: while a line is
read the terminal hands it over as a key, which readline is told to make a word of its own, one that this module knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch_async.console.session import Session
from monarch_async.observe.listing import state_folder

_readline: Any
try:
    import readline
except ImportError:  # a Python built without it
    _readline = None
else:
    _readline = readline

__all__ = ["PlainPrompt", "history_file"]

_INTERRUPT = "KeyboardInterrupt"
_KEPT = 1000


def history_file(name: str) -> Path | None:
    """Where the history of inputs is kept, in the user's state directory; `None` where it can't be."""
    try:
        path = Path(state_folder(), name)
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path


class PlainPrompt:
    """Reads lines from the terminal until they make a complete input."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._history = history_file("history")
        self._candidates: list[str] = []
        if _readline is not None:
            self._set_up(_readline)

    def _set_up(self, readline: Any) -> None:
        readline.set_completer(self._candidate)
        readline.set_completer_delims(" \t\n`~!@#$%^&*()-+[{]}\\|;:'\",<>/?=")
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind(f'"\\C-c": "\\C-e\\C-u{_INTERRUPT}\\C-m"')
        if self._history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._history)

    def _candidate(self, word: str, state: int) -> str | None:
        """Readline's protocol: the candidates one by one, each in place of `word`, the text since the last delimiter."""
        if state == 0:
            text = _readline.get_line_buffer()[: _readline.get_endidx()]
            start, names = self._session.complete(text)
            head = text[_readline.get_begidx() : start]
            self._candidates = [head + name for name in names]
            if not text.strip():
                self._candidates = [word + "    "]
        return self._candidates[state] if state < len(self._candidates) else None

    async def read(self) -> str:
        """See `Prompt`."""
        lines: list[str] = []
        while True:
            line = await self._line(self._session.prompts[1 if lines else 0])
            if line == _INTERRUPT:
                raise KeyboardInterrupt
            lines.append(line)
            source = "\n".join(lines)
            if not source.strip() or self._session.is_complete(source):
                return source

    async def _line(self, prompt: str) -> str:
        loop = asyncio.get_running_loop()
        read: asyncio.Future[str] = loop.create_future()

        def work() -> None:
            try:
                line = input(prompt)
            except BaseException as error:
                settle: tuple[Callable[[Any], None], Any] = (read.set_exception, error)
            else:
                settle = (read.set_result, line)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle[0], settle[1])

        with _ctrl_c_as_key():
            threading.Thread(target=work, name="prompt", daemon=True).start()
            return await read

    def close(self) -> None:
        """Keep the history."""
        if _readline is not None and self._history is not None:
            _readline.set_history_length(_KEPT)
            with contextlib.suppress(OSError):
                _readline.write_history_file(self._history)


@contextmanager
def _ctrl_c_as_key() -> Iterator[None]:
    """The terminal sends no SIGINT meanwhile."""
    fd = sys.stdin.fileno()
    if _readline is None:
        yield
        return
    before = termios.tcgetattr(fd)
    changed = termios.tcgetattr(fd)
    changed[6][termios.VINTR] = b"\0"
    termios.tcsetattr(fd, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
