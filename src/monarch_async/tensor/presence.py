"""Whether all members of an epoch are in it, asked of each of them: what `ready` waits for.

That an epoch is formed here says that all were there when it was. One of them may have left it since, or have died, and the word of that
be on its way. So whoever wants to know asks. Who is in the epoch, and has formed it, says so; who has left it says nothing, and what it
said when it left arrives. Hence a question that is asked after an epoch has ended anywhere is never answered by all.

Rules:

* It is the loops of the members that answer, whatever their actors do; one that is about to form the epoch says that at once. One that
  says nothing, since its loop is held up or its process is frozen, is not waited for any longer than `PATIENCE`: no more is known of it
  then than before.
* Who asks and is asked asks first, and then answers. So nobody is told that all are there, and goes on to block its loop, before the
  questions of those who waited with it have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["PATIENCE", "Presence"]

PATIENCE = 1.0
"""Seconds for which a member may take to answer."""


class Where(Protocol):
    """The epoch."""

    def post(self, what: str, *args: Any, to: int | None = None) -> None: ...


class _Question(NamedTuple):
    """Asked of all others."""

    missing: set[int]  # who has not said that it has formed the epoch
    promised: set[int]  # who has said that it is about to
    told: Callable[[], None]
    timer: asyncio.TimerHandle


class Presence:
    """See the module's text. Its methods are called on the loop."""

    def __init__(self, epoch: Where, loop: asyncio.AbstractEventLoop, others: frozenset[int]) -> None:
        self._epoch = epoch
        self._loop = loop
        self._others = others
        self._formed = False  # here
        self._unanswered: list[tuple[int, int]] = []  # who asked before it was, and which question
        self._asked = 0
        self._questions: dict[int, _Question] = {}

    def ask(self, told: Callable[[], None]) -> None:
        """Call `told` once all others have said that they are in the epoch; never, if it is over before."""
        if not self._others:
            told()
            return
        self._asked += 1
        timer = self._loop.call_later(PATIENCE, self._go_without, self._asked)
        self._questions[self._asked] = _Question({*self._others}, set(), told, timer)
        self._epoch.post("asked", self._asked)

    def formed(self) -> None:
        """It is, here."""
        self._formed = True
        for index, question in self._unanswered:
            self.asked(index, question)
        self._unanswered.clear()

    def asked(self, index: int, question: int) -> None:
        """Another member wants to know."""
        self._epoch.post("there", question, self._formed, to=index)
        if not self._formed:
            self._unanswered.append((index, question))

    def there(self, index: int, number: int, formed: bool) -> None:
        """Another member is, or is about to form it."""
        question = self._questions.get(number)
        if question is None:
            return
        if formed:
            question.missing.discard(index)
        else:
            question.promised.add(index)
        self._see(number, question)

    def _go_without(self, number: int) -> None:
        """Those that have said nothing."""
        question = self._questions[number]
        question.missing.intersection_update(question.promised)
        self._see(number, question)

    def _see(self, number: int, question: _Question) -> None:
        if not question.missing:
            del self._questions[number]
            question.timer.cancel()
            question.told()

    def end(self) -> None:
        """The epoch is over."""
        for question in self._questions.values():
            question.timer.cancel()
        self._questions.clear()
