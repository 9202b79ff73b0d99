"""Whether all members of an epoch are in it, asked of each of them: what `ready` waits for.

That an epoch is formed here says that all were there when it was. One of them may have left it since, or have died, and the word of that be on
its way. So whoever wants to know asks: who is in the epoch, and has formed it, says so; who has left it says nothing, since what it said
when it left arrives before any answer. Hence what is asked for after a loss became known anywhere is never answered by all.

Rules:

* It is the loops of the members that answer, whatever their actors do. One whose loop is held up, or whose process is frozen, is not waited for
  any longer than `PATIENCE`: nothing more is known of it then than before.
* Who asks and is asked at the same time asks first: so what it answers leads to the end of no other wait before its own question is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Presence"]

PATIENCE = 1.0
"""Seconds for which a member may take to answer."""


class Where(Protocol):
    """The epoch."""

    def post(self, what: str, *args: Any, to: int | None = None) -> None: ...


class Presence:
    """See the module's text. Its methods are called on the loop."""

    def __init__(self, epoch: Where, loop: asyncio.AbstractEventLoop, others: frozenset[int]) -> None:
        self._epoch = epoch
        self._loop = loop
        self._others = others
        self._formed = False  # here
        self._unanswered: list[tuple[int, int]] = []  # who asked before it was, and which question
        self._asked = 0
        self._questions: dict[int, tuple[set[int], Callable[[], None], asyncio.TimerHandle]] = {}  # who has not answered, what to do then

    def ask(self, told: Callable[[], None]) -> None:
        """Call `told` once all others have said that they are in the epoch; never, if it is over before."""
        if not self._others:
            told()
            return
        self._asked += 1
        self._questions[self._asked] = {*self._others}, told, self._loop.call_later(PATIENCE, self._close, self._asked)
        self._epoch.post("asked", self._asked)

    def formed(self) -> None:
        """It is, here."""
        self._formed = True
        for index, question in self._unanswered:
            self.asked(index, question)
        self._unanswered.clear()

    def asked(self, index: int, question: int) -> None:
        """Another member wants to know."""
        if self._formed:
            self._epoch.post("there", question, to=index)
        else:
            self._unanswered.append((index, question))

    def there(self, index: int, question: int) -> None:
        """Another member is."""
        if question in self._questions:
            missing = self._questions[question][0]
            missing.discard(index)
            if not missing:
                self._close(question)

    def _close(self, question: int) -> None:
        _, told, timer = self._questions.pop(question)
        timer.cancel()
        told()

    def end(self) -> None:
        """The epoch is over."""
        for _, _, timer in self._questions.values():
            timer.cancel()
        self._questions.clear()
