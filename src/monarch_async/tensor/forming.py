"""How a group forms: members introduce themselves with their terms, and propose the epoch of all of these. See `group` for the theory.

Rules:

* A message to a process that ends may be lost, and so may the news of the end of a short life. So who lacks something speaks again, as long
  as the group is not formed; also to those who propose another epoch, since one of the two has not heard of a term.
* A refusal ends what waits at other members, as what was refused will not be called. It says which terms were known where it was refused: a
  member that has failed all and begun anew since then is not meant.
* An epoch that was given up here before it was formed may have been formed elsewhere, and something begun in it. So it is remembered until
  it is known whether anybody is to be told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async.errors import CollectiveError, PeerLost
from monarch_async.exchange import post
from monarch_async.ids import ProcAddress
from monarch_async.tensor.backend import Backend
from monarch_async.tensor.epoch import Epoch, Stage
from monarch_async.tensor.ledger import GroupReport, Ledger
from monarch_async.tensor.membership import SERVICE, Circle
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.signature import Compared

__all__ = ["FIRST_DELAY", "LIVES", "LONGEST_DELAY", "REFUSED", "Forming"]

LIVES = 1 << 20
REFUSED, FOLLOWED = 1, 2
"""Why a member took its term, where that is not 0, an error that is to be told: it has refused an operation; or another member has. The
difference is who must give up what waits: all for the first, and for the second only who is in the epoch that has ended."""
FIRST_NUDGE = 0.05
"""Seconds after which a member that has not answered is spoken to again, and one and a half times that each time after."""
FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0
"""Seconds before the next try to form, after those that failed in connecting."""


class Forming:
    """Base of `Group`. Its methods are called on the loop."""

    def __init__(self, circle: Circle, ranks: tuple[int, ...], name: str, make: Callable[[], Backend], timeout: float, check: str) -> None:
        self.circle = circle
        self.loop: asyncio.AbstractEventLoop = circle.runtime.loop
        self.ranks = ranks
        self.name = name
        self.index = ranks.index(circle.me.rank)
        self.timeout = timeout
        self.check: str = check
        self.ledger = Ledger()
        self.agreed_shapes: set[Compared] = set()
        self.address = circle.me.key, ",".join(map(str, ranks))
        self.number = -1  # of the last epoch that was formed here
        self.epoch: Epoch | None = None
        self._last: Epoch | None = None  # the same, or the one before
        self.closed: BaseException | None = None
        self._make = make
        self._terms: list[int | None] = [None] * len(ranks)
        self._numbers = [-1] * len(ranks)  # the last epoch that each member was in when it took its term
        self._terms[self.index] = self._began_anew = circle.me.incarnation * LIVES
        """The term since which whatever waits here was called: all from before has failed."""
        self._proposals: dict[int, str] = {}  # of others, by index
        self._waiting: list[Operation] = []  # called while the group is not formed
        self._waiters: list[asyncio.Future[int]] = []  # those who wait for just that
        self._owed: BaseException | None = None  # why the last epoch ended, if nothing was under way to be told
        self._untold: deque[str] = deque(maxlen=16)  # epochs that were given up here before they were formed, without a word
        self._failing: Epoch | None = None  # one whose end waits for a better reason
        self._failures = 0  # in a row, to form
        self._nudging: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        circle.groups[self.address[1]] = self
        for rank in ranks:
            circle.watch(rank)
        self._introduce(reply=True)
        self._nudge_later(FIRST_NUDGE)
        self._propose()

    @property
    def ready(self) -> bool:
        """Whether the group is formed."""
        return self.epoch is not None and self.epoch.stage is Stage.READY

    # What `Group` does.

    def _over(self, error: BaseException, *, owed: bool = True, refused: int = 0) -> None:
        """Something went wrong."""
        raise NotImplementedError

    def _fail_waiting(self, error: BaseException) -> bool:
        """Whether anything waited for the group to form."""
        raise NotImplementedError

    def epoch_ready(self, epoch: Epoch) -> None:
        raise NotImplementedError

    def epoch_failed(self, epoch: Epoch, error: BaseException) -> None:
        raise NotImplementedError

    def mismatch(self, epoch: Epoch, text: str) -> None:
        raise NotImplementedError

    def heard(self, what: str, *args: Any) -> None:
        raise NotImplementedError

    def report(self) -> GroupReport:
        raise NotImplementedError

    def close(self, why: str) -> None:
        raise NotImplementedError

    # Introductions.

    def _introduce(
        self,
        *,
        reply: bool = False,
        to: Sequence[int] | None = None,
        error: BaseException | None = None,
        token: str = "",
        refused: int = 0,
    ) -> None:
        me = self.circle.me
        others = [rank for rank in self.ranks if rank != me.rank] if to is None else to
        wires = [self.circle.wire_to(rank) for rank in others]
        mine = self._terms[self.index], self._numbers[self.index], me.runtime.me
        seen = tuple(self._terms) if refused == REFUSED else ()
        post(wires, SERVICE, *self.address, "hello", self.index, *mine, reply, error, token, refused, seen)

    def _hello(
        self,
        index: int,
        term: int,
        number: int,
        address: ProcAddress,
        reply: bool,
        error: BaseException | None,
        token: str,
        refused: int,
        seen: Sequence[int | None],
    ) -> None:
        known = self._terms[index]
        if self.closed is not None or (known is not None and term < known):
            return  # of a life before, or from before it
        self.circle.lives(self.ranks[index], term // LIVES, address)
        if isinstance(error, PeerLost) and error.rank is not None:
            self.circle.has_ended(error.incarnation, error)
        if term != known:
            self._terms[index], self._numbers[index] = term, number
            if refused == REFUSED and (seen[self.index] or 0) < self._began_anew:
                refused = FOLLOWED  # of what was called with something that has ended here meanwhile
            self._left_by(index, error, token, refused)
        if reply:
            self._introduce(to=[self.ranks[index]])
        self._propose()

    def _left_by(self, index: int, error: BaseException | None, token: str, refused: int) -> None:
        """A member has taken another term: `token` is the epoch that ended for it by `error`, if it was in one."""
        epoch = self.epoch
        error = error or CollectiveError(f"rank {self.ranks[index]} of {self.name} has begun anew")
        if refused == REFUSED or (epoch is not None and (epoch.stage is Stage.READY or epoch.token == token)):
            self._over(error, owed=not refused, refused=FOLLOWED if refused else 0)
            return
        self._drop()
        if token in self._untold:  # others were in it, and had begun what waits here
            self._untold.remove(token)
            if not self._fail_waiting(error) and not refused:
                self._owed = error

    def _nudge_later(self, delay: float) -> None:
        self._nudging = self.loop.call_later(delay, self._nudge, delay)

    def _nudge(self, delay: float) -> None:
        """Say again what others may not have heard, as long as the group is not formed: a message to a process that ends may be lost."""
        if self.closed is not None or self.ready:
            self._nudging = None
            return
        epoch, lacking = self.epoch, []
        for index, (rank, term) in enumerate(zip(self.ranks, self._terms, strict=True)):
            differs = epoch is not None and index != self.index and self._proposals.get(index) != epoch.token
            if term is None or rank in self.circle.lost or differs:
                lacking.append(rank)
        self._introduce(reply=True, to=lacking)
        if epoch is not None:
            epoch.post("form")
        self._nudge_later(min(1.5 * delay, LONGEST_DELAY))

    def member_lost(self, error: PeerLost) -> None:
        """A member has ended, or will not come back."""
        epoch = self.epoch
        if epoch is not None and epoch.stage is Stage.READY:
            self._over(error)
        else:
            told = self._fail_waiting(error)
            if not told and (self.number >= 0 or self.circle.me.called):
                self._owed = error  # what it calls next others may have called with the one that is lost, which will not call it again
            self._drop(told=told)
        assert error.rank is not None
        if self.circle.is_gone(error.rank):
            self._fail_waiters(error)

    def _fail_waiters(self, error: BaseException) -> None:
        """The group will not be formed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiters.clear()

    # Proposals.

    def _propose(self) -> None:
        """If all are there, begin an epoch with them."""
        if self.closed is not None or self.epoch is not None or any(rank in self.circle.lost for rank in self.ranks):
            return
        if self._last is not None and not self._last.at_rest:
            return  # it tells when it is
        terms = tuple(term for term in self._terms if term is not None)
        if len(terms) < len(self.ranks):
            return
        delay = self._not_before - self.loop.time()
        if delay > 0:
            self.loop.call_later(delay, self._propose)
            return
        circle = self.circle
        wires = {index: circle.wire_to(rank) for index, rank in enumerate(self.ranks) if index != self.index}
        procs = [circle.me.runtime.me.uid if rank == circle.me.rank else circle.address_of(rank).uid for rank in self.ranks]
        self.epoch = self._last = Epoch(self, terms, 1 + max(self._numbers), wires, self._make, procs)
        self.epoch.post("form")
        self._see_whether_proposed()

    def epoch_at_rest(self) -> None:
        """Nothing of the one that is over touches a tensor any more."""
        self._propose()

    def _see_whether_proposed(self) -> None:
        epoch = self.epoch
        if epoch is None or epoch.stage is not Stage.PROPOSED:
            return
        if all(self._proposals.get(index) == epoch.token for index in range(len(self.ranks)) if index != self.index):
            epoch.connect()

    def _drop(self, *, told: bool = False) -> None:
        """One that is not formed here is not wanted any more."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            if not told:
                self._untold.append(epoch.token)
            epoch.end(CollectiveError("the group is formed with others"))

    def _take_term(self, error: BaseException | None, token: str, *, refused: int = 0) -> None:
        if self.closed is not None:
            return
        term = self._terms[self.index]
        assert term is not None
        self._terms[self.index], self._numbers[self.index] = term + 1, self.number
        self._introduce(error=error, token=token, refused=refused)
        if self._nudging is None:
            self._nudge_later(FIRST_NUDGE)
        self.loop.call_soon(self._propose)
