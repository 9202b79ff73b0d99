"""``pdb`` at the prompt: speaking with handlers that have stopped at ``breakpoint()``, in one rank or in several at once.

``pdb`` lists them. ``pdb trainer`` goes to those of that mesh, ``pdb trainer[3]`` to that rank's, ``pdb next trainer`` has its next
handlers stop at their first line. From then on each line goes to pdb in all of them; what they say is shown once where it is the same.
Ctrl-D, or ``detach``, leaves them as they are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence

from monarch_async.console.show import describe_error, table
from monarch_async.debugging import Said, Stopped, command, stop_next, stopped
from monarch_async.errors import UsageError, fold_ranks
from monarch_async.ids import ProcAddress

__all__ = ["Debugging", "PdbCommand"]

USAGE = "usage: pdb [next] [ACTOR]: pdb, pdb trainer, pdb trainer[3], pdb next trainer"
_TARGET = re.compile(r"([^\[\]]+)(?:\[(\d+)\])?$")

Processes = Callable[[], Awaitable[Sequence[ProcAddress]]]


class Debugging:
    """Lines go to pdb in these handlers, until none is left or the user leaves."""

    def __init__(self, handlers: Sequence[Stopped], write: Callable[[str], object]) -> None:
        self._write = write
        self._handlers = list(handlers)
        self._prompt = "(Pdb) "
        self._show([(handler, handler.stop.text) for handler in self._handlers])

    @property
    def prompt(self) -> str:
        return f"{self._prompt.strip()} {names_of(self._handlers)}> "

    @property
    def over(self) -> bool:
        return not self._handlers

    async def handle(self, line: str) -> None:
        """Give all of them a line for pdb, and show what they say."""
        if line.strip() == "detach":
            self.leave()
            return
        asked = self._handlers
        answers: list[Said | BaseException] = await asyncio.gather(*(command(handler, line) for handler in asked), return_exceptions=True)
        said: list[tuple[Stopped, str]] = []
        self._handlers = []
        for handler, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                said.append((handler, describe_error(answer)))
                continue
            if answer.text:
                said.append((handler, answer.text))
            if answer.state == "waits":
                self._handlers.append(handler)
                self._prompt = answer.prompt
        self._show(said)
        gone = [handler for handler in asked if handler not in self._handlers]
        if gone:
            self._write(f"{names_of(gone)} {'goes' if len(gone) == 1 else 'go'} on")

    def leave(self) -> None:
        """The handlers wait on."""
        if self._handlers:
            self._write(f"{names_of(self._handlers)} still {'waits' if len(self._handlers) == 1 else 'wait'}")
        self._handlers = []

    def _show(self, said: Sequence[tuple[Stopped, str]]) -> None:
        texts: dict[str, list[Stopped]] = {}
        for handler, text in said:
            texts.setdefault(text.rstrip(), []).append(handler)
        for text, handlers in texts.items():
            self._write(text if len(texts) == 1 else f"{names_of(handlers)}:\n{text}")


class PdbCommand:
    """The command. `processes` are where to look; `enter` makes a session's next lines go to what it is given."""

    def __init__(self, processes: Processes, write: Callable[[str], object], enter: Callable[[Debugging], None]) -> None:
        self._processes = processes
        self._write = write
        self._enter = enter

    async def __call__(self, words: Sequence[str]) -> None:
        following = words[:1] == ["next"]
        targets = [*words[1:]] if following else [*words]
        if (following and not targets) or len(targets) > 1:
            raise UsageError(USAGE)
        mesh, rank = _target(targets[0]) if targets else ("", None)
        processes = await self._processes()
        if following:
            count = await stop_next(processes, mesh, rank)
            if not count:
                raise UsageError(f"there is no actor {targets[0]!r} in the processes of this job")
            self._write(f"the next handler of {targets[0]} stops at its first line, in {count} {'actor' if count == 1 else 'actors'}")
            return
        found = await stopped(processes)
        if not targets:
            self._write(_list(found))
            return
        chosen = [one for one in found if (one.stop.mesh == mesh and rank in (None, one.stop.rank)) or one.actor == targets[0]]
        waiting = [one for one in chosen if one.stop.waits]
        if not waiting:
            state = "runs on under pdb" if chosen else "waits at no breakpoint"
            raise UsageError(f"{targets[0]} {state}; `pdb next {targets[0]}` stops its next handler")
        self._enter(Debugging(waiting, self._write))


def names_of(handlers: Sequence[Stopped]) -> str:
    """``trainer[0–3]``."""
    ranks: dict[str, list[int]] = {}
    for handler in handlers:
        ranks.setdefault(handler.stop.mesh, []).append(handler.stop.rank)
    names = [f"{mesh}[{fold_ranks(found)}]" for mesh, found in ranks.items() if mesh]
    return ", ".join([*names, *(handler.actor for handler in handlers if not handler.stop.mesh)])


def _target(word: str) -> tuple[str, int | None]:
    match = _TARGET.match(word)
    if match is None:
        raise UsageError(f"{word!r} is no actor; {USAGE}")
    return match[1], int(match[2]) if match[2] else None


def _list(found: Sequence[Stopped]) -> str:
    if not found:
        return "no handler waits at a breakpoint"
    rows = [[one.actor, one.stop.endpoint, one.where, "waits" if one.stop.waits else "runs", str(one.process)] for one in found]
    return table(["actor", "endpoint", "where", "state", "process"], rows)
