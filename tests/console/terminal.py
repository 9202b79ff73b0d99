"""A real terminal with the REPL in it: what a user would type, and what they would read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect

from tests.hosts.workers import ENVIRONMENT

__all__ = ["CTRL_C", "CTRL_D", "Terminal", "terminal"]

CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE = 30.0
"""Seconds for what must come; nothing is measured by it."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[=>()][A-B0-2]?)")
_UNFINISHED = re.compile(r"\x1b[\[0-9;?]*$")


class Terminal(pexpect.spawn):  # type: ignore[misc]
    """What is read has no control sequences."""

    _held = ""

    def read_nonblocking(self, size: int = 1, timeout: float | None = -1) -> str:
        text = self._held + super().read_nonblocking(size, timeout)
        unfinished = _UNFINISHED.search(text)
        self._held = text[unfinished.start() :] if unfinished else ""
        return _ESCAPE.sub("", text[: len(text) - len(self._held)])

    def enter(self, *lines: str) -> None:
        """Type lines. In the full prompt they are indented as the prompt does it."""
        for line in lines:
            self.send(line + "\r")

    def ask(self, line: str, answer: str = "", *, blank: bool = False, prompt: str = ">>>") -> str:
        """Type a line, and an empty one where it begins a block; wait for the pattern and the next prompt; returns what has matched.

        A remark behind the line tells its echo from what comes after.
        """
        self._asked = getattr(self, "_asked", 0) + 1
        self.enter(f"{line}  # {self._asked}")
        self.expect(f"# {self._asked}.*?\r\n")
        if blank:
            self.enter("")
        self.expect(answer)
        found = str(self.match.group(0))
        self.expect(prompt)
        return found

    def end(self) -> int:
        """Ctrl-D; returns the exit status.

        After an answer, since a key has no meaning while the output of a process is being written above the prompt.
        """
        self.ask("'at the ' 'prompt'", "'at the prompt'")
        return self.leave()

    def leave(self) -> int:
        """Ctrl-D at once; returns the exit status."""
        self.send(CTRL_D)
        return self.wait_ended()

    def wait_ended(self) -> int:
        """The exit status, once it has ended."""
        self.expect(pexpect.EOF)
        self.close()
        assert self.signalstatus is None
        status: int = self.exitstatus
        return status


@contextmanager
def terminal(tmp_path: Path, *words: str, command: Sequence[str] = ("-m", "monarch_async"), prompt: str = ">>>") -> Iterator[Terminal]:
    """``python -m monarch_async WORDS`` in a terminal, at its first prompt."""
    environment = {**ENVIRONMENT, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    opened = Terminal(
        sys.executable, [*command, *words], env=environment, encoding="utf-8", timeout=PATIENCE, dimensions=(50, 160), cwd=str(tmp_path)
    )
    opened.delaybeforesend = None
    try:
        opened.expect(prompt)
        yield opened
    finally:
        opened.close(force=True)
