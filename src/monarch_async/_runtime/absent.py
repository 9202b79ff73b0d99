"""Messages for actors that are not here: not yet, not any more, or never.

One that is not known may be on its way: its spawn can come over another link than the message. So messages for it are kept for the option
`unknown_grace`; or, where its owner has announced it, as one that is started again later than its process, until that starts or stops it.
Whoever waits for the actor itself, to watch it, waits as long.
Of one that was here and is gone, why is remembered, and every message is answered with that.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import NamedTuple

from monarch_async._core.codec import size_of
from monarch_async._core.events import Evidence, Identity, died
from monarch_async._runtime.context import Message, State

__all__ = ["Absent", "DeadLetter", "DeadLetters"]

REMEMBERED = 100_000


class DeadLetter(NamedTuple):
    """A message that nobody got and nobody waits for. `when` is in seconds since the epoch."""

    actor: str
    endpoint: str
    reason: str
    when: float


class DeadLetters:
    """The last `keep` of them, and how many there were."""

    __slots__ = ("count", "last")

    def __init__(self, keep: int) -> None:
        self.last: deque[DeadLetter] = deque(maxlen=keep)
        self.count = 0

    def add(self, actor: object, endpoint: str, evidence: Evidence) -> None:
        self.count += 1
        self.last.append(DeadLetter(str(actor), endpoint, evidence.text, time.time()))

    def __repr__(self) -> str:
        return f"<DeadLetters: {self.count}{f', the last: {self.last[-1]}' if self.last else ''}>"


class Absent:
    """What is known of actors that are not here, and the messages kept for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, letters: DeadLetters, grace: float) -> None:
        self._loop = loop
        self._letters = letters
        self._grace = grace
        self._parked: dict[int, list[Message]] = {}
        self._awaited: dict[int, set[asyncio.Future[None]]] = {}  # those who wait for the actor itself
        self._expected: dict[int, tuple[Identity, str]] = {}  # those announced, and the uid of whose process has done so
        self._ended: OrderedDict[int, tuple[Identity, Evidence]] = OrderedDict()

    def receive(self, key: int, message: Message, closing: Evidence | None) -> None:
        """A message for an actor that is not here; `closing` if none will come any more."""
        ended = self._ended.get(key)
        if ended is None and closing is not None:
            ended = _unknown(key, message), closing
        if ended is not None:
            self._refuse(key, message, *ended)
            return
        parked = self._parked.get(key)
        if parked is None:
            parked = self._parked[key] = []
            self._loop.call_later(self._grace, self._give_up, key)
        parked.append(message)

    def never_spawned(self, key: int, identity: Identity, evidence: Evidence) -> None:
        """An actor was stopped before its spawn came; unless it is known how it ended."""
        if self.why_ended(key) is None:
            self.ended(key, identity, evidence)

    def why_ended(self, key: int) -> tuple[Identity, Evidence] | None:
        """Who an actor was that is gone, and why it is, where that is known."""
        return self._ended.get(key)

    def ends(self) -> list[tuple[Identity, Evidence]]:
        """Who is known to be gone, and why, the first first."""
        return list(self._ended.values())

    def expect(self, key: int, identity: Identity, owner: str) -> None:
        """An actor will be here, or its end will be told, however long that takes."""
        self._ended.pop(key, None)
        self._expected[key] = (identity, owner)

    def owner_gone(self, owner: str, evidence: Evidence) -> None:
        """A process is gone, and with it the actors that it has announced."""
        for key, (identity, expected_by) in list(self._expected.items()):
            if expected_by == owner:
                self.ended(key, identity, evidence)

    async def wait(self, key: int) -> None:
        """Until an actor is here, or it is known why it never will be; at most for the grace, unless it is expected.

        Whoever waits goes on in the next turn of the loop, before a life that has just begun can be over.
        """
        if key in self._ended:
            return
        news = self._loop.create_future()
        awaiting = self._awaited.setdefault(key, set())
        awaiting.add(news)
        timer = self._loop.call_later(self._grace, self._stop_waiting, key, news)
        try:
            await news
        finally:
            timer.cancel()
            awaiting.discard(news)
            if not awaiting and self._awaited.get(key) is awaiting:
                del self._awaited[key]

    def _stop_waiting(self, key: int, news: asyncio.Future[None]) -> None:
        if key not in self._expected and not news.done():
            news.set_result(None)

    def arrived(self, key: int) -> list[Message]:
        """An actor is here now, or will never be: the messages that were kept for it, in order."""
        self._expected.pop(key, None)
        for news in self._awaited.pop(key, ()):
            if not news.done():
                news.set_result(None)
        return self._take(key)

    def _take(self, key: int) -> list[Message]:
        return [message for message in self._parked.pop(key, ()) if message.state is State.QUEUED]

    def ended(self, key: int, identity: Identity, evidence: Evidence) -> None:
        """An actor is gone: what is sent to it from now on is told why."""
        self._ended[key] = (identity, evidence)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        for message in self.arrived(key):
            self._refuse(key, message, identity, evidence)

    def close(self) -> None:
        """Nobody comes any more."""
        self._expected.clear()
        for key, awaiting in self._awaited.items():
            for news in awaiting:
                self._stop_waiting(key, news)
        for key in list(self._parked):
            self._give_up(key)

    def _give_up(self, key: int) -> None:
        if key in self._expected:
            return
        evidence = Evidence(f"never existed here: nobody spawned it within the option unknown_grace={self._grace:g} s")
        for message in self._take(key):
            self._refuse(key, message, _unknown(key, message), evidence)

    def _refuse(self, key: int, message: Message, identity: Identity, evidence: Evidence) -> None:
        message.state = State.DONE
        if message.request:
            error = died(evidence, identity.mesh, identity.rank, started=False, incarnation=identity.incarnation)
            message.origin.refuse(message, error)
        else:
            self._letters.add(identity, message.endpoint, evidence)
            if message.lane is not None:
                message.lane.credit(1, 0)
            else:
                message.origin.credit(key, 1, size_of(message.body, message.buffers or ()))


def _unknown(key: int, message: Message) -> Identity:
    return Identity(f"actor {key:#x}", "", message.rank if isinstance(message.rank, int) else 0)
