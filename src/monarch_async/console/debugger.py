"""``pdb`` at the prompt: speaking with handlers that have stopped at ``breakpoint()``, in one rank or in several at once.

``pdb`` lists them. ``pdb trainer`` goes to those of that mesh, ``pdb trainer[3]`` to that rank's, ``pdb next trainer`` has its next
handlers stop at their first line. From then on each line goes to pdb in all of them; what they say is shown once where it is the same.
Ctrl-D, or ``detach``, leaves them as they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from monarch_async.console.show import describe_error, table
from monarch_async.errors import UsageError, fold_ranks
from monarch_async.observe.debugging import Said, Stopped
from monarch_async.observe.job import Job

__all__ = ["Debugging", "PdbCommand"]

USAGE = "usage: pdb [next] [ACTOR]: pdb, pdb trainer, pdb trainer[3], pdb next trainer"


class Debugging:
    """Lines go to pdb in these handlers, until none is left or the user leaves."""

    def __init__(self, job: Job, handlers: Sequence[Stopped], write: Callable[[str], object]) -> None:
        self._job = job
        self._write = write
        self._handlers = list(handlers)
        self._prompt = "(Pdb) "
        self._show([(handler, handler.text) for handler in self._handlers])

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
        answers: list[Said | BaseException] = await asyncio.gather(
            *(self._job.pdb(handler, line) for handler in asked), return_exceptions=True
        )
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
    """The command. `enter` makes a session's next lines go to what it is given."""

    def __init__(self, job: Callable[[], Job], write: Callable[[str], object], enter: Callable[[Debugging], None]) -> None:
        self._job = job
        self._write = write
        self._enter = enter

    async def __call__(self, words: Sequence[str]) -> None:
        job = self._job()
        if not words:
            self._write(_list(await job.stopped()))
        elif len(words) == 2 and words[0] == "next":
            self._write(f"the next handler stops at its first line: {', '.join(await job.stop_next(words[1]))}")
        elif len(words) == 1:
            found = await job.stopped(words[0])
            waiting = [one for one in found if one.waits]
            if not waiting:
                state = "runs on under pdb" if found else "waits at no breakpoint"
                raise UsageError(f"{words[0]} {state}; `pdb next {words[0]}` stops its next handler")
            self._enter(Debugging(job, waiting, self._write))
        else:
            raise UsageError(USAGE)


def names_of(handlers: Sequence[Stopped]) -> str:
    """``trainer[0–3]``."""
    ranks: dict[str, list[int]] = {}
    for handler in handlers:
        ranks.setdefault(handler.mesh, []).append(handler.rank)
    names = [f"{mesh}[{fold_ranks(found)}]" for mesh, found in ranks.items() if mesh]
    return ", ".join([*names, *(handler.actor for handler in handlers if not handler.mesh)])


def _list(found: Sequence[Stopped]) -> str:
    if not found:
        return "no handler waits at a breakpoint"
    rows = [
        [one.actor, one.endpoint, f"{os.path.basename(one.file)}:{one.line}", "waits" if one.waits else "runs", one.process]
        for one in found
    ]
    return table(["ACTOR", "ENDPOINT", "WHERE", "STATE", "PROCESS"], rows)
