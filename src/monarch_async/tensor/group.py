"""A group: some ranks of a mesh that do operations together, through one epoch after another.

Theory: each member has a *term*, a number that grows whenever it begins something new: a life, or a new try after something went wrong. It
introduces itself to the others with its term. Who knows the terms of all, and of none that it is lost, proposes the epoch of just these
terms; when all have proposed the same, that epoch is connected (see `epoch`). Nobody decides for the others, and nobody is special.

When something goes wrong at a member (another is lost, an operation times out, is cancelled, does not fit or fails) its epoch ends there:
what is under way raises, the member takes its next term and introduces itself with it and with the error. That ends the epoch at all
others. So a group forms anew by itself once every member is there again.

Rules:

* The end of an epoch is told at every member just once: to all that is under way there, or, if nothing is, to the next operation that is
  called. So no member goes on as if nothing had been while others begin again.
* An operation that is refused for that reason is one that other members may have begun in the next epoch: it ends that for them too, but is
  not told to those who have begun nothing yet.
* What is called while the group forms waits for it.
* `term // LIVES` is the incarnation of the member's actor.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from monarch_async.errors import CollectiveError, CollectiveMismatch, PeerLost
from monarch_async.exchange import post
from monarch_async.future import Future
from monarch_async.ids import ProcAddress
from monarch_async.tensor.backend import Backend
from monarch_async.tensor.diagnosis import why_late
from monarch_async.tensor.epoch import Epoch, Stage
from monarch_async.tensor.ledger import Ledger, LedgerEntry
from monarch_async.tensor.membership import SERVICE, Circle
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.signature import Signature

__all__ = ["Check", "Group", "GroupReport"]

Check = Literal["always", "first", "never"]
LIVES = 1 << 20
GRACE = 0.3
"""Seconds for which the reason why a connection broke may still be on its way."""
FIRST_NUDGE = 0.1
"""Seconds after which a member that has not answered is spoken to again, and twice that each time after."""
FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0
"""Seconds before the next try to form, after those that failed in connecting."""


class GroupReport(NamedTuple):
    """What one member says of a group: its ranks in the mesh, the epoch it is in (-1: in none yet), whether it is formed, its ledger."""

    ranks: tuple[int, ...]
    epoch: int
    ready: bool
    entries: list[LedgerEntry]
    last_done: str


class Group:
    """See the module's text. Its methods are called on the loop."""

    def __init__(
        self, circle: Circle, ranks: tuple[int, ...], name: str, make: Callable[[], Backend], timeout: float, check: Check
    ) -> None:
        self.circle = circle
        self.loop: asyncio.AbstractEventLoop = circle.runtime.loop
        self.ranks = ranks
        self.name = name
        self.index = ranks.index(circle.me.rank)
        self.timeout = timeout
        self.check: str = check
        self.ledger = Ledger()
        self.agreed_shapes: set[Signature] = set()
        self.address = circle.me.key, ",".join(map(str, ranks))
        self.number = -1  # of the last epoch that was formed here
        self.epoch: Epoch | None = None
        self.closed: BaseException | None = None
        self._make = make
        self._terms: list[int | None] = [None] * len(ranks)
        self._numbers = [-1] * len(ranks)  # the last epoch that each member was in when it took its term
        self._terms[self.index] = circle.me.incarnation * LIVES
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

    def report(self) -> GroupReport:
        return GroupReport(self.ranks, self.number, self.ready, self.ledger.entries(), self.ledger.last_done)

    # What others say.

    def heard(self, what: str, *args: Any) -> None:
        if what == "hello":
            self._hello(*args)
            return
        token, index, *rest = args
        if what == "form":
            self._proposals[index] = token
            self._see_whether_proposed()
        elif self.epoch is None or self.epoch.token != token:
            return  # it is of an epoch that is over
        elif what == "at":
            self.epoch.heard(index, *rest)
        elif what == "object":
            self.epoch.object_came(index, *rest)
        elif what == "store":
            answer = self.epoch.store.heard(index, *rest)
            if answer is not None:
                request, how, value = answer
                wire = self.circle.wire_to(self.ranks[index])
                post([wire], SERVICE, *self.address, "store", token, self.index, how, rest[1], (request, value))

    def _introduce(
        self,
        *,
        reply: bool = False,
        to: Sequence[int] | None = None,
        error: BaseException | None = None,
        token: str = "",
        refused: bool = False,
    ) -> None:
        me = self.circle.me
        others = [rank for rank in self.ranks if rank != me.rank] if to is None else to
        wires = [self.circle.wire_to(rank) for rank in others]
        mine = self._terms[self.index], self._numbers[self.index], me.runtime.me
        post(wires, SERVICE, *self.address, "hello", self.index, *mine, reply, error, token, refused)

    def _hello(
        self, index: int, term: int, number: int, address: ProcAddress, reply: bool, error: BaseException | None, token: str, refused: bool
    ) -> None:
        known = self._terms[index]
        if self.closed is not None or (known is not None and term < known):
            return  # of a life before, or from before it
        self.circle.lives(self.ranks[index], term // LIVES, address)
        if isinstance(error, PeerLost) and error.rank is not None:
            self.circle.lose(error)
        if term != known:
            self._terms[index], self._numbers[index] = term, number
            self._left_by(index, error, token, refused)
        if reply:
            self._introduce(to=[self.ranks[index]])
        self._propose()

    def _left_by(self, index: int, error: BaseException | None, token: str, refused: bool) -> None:
        """A member has taken another term: `token` is the epoch that ended for it by `error`, if it was in one."""
        epoch = self.epoch
        error = error or CollectiveError(f"rank {self.ranks[index]} of {self.name} has begun anew")
        if refused or (epoch is not None and (epoch.stage is Stage.READY or epoch.token == token)):
            self._over(error, owed=not refused)
            return
        self._drop()
        if token in self._untold:  # others were in it, and had begun what waits here
            self._untold.remove(token)
            if not self._fail_waiting(error):
                self._owed = error

    def _nudge_later(self, delay: float) -> None:
        self._nudging = self.loop.call_later(delay, self._nudge, delay)

    def _nudge(self, delay: float) -> None:
        """Say again what others may not have heard, as long as the group is not formed: a message to a process that ends may be lost."""
        if self.closed is not None or self.ready:
            self._nudging = None
            return
        unknown = [self.ranks[index] for index, term in enumerate(self._terms) if term is None or self.ranks[index] in self.circle.lost]
        self._introduce(reply=True, to=unknown)
        if self.epoch is not None:
            self.epoch.post("form")
        self._nudge_later(min(2 * delay, LONGEST_DELAY))

    def member_lost(self, error: PeerLost) -> None:
        """A member has ended, or will not come back."""
        epoch = self.epoch
        if epoch is not None and epoch.stage is Stage.READY:
            self._over(error)
        else:
            self._drop(told=self._fail_waiting(error))

    # Forming.

    def _propose(self) -> None:
        """If all are there, begin an epoch with them."""
        if self.closed is not None or self.epoch is not None or any(rank in self.circle.lost for rank in self.ranks):
            return
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
        self.epoch = Epoch(self, terms, 1 + max(self._numbers), wires, self._make, procs)
        self.epoch.post("form")
        self._see_whether_proposed()

    def _see_whether_proposed(self) -> None:
        epoch = self.epoch
        if epoch is None or epoch.stage is not Stage.PROPOSED:
            return
        if all(self._proposals.get(index) == epoch.token for index in range(len(self.ranks)) if index != self.index):
            epoch.connect()

    def epoch_ready(self, epoch: Epoch) -> None:
        self.number = epoch.number
        self._failures = 0
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(epoch.number)
        self._waiters.clear()
        while self._waiting and epoch.stage is Stage.READY:
            self._begin(epoch, self._waiting.pop(0))

    def epoch_failed(self, epoch: Epoch, error: BaseException) -> None:
        """Its backend says so. If that is since a member has died, it is about to be known."""
        if self._failing is not epoch and epoch.stage is not Stage.OVER:
            self._failing = epoch
            self.loop.call_later(GRACE, self._give_up, epoch, error)

    def _give_up(self, epoch: Epoch, error: BaseException) -> None:
        self._failing = None
        if self.epoch is not epoch:
            return
        if epoch.stage is Stage.CONNECTING:
            self._failures += 1
            self._not_before = self.loop.time() + min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)
            self.circle.runtime.log.warning("%s could not be formed and tries again: %s", self.name, error)
            self._drop()
            self._take_term(None, "", refused=False)
        else:
            failed = CollectiveError(f"an operation of {self.name} failed at rank {self.circle.me.rank}: {error}")
            failed.__cause__ = error
            self._over(failed)

    def mismatch(self, epoch: Epoch, text: str) -> None:
        self._over(CollectiveMismatch(text))

    # The end of an epoch.

    def _drop(self, *, told: bool = False) -> None:
        """One that is not formed here is not wanted any more."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            if not told:
                self._untold.append(epoch.token)
            epoch.end(CollectiveError("the group is formed with others"))

    def _over(self, error: BaseException, *, owed: bool = True, refused: bool = False) -> None:
        """Something went wrong: tell all that is under way here, or who comes next, and the other members."""
        epoch, self.epoch = self.epoch, None
        told = epoch.end(error) if epoch is not None else False
        told = self._fail_waiting(error) or told
        if owed and epoch is not None and not told:
            self._owed = error
        self._take_term(error, epoch.token if epoch is not None else "", refused=refused)

    def _take_term(self, error: BaseException | None, token: str, *, refused: bool) -> None:
        if self.closed is not None:
            return
        term = self._terms[self.index]
        assert term is not None
        self._terms[self.index], self._numbers[self.index] = term + 1, self.number
        self._introduce(error=error, token=token, refused=refused)
        if self._nudging is None:
            self._nudge_later(FIRST_NUDGE)
        self.loop.call_soon(self._propose)

    def _fail_waiting(self, error: BaseException) -> bool:
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            self._settle_failed(operation, error)
        return bool(waiting)

    def close(self, why: str) -> None:
        """The life of this member is over."""
        me = self.circle.me
        story = {"mesh": me.name, "rank": me.rank, "incarnation": me.incarnation, "reason": why}
        error = PeerLost(f"{me.name}[{me.rank}] is gone: {why}", **story)  # type: ignore[arg-type]
        self._over(error, owed=False)
        self.closed = error
        if self._nudging is not None:
            self._nudging.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # Operations.

    def submit(self, operation: Operation, timeout: float | None, line: str) -> Future[Any]:
        """Take an operation: it is begun now, or, while the group forms, when that has come about."""
        signature = operation.signature
        operation.entry = self.ledger.open(signature.kind, signature.shapes, line)
        future = operation.future = Future(loop=self.loop)
        future.runtime = self.circle.runtime
        operation.timeout = self.timeout if timeout is None else timeout
        future.add_done_callback(functools.partial(self._done, operation))
        error = self.closed or self._owed
        if error is not None:
            self._settle_failed(operation, error)
            if self._owed is not None:
                self._owed = None
                self._over(error, owed=False, refused=True)
            return future
        operation.timer = self.loop.call_later(operation.timeout, self._late, operation)
        epoch = self.epoch
        if epoch is not None and epoch.stage is Stage.READY:
            self._begin(epoch, operation)
        else:
            gone = next((self.circle.lost[rank] for rank in self.ranks if self.circle.is_gone(rank)), None)
            if gone is not None:
                self._settle_failed(operation, gone)
            else:
                self._waiting.append(operation)
        return future

    def _begin(self, epoch: Epoch, operation: Operation) -> None:
        if operation.begin is not None:
            operation.begin(epoch, operation)
        else:
            epoch.begin(operation)

    def _settle_failed(self, operation: Operation, error: BaseException) -> None:
        if operation.timer is not None:
            operation.timer.cancel()
        self.ledger.close(operation.entry, error)
        if not operation.future.done():
            operation.future.fail(0, error)

    def _late(self, operation: Operation) -> None:
        self.circle.runtime.tasks.start(self._diagnose(operation), name=f"diagnosis of {self.name}")

    async def _diagnose(self, operation: Operation) -> None:
        epoch = self.epoch if operation not in self._waiting else None
        if epoch is not None:
            missing = epoch.missing(operation)
        else:
            known = enumerate(self._terms)
            missing = [index for index, term in known if term is None or self.ranks[index] in self.circle.lost]
            missing = missing or [index for index in range(len(self.ranks)) if index != self.index and index not in self._proposals]
        ranks = [self.ranks[index] for index in missing]
        error = await why_late(self.circle, self.name, operation, ranks, formed=epoch is not None)
        if not operation.future.done():
            self._fail(operation, error)

    def _fail(self, operation: Operation, error: BaseException) -> None:
        """This operation failed here, and so it does for all."""
        if operation in self._waiting:
            self._waiting.remove(operation)
            self._settle_failed(operation, error)
            self._over(error, owed=False, refused=True)
        else:
            self._over(error)

    def _done(self, operation: Operation, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            return
        me = self.circle.me
        why = me.why_over
        error: BaseException
        if why:
            error = PeerLost(f"{me.name}[{me.rank}] is gone: {why}", mesh=me.name, rank=me.rank, incarnation=me.incarnation, reason=why)
        else:
            what = f"operation {operation.number}, {operation.signature}" if operation.number else str(operation.signature)
            error = CollectiveError(f"rank {me.rank} of {self.name} has cancelled {what}")
        if operation in self._waiting or (self.epoch is not None and operation in self.epoch.under_way):
            self._fail(operation, error)

    async def wait_ready(self) -> int:
        """Wait until the group is formed; what had ended the epoch before counts as told. Returns the epoch's number."""
        self._owed = None
        if self.closed is not None:
            raise self.closed
        if self.ready:
            return self.number
        waiter: asyncio.Future[int] = self.loop.create_future()
        self._waiters.append(waiter)
        return await waiter
