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
from collections.abc import Sequence
from typing import Any, Literal

from monarch_async.errors import CollectiveError, CollectiveMismatch, PeerLost
from monarch_async.exchange import post
from monarch_async.future import Future
from monarch_async.tensor.diagnosis import why_late
from monarch_async.tensor.epoch import Epoch, Stage
from monarch_async.tensor.forming import FIRST_DELAY, LONGEST_DELAY, REFUSED, Forming
from monarch_async.tensor.ledger import GroupReport
from monarch_async.tensor.membership import SERVICE
from monarch_async.tensor.operation import Operation

__all__ = ["Check", "Group"]

Check = Literal["always", "first", "never"]
ANNOUNCED = 0.1
"""Seconds in which what the others have called, in better words than a backend's, is to be here."""
GRACE = 2.0
"""Seconds for which the reason why a connection broke may still be on its way."""


class Group(Forming):
    """See the module's text. Its methods are called on the loop."""

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
        elif what == "round":
            self.epoch.heard_round(index, *rest)
        elif what == "object":
            self.epoch.objects.came(index, *rest)
        elif what == "asked":
            self.epoch.presence.asked(index, *rest)
        elif what == "there":
            self.epoch.presence.there(index, *rest)
        elif what == "store":
            answer = self.epoch.store.heard(index, *rest)
            if answer is not None:
                request, how, value = answer
                wire = self.circle.wire_to(self.ranks[index])
                post([wire], SERVICE, *self.address, "store", token, self.index, how, rest[1], (request, value))

    # Forming.

    def epoch_ready(self, epoch: Epoch) -> None:
        self.number = epoch.number
        self._failures = 0
        if self._waiters:
            self._tell_waiters(epoch, list(self._waiters))
        epoch.presence.formed()
        while self._waiting and epoch.stage is Stage.READY:
            self._begin(epoch, self._waiting.pop(0))

    def epoch_failed(self, epoch: Epoch, error: BaseException) -> None:
        """Its backend says so. If that is since a member has died, it is about to be known."""
        if self._failing is not epoch and epoch.stage is not Stage.OVER:
            self._failing = epoch
            self.loop.call_later(ANNOUNCED if isinstance(error, CollectiveMismatch) else GRACE, self._give_up, epoch, error)

    def _give_up(self, epoch: Epoch, error: BaseException) -> None:
        self._failing = None
        if self.epoch is not epoch:
            return
        if epoch.stage is Stage.CONNECTING:
            self._failures += 1
            self._not_before = self.loop.time() + min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)
            self.circle.runtime.log.warning("%s could not be formed and tries again: %s", self.name, error)
            self._drop()
            self._take_term(None, "")
        elif isinstance(error, CollectiveMismatch):
            self._over(error)
        else:
            failed = CollectiveError(f"an operation of {self.name} failed at rank {self.circle.me.rank}: {error}")
            failed.__cause__ = error
            self._over(failed)

    def mismatch(self, epoch: Epoch, text: str) -> None:
        self._over(CollectiveMismatch(text))

    # The end of an epoch.

    def _over(self, error: BaseException, *, owed: bool = True, refused: int = 0) -> None:
        """Something went wrong: tell all that is under way here, or who comes next, and the other members."""
        epoch, self.epoch = self.epoch, None
        told = epoch.end(error) if epoch is not None else False
        told = self._fail_waiting(error) or told
        if owed and epoch is not None and not told:
            self._owed = error
        self._take_term(error, epoch.token if epoch is not None else "", refused=refused)
        self._began_anew = self._terms[self.index] or 0

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
        self._fail_waiters(error)

    # Operations.

    @property
    def owes(self) -> bool:
        """Whether the next operation is refused, since an epoch has ended and nobody here was told."""
        return self._owed is not None

    @property
    def _gone(self) -> PeerLost | None:
        """The loss of a member that will not come back."""
        return next((self.circle.lost[rank] for rank in self.ranks if self.circle.is_gone(rank)), None)

    def abandon(self, error: BaseException) -> None:
        """This member will not call what the others may have called already: they are told, and who has called it here."""
        self._over(error, owed=False, refused=REFUSED if self.epoch is None else 0)

    def submit(self, operation: Operation, timeout: float | None, line: str) -> Future[Any]:
        """Take an operation: it is begun now, or, while the group forms, when that has come about."""
        signature = operation.signature
        operation.entry = self.ledger.open(signature.kind, signature.shapes, line)
        operation.entry.partner = self.ranks[operation.partner] if operation.partner is not None else None
        future = operation.future = Future(loop=self.loop)
        future.runtime = self.circle.runtime
        operation.timeout = self.timeout if timeout is None else timeout
        future.add_done_callback(functools.partial(self._done, operation))
        error = self.closed or self._owed
        if error is not None:
            self._settle_failed(operation, error)
            if self._owed is not None:
                self._owed = None
                self._over(error, owed=False, refused=REFUSED)
            return future
        operation.timer = self.loop.call_later(operation.timeout, self._late, operation)
        epoch = self.epoch
        if epoch is not None and epoch.stage is Stage.READY:
            self._begin(epoch, operation)
        else:
            gone = self._gone
            if gone is not None:
                self._settle_failed(operation, gone)
            else:
                self._waiting.append(operation)
        return future

    def _begin(self, epoch: Epoch, operation: Operation) -> None:
        if operation.begin is None:
            epoch.begin(operation)
            return
        try:
            operation.begin(epoch, operation)
        except Exception as error:  # what is sent can't be pickled, which may fail in any way: that is its sender's alone
            self._settle_failed(operation, error)

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
            self._over(error, owed=False, refused=REFUSED)
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
        """Wait until the group is formed, in an epoch that every member is in; gives its number. What has ended others counts as told.

        Raises `PeerLost` when a member will not come back.
        """
        self._owed = None
        error = self.closed or self._gone
        if error is not None:
            raise error
        waiter: asyncio.Future[int] = self.loop.create_future()
        self._waiters.append(waiter)
        if self.epoch is not None and self.epoch.stage is Stage.READY:
            self._tell_waiters(self.epoch, [waiter])
        try:
            return await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _tell_waiters(self, epoch: Epoch, waiters: Sequence[asyncio.Future[int]]) -> None:
        """That it is ready, once all have said so; if it is over before, they wait for the next one."""

        def told() -> None:
            for waiter in waiters:
                if waiter in self._waiters and not waiter.done():
                    self._owed = None  # it has waited since that was so
                    waiter.set_result(epoch.number)

        epoch.presence.ask(told)
