"""One epoch of a group: the same members, in the same lives, from its proposal to the first thing that goes wrong.

Theory: every member proposes the epoch by the *terms* of all (see `group`). When all have proposed the same, each connects its backend,
with a store that only this epoch has. From then on an operation goes through these steps:

1. It is numbered, in the order of the calls, and announced to all others: what it is, and what this member has last finished.
2. When all others have announced theirs of that number, and all fit together, it is started. If one does not fit, nothing was moved. Where
   the backend looks at that itself, operations that need not know what others say are started at once.
3. When the backend tells of its end, the result is handed over in the loop.

Rules:

* Operations of one channel are started in the order of their numbers. Announcements of one member come in order, so a later one never
  overtakes an earlier one.
* Everything here runs on the loop, but for `connect`, what is prepared in a thread, and what the backend calls.
* An epoch ends once, with an error that every operation under way gets at once. Its backend is aborted, and let go of when the last of its
  works has come to its end; until then this member proposes no other, so that nothing writes to a tensor once the group is formed again.
  Nothing of an epoch reaches the next one: messages name the epoch they are of.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_async.errors import CollectiveMismatch
from monarch_async.exchange import Wire, post
from monarch_async.tensor.announcing import Announcer, Announcing
from monarch_async.tensor.backend import Backend
from monarch_async.tensor.objects import Objects
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.presence import Presence
from monarch_async.tensor.signature import digest
from monarch_async.tensor.store import MemberStore
from monarch_async.tensor.world import enter, remove

__all__ = ["Epoch", "Stage", "token_of"]

CONNECT_TIMEOUT = 5.0
"""Seconds for which gloo may try to reach one member. One that dies in just that moment keeps a thread for up to five times that."""

Terms = tuple[int, ...]


class Stage(enum.Enum):
    """Where an epoch is."""

    PROPOSED = 0
    CONNECTING = 1
    READY = 2
    OVER = 3


def token_of(terms: Terms) -> str:
    """A short name for the terms of all members, the same at each of them."""
    return hashlib.blake2b(repr(terms).encode(), digest_size=8).hexdigest()


class Owner(Announcer, Protocol):
    """The group that an epoch is of."""

    address: tuple[Any, ...]  # of the group, before every message
    loop: asyncio.AbstractEventLoop

    def epoch_ready(self, epoch: Epoch) -> None: ...
    def epoch_failed(self, epoch: Epoch, error: BaseException) -> None: ...
    def epoch_at_rest(self) -> None: ...


class Epoch(Announcing):
    """See the module's text."""

    owner: Owner

    def __init__(
        self, owner: Owner, terms: Terms, number: int, wires: dict[int, Wire], make: Callable[[], Backend], procs: Sequence[str]
    ) -> None:
        super().__init__(owner, len(terms))
        self.terms = terms
        self.token = token_of(terms)
        self.number = number
        self.stage = Stage.PROPOSED
        self._made: Backend | None = None  # from when it connects
        self._make = make
        self._connecting = False
        self.error: BaseException | None = None
        self._procs = procs
        self._wires = wires
        self._all = tuple(wires.values())
        self._queues: dict[str, deque[Operation]] = {}  # not started yet, by channel
        self.under_way: set[Operation] = set()
        self._works = 0  # started, and not told of by the backend
        self.objects = Objects(self)
        self.presence = Presence(self, owner.loop, frozenset(wires))
        first = wires.get(0)
        self.store = MemberStore(
            owner.index, self._from_thread(self._all), self._from_thread((first,) if first is not None else ()), CONNECT_TIMEOUT
        )

    @property
    def backend(self) -> Backend:
        """What moves its tensors, once it is formed."""
        assert self._made is not None
        return self._made

    @property
    def at_rest(self) -> bool:
        """Whether nothing of it touches a tensor any more, once it is over."""
        return not self._works

    @property
    def me(self) -> int:
        """This member's index."""
        return self.owner.index

    def post(self, what: str, *args: Any, to: int | None = None) -> None:
        """Tell all others, or one."""
        wires = self._all if to is None else (self._wires[to],)
        post(wires, "collective", *self.owner.address, what, self.token, self.owner.index, *args)

    def _from_thread(self, wires: Sequence[Wire]) -> Callable[[str, str, Any], None]:
        owner = self.owner

        def send(what: str, key: str, value: Any) -> None:
            message = (*owner.address, "store", self.token, owner.index, what, key, value)
            owner.loop.call_soon_threadsafe(lambda: post(wires, "collective", *message))

        return send

    # Connecting.

    def connect(self) -> None:
        """All have proposed this: meet."""
        self.stage = Stage.CONNECTING
        self._connecting = True
        threading.Thread(target=self._connect, name=f"monarch_async connecting {self.owner.name}", daemon=True).start()

    def _connect(self) -> None:
        trouble: BaseException | None = None
        try:
            self._made = backend = self._make()
            if self.stage is not Stage.OVER:  # looked at after `_made` is set, as `end` sets the one and looks at the other
                backend.connect(self.store, self.owner.index, self._size, CONNECT_TIMEOUT)
        except Exception as error:  # whatever the backend runs into; most likely a member that is gone meanwhile
            trouble = error
        try:
            self.owner.loop.call_soon_threadsafe(self._connected, trouble)
        except RuntimeError:  # the loop is closed, and the process ends
            pass

    def _connected(self, trouble: BaseException | None) -> None:
        self._connecting = False
        if self.stage is Stage.OVER:
            self._let_go()
            return
        if trouble is not None:
            self.owner.epoch_failed(self, trouble)
            return
        enter(
            self.backend.process_group, f"{self.owner.name} {self.token}", self.owner.name, self.backend.torch_name, self.store, self._procs
        )
        self.stage = Stage.READY
        self.owner.epoch_ready(self)

    # Operations.

    def begin(self, operation: Operation) -> None:
        """Number and announce an operation; it is started as soon as all others have come as far."""
        channel = operation.channel
        self._number(operation)
        operation.entry.number, operation.entry.epoch = operation.number, self.number
        self.under_way.add(operation)
        self._announce(operation)
        self._queues.setdefault(channel, deque()).append(operation)
        if not operation.prepared:
            self._prepare(operation)
        key = channel, operation.number
        self._open[key] = operation
        if not self._fits_all(operation):
            return
        if operation.free and self.backend.agrees:  # what others say of it is for whoever asks what it waits for
            operation.views = ()
            self._start_next(channel)
        self._see_whether_all(key)

    def _agreed(self, operation: Operation) -> None:
        if operation.started and operation in self.under_way:
            operation.entry.state = "running"
        self._start_next(operation.channel)

    def _prepare(self, operation: Operation) -> None:
        assert operation.prepare is not None
        prepare, backend = operation.prepare, self.backend

        def prepared(error: BaseException | None) -> None:
            if self.stage is Stage.OVER:
                return
            if error is not None:
                self.owner.epoch_failed(self, error)
                return
            operation.prepared = True
            self._start_next(operation.channel)

        def attempt() -> BaseException | None:
            try:
                prepare(backend)
            except Exception as raised:  # too little memory, say
                return raised
            return None

        def run() -> None:
            self.owner.loop.call_soon_threadsafe(prepared, attempt())

        if operation.heavy:
            threading.Thread(target=run, name="monarch_async preparing", daemon=True).start()
            return
        error = attempt()
        operation.prepared = error is None
        if error is not None:
            self.owner.epoch_failed(self, error)

    def _start_next(self, channel: str) -> None:
        queue = self._queues[channel]
        while queue and queue[0].views is not None and queue[0].prepared and self.stage is Stage.READY:
            self._start(queue.popleft())

    def _start(self, operation: Operation) -> None:
        assert operation.views is not None
        operation.started = True
        operation.entry.started = time.monotonic()
        if (operation.channel, operation.number) not in self._open:
            operation.entry.state = "running"
        if self.backend.agrees:
            self.backend.tag = digest(operation.signature, shapes=self.owner.check != "never")
        try:
            running = operation.launch(self.backend, operation.views) if operation.launch is not None else None
        except CollectiveMismatch as error:
            self.owner.mismatch(self, f"operation {operation.number} of {self.owner.name} differs between ranks: {error}")
            return
        except Exception as error:  # torch refuses it, for a reason that is not looked for before
            self.owner.epoch_failed(self, error)
            return
        if running is None:
            # Not at once: who awaits it may block the loop next, and what was announced would not have left yet.
            self.owner.loop.call_soon(self.ended, operation, *_finish(operation))
            return
        self._works += 1
        loop = self.owner.loop

        def hand_over(error: BaseException | None) -> None:
            outcome = (None, error) if error is not None or self.stage is Stage.OVER else _finish(operation)
            try:
                loop.call_soon_threadsafe(self._told, operation, *outcome)
            except RuntimeError:  # the loop is closed
                pass

        def told(error: BaseException | None) -> None:
            if operation.heavy and operation.prepare is not None:  # what was copied is copied back: the backend's thread has more to do
                threading.Thread(target=hand_over, args=(error,), name="monarch_async finishing", daemon=True).start()
            else:
                hand_over(error)

        running.when_done(told)

    def _told(self, operation: Operation, value: Any, error: BaseException | None) -> None:
        self._works -= 1
        if self.stage is Stage.OVER:
            if not self._works:
                self._let_go()
                self.owner.epoch_at_rest()
        else:
            self.ended(operation, value, error)

    def ended(self, operation: Operation, value: Any, error: BaseException | None) -> None:
        if operation not in self.under_way:
            return  # the epoch has ended meanwhile
        if error is not None:
            self.owner.epoch_failed(self, error)
            return
        self.under_way.discard(operation)
        self.settle(operation, value, None)

    def settle(self, operation: Operation, value: Any, error: BaseException | None) -> None:
        """The outcome of an operation."""
        if operation.timer is not None:
            operation.timer.cancel()
        self.owner.ledger.close(operation.entry, error)
        if operation.future.done():
            pass  # it was cancelled, which is why the epoch is over
        elif error is None:
            operation.future.settle(0, value)
        else:
            operation.future.fail(0, error)

    def finished(self, operation: Operation) -> None:
        """One that moves nothing here."""
        operation.entry.epoch = self.number
        self.under_way.add(operation)
        self.ended(operation, None, None)

    # The end.

    def end(self, error: BaseException) -> bool:
        """It is over; returns whether anything was under way."""
        before, self.stage, self.error = self.stage, Stage.OVER, error
        self.store.close(error)
        self.presence.end()
        under_way, self.under_way = self.under_way, set()
        self._open.clear()
        self._heard.clear()
        self._rounds.clear()
        self._queues.clear()
        if before is Stage.READY:
            remove(self.backend.process_group)
        if before is not Stage.PROPOSED:
            if self._made is not None:
                self._made.abort()
            if not self._connecting and not self._works:  # else when that has ended
                self._let_go()
        for operation in under_way:
            self.settle(operation, None, error)
        return bool(under_way)

    def _let_go(self) -> None:
        if self._made is not None:
            threading.Thread(target=self._made.close, name=f"monarch_async closing {self.owner.name}", daemon=True).start()


def _finish(operation: Operation) -> tuple[Any, BaseException | None]:
    if operation.finish is None:
        return None, None
    try:
        return operation.finish(), None
    except Exception as error:  # whatever torch raises in making the result
        return None, error
