"""The members of a mesh of actors, as one of them sees the others: where each is, in which life, and that it is gone.

Theory: every member knows from the start where all were spawned. It watches each other one, and whoever begins a life introduces itself
(see `group`), which tells where it is now. What the members post to each other comes to one function of the process, and from there to
the group.

Rules:

* It belongs to one life of one actor, and ends with it: then every group in it ends too.
* A member is lost once: by the news of its end, or by the introduction of its next life, whichever comes first.
* All of it runs on the loop.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Protocol, cast

from monarch_async.actor import Actor
from monarch_async.errors import PeerLost
from monarch_async.exchange import Membership, Runtime, Wire, is_gone, offer, wire_to
from monarch_async.ids import ProcAddress
from monarch_async.watching import Ended, watch

__all__ = ["SERVICE", "Circle", "Listener", "circle_of"]

SERVICE = "collective"
BETWEEN_LIVES = 0.1
"""Seconds between two looks at a member that has ended in a process which lives."""


class Listener(Protocol):
    """A group, as the circle of members sees it."""

    name: str
    ranks: tuple[int, ...]

    def report(self) -> Any: ...
    def member_lost(self, error: PeerLost) -> None: ...
    def heard(self, what: str, *args: Any) -> None: ...
    def close(self, why: str) -> None: ...


class Circle:
    """See the module's text."""

    def __init__(self, me: Membership) -> None:
        self.me = me
        self.runtime = me.runtime
        self.groups: dict[str, Listener] = {}
        self.lost: dict[int, PeerLost] = {}
        self.over = False
        self.teams: Any = None  # `team.Teams`, once there is a communicator
        self._addresses = list(me.addresses)
        self._lives: dict[int, int] = {}  # the incarnations that are known of others
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._lives_again: dict[int, asyncio.Event] = {}
        me.when_over(self._close)

    def address_of(self, rank: int) -> ProcAddress:
        """Where a member is, or was last."""
        return self._addresses[rank]

    def wire_to(self, rank: int) -> Wire:
        return wire_to(self.runtime, self._addresses[rank])

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended and none takes its place."""
        return rank in self.lost and is_gone(self.runtime, self._addresses[rank])

    def watch(self, rank: int) -> None:
        """From now on the groups are told when this member is lost."""
        if rank not in self._watches and rank != self.me.rank and not self.over:
            name = f"watching {self.me.name}[{rank}]"
            self._watches[rank] = self.runtime.tasks.start(self._watch(rank), name=name)

    async def _watch(self, rank: int) -> None:
        while True:
            life = self._lives.get(rank)
            ended = await self._end_of(rank)
            if self._lives.get(rank) != life:
                continue  # that is known already
            again = self._lives_again[rank] = asyncio.Event()
            error = PeerLost(
                f"{self.me.name}[{rank}] is gone: {ended.reason}",
                mesh=self.me.name,
                rank=rank,
                incarnation=life or 0,
                reason=ended.reason,
                exit_code=ended.exit_code,
                signal=ended.signal,
            )
            self.has_ended(ended.incarnation, error)
            await self._wait_for(rank, again)

    def has_ended(self, incarnation: int, error: PeerLost) -> None:
        """The life that is watched. One that never introduced itself here, from before this member's own, most likely ended with the one
        before that: where all are started again together, word of it may come when the next lives have been called.
        """
        rank = error.rank
        assert rank is not None
        if rank not in self._lives and incarnation < self.me.incarnation:
            self.lost.setdefault(rank, error)
        else:
            self.lose(error)

    async def _wait_for(self, rank: int, again: asyncio.Event) -> None:
        """Until it lives again. That it never will is told when it is known."""
        waiting = asyncio.ensure_future(again.wait())
        try:
            while not again.is_set():
                if self.is_gone(rank):
                    self._tell_groups(rank, self.lost[rank])
                    await waiting
                    return
                end = asyncio.ensure_future(self._end_of(rank))
                try:
                    await asyncio.wait([waiting, end], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    end.cancel()
                if not again.is_set() and not self.is_gone(rank):  # it is in its process, between two lives
                    await asyncio.wait([waiting], timeout=BETWEEN_LIVES)
        finally:
            waiting.cancel()

    async def _end_of(self, rank: int) -> Ended:
        return await watch(cast("Actor", self.me.other(rank, self._addresses[rank])))

    def lose(self, error: PeerLost) -> None:
        """A member has ended, by what was found out here or by another member."""
        rank = error.rank
        assert rank is not None
        if rank == self.me.rank or rank in self.lost or self._lives.get(rank, 0) > error.incarnation:
            return
        self.lost[rank] = error
        self._tell_groups(rank, error)

    def _tell_groups(self, rank: int, error: PeerLost) -> None:
        for group in list(self.groups.values()):
            if rank in group.ranks:
                group.member_lost(error)

    def lives(self, rank: int, incarnation: int, address: ProcAddress) -> None:
        """A member has introduced itself."""
        known = self._lives.get(rank)
        if known is not None and incarnation < known:
            return
        self._addresses[rank] = address
        if incarnation != known:
            if known is not None and rank in self._watches:
                reason = f"it was started again (incarnation {incarnation})"
                text = f"{self.me.name}[{rank}] is gone: {reason}"
                self.lose(PeerLost(text, mesh=self.me.name, rank=rank, incarnation=known, reason=reason))
            self._lives[rank] = incarnation
            self.lost.pop(rank, None)
            if rank in self._lives_again:
                self._lives_again[rank].set()

    def answer(self, what: str) -> Any:
        """What somebody outside wants to know: ``"report"``."""
        if what != "report":
            raise ValueError(f"{what!r} is nothing to ask a member for")
        return {group.name: group.report() for group in self.groups.values()}, self.me.where()

    def _close(self, why: str) -> None:
        self.over = True
        for task in self._watches.values():
            task.cancel()
        for group in list(self.groups.values()):
            group.close(why)
        circles = _circles.get(self.runtime, {})
        if circles.get(self.me.key) is self:
            del circles[self.me.key]


_circles: weakref.WeakKeyDictionary[Runtime, dict[int, Circle]] = weakref.WeakKeyDictionary()


def circle_of(me: Membership) -> Circle:
    """The circle of one life of an actor. Called on the loop."""
    circles = _circles.get(me.runtime)
    if circles is None:
        circles = _circles[me.runtime] = {}
        offer(me.runtime, SERVICE, _Post(circles))
    circle = circles.get(me.key)
    if circle is None or circle.me.incarnation != me.incarnation:
        circle = circles[me.key] = Circle(me)
    return circle


class _Post:
    """Gives what comes from other members to the group that it is for; drops it where there is none yet."""

    def __init__(self, circles: dict[int, Circle]) -> None:
        self._circles = circles

    def __call__(self, key: int, group: str, what: str, *args: Any) -> Any:
        circle = self._circles.get(key)
        if circle is None:
            return None
        if not group:
            return circle.answer(what)
        listener = circle.groups.get(group)
        if listener is not None:
            listener.heard(what, *args)
        return None
