"""The lives of an actor: constructed, failing or stopped, cleaned up, perhaps begun again. `cell.Cell` adds what it does in between.

Rules:

* A constructor's error goes to whoever had the actor spawned, who decides what it means; every other failure goes to the owner.
* The end: refuse what is queued, cancel what runs and wait for that, stop what this actor has spawned (newest first), `__cleanup__`.
  Each step is bounded in time, and nobody who asks for the end, even twice, is told of it before it has come.
* An actor that `returns` keeps its mailbox when it ends, and waits, as *restarting*, for its owner to say whether there is another life:
  `revive` or `begin_stop`.
* Whoever waits for a handler that the end has cancelled is told that the actor died; so is, after the option `cleanup_timeout`, whoever
  waits for one that does not end.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from monarch_async._core.events import Evidence, Identity, died
from monarch_async._runtime.behavior import Behavior, CellState, Residence
from monarch_async._runtime.context import SYNC, Message, State, current_cell, current_message
from monarch_async._runtime.debt import Debt
from monarch_async._runtime.thread import ActorThread
from monarch_async.errors import ActorDied, CallTimeout

__all__ = ["ITSELF", "SAVE", "STOP", "Life"]

SAVE = "checkpoint by time"
"""What a behavior handles by taking a checkpoint."""
STOP = ""
"""What a cell handles by stopping; no endpoint has this name."""


class _Itself:
    """Where messages of an actor to itself come from: nobody waits for them, and no account has them."""

    def answer(self, message: Message, value: Any) -> None: ...

    def refuse(self, message: Message, error: BaseException) -> None: ...

    def credit(self, key: int, messages: int, size: int) -> None: ...

    def tell_started(self, message: Message) -> None: ...


ITSELF = _Itself()


class Life:
    """Base of `Cell`. Its methods are called on the loop."""

    def __init__(self, runtime: Residence, key: int, identity: Identity, behavior: Behavior, limit: int) -> None:
        self.runtime = runtime
        self.key = key
        self.identity = identity
        self.behavior = behavior
        self.handlers = behavior.handlers
        self.instance: Any = None
        self.born = runtime.loop.time()  # when its present life began
        self.state = CellState.STARTING
        self.evidence: Evidence | None = None  # why it is gone, or this life of it is over, once it is
        self.returns = False  # it may live again
        self.saved: bytes | None = None  # what the life before has left for this one: a pickled checkpoint
        self.save_every: float | None = None  # seconds between checkpoints
        self.saves = itertools.count(1)  # numbers of the checkpoints of all lives
        self._save_timer: asyncio.TimerHandle | None = None
        self.owner: Any = None  # whom a failure is told
        self.place: Any = None  # the mesh of processes it was spawned on, as its spawner described it
        self.owned: dict[object, Callable[[str], Awaitable[None]]] = {}  # how to stop what this actor has spawned; newest last
        self.probes: list[Message] = []  # those who ask whether the actor is up, while it is constructed
        self.on_constructed: Callable[[BaseException | None], None] | None = None
        self.mailbox: deque[Message] = deque()
        self.context = contextvars.copy_context()
        self.task: asyncio.Task[None] | None = None  # see `Cell`
        self.current: Message | None = None  # the message of the plain handler that runs
        self.overlapping: set[Message] = set()  # those of concurrent handlers
        self.thread: ActorThread | None = None
        self.debt = Debt(key, limit, runtime.indebted)
        self._ending: asyncio.Task[None] | None = None
        self.watchers: tuple[asyncio.Future[tuple[Identity, Evidence]], ...] = ()  # told when the present life is over

    def own_thread(self) -> ActorThread:
        """The thread of this actor's synchronous handlers, started when first needed."""
        if self.thread is None:
            self.thread = ActorThread(self.runtime.loop, self, str(self.identity))
        return self.thread

    async def construct(self) -> bool:
        """Make the instance; False if there is none, or no use for it any more."""
        current_message.set(None)
        current_cell.set(self)
        error: BaseException | None = None
        try:
            if self.behavior.threaded:
                self.instance = await self.own_thread().run(self.behavior.construct, (), {}, None)
            else:
                self.instance = self.behavior.construct()
            if self.saved is not None:
                await self.behavior.restore(self.instance, self.saved, self.thread)
                self.saved = None
        except BaseException as raised:
            error = raised
        current_cell.set(None)
        if self.evidence is not None:  # stopped meanwhile, and everybody is told
            return False
        told, self.on_constructed = self.on_constructed, None
        if error is not None:
            self._fail(error, "__init__")
            if told is not None:
                told(error)
            return False
        self.state = CellState.READY
        self.save_later()
        if told is not None:
            told(None)
        for message in self.probes:
            if message.state is State.QUEUED:
                message.origin.answer(message, None)
        self.probes.clear()
        return True

    def save_later(self) -> None:
        """Take the next checkpoint by time when the time has come; the one before it has been taken."""
        if self.save_every is not None and self.evidence is None:
            if self._save_timer is not None:
                self._save_timer.cancel()
            self._save_timer = self.runtime.loop.call_later(self.save_every, self.handle_next, SAVE)

    def handle_next(self, endpoint: str, body: bytes = b"") -> None:
        """Handle this once the handler that runs has ended, before anything else; see `Cell`."""
        raise NotImplementedError

    def fail(self, error: BaseException, endpoint: str) -> None:
        """The actor can't go on: tell the callers that wait, clean up, tell the owner.

        Where it may live again the owner is told when this life is over, since others may have to wait for that.
        """
        if self.evidence is None:
            self._fail(error, endpoint)
            self.once_over(lambda: self.runtime.failed(self, error, endpoint))

    def once_over(self, tell: Callable[[], None]) -> None:
        """Tell the owner of the end that has begun: at once, or, where there may be another life, when it has come."""
        assert self._ending is not None
        if self.returns:
            self._ending.add_done_callback(lambda ending: None if ending.cancelled() else tell())
        else:
            tell()

    def _fail(self, error: BaseException, endpoint: str) -> None:
        self.state = CellState.FAILED
        self.evidence = Evidence(f"{type(error).__name__} in {endpoint}: {error}")
        self._ending = self.runtime.tasks.start(self._end(error), name=f"cleanup of {self.identity}")

    def begin_stop(self, reason: str) -> asyncio.Task[None]:
        """Take no message from now on, and end for good. The task is done when that has come about, for whatever reason."""
        return self.give_up(Evidence(f"stopped: {reason}" if reason else "stopped"))

    def give_up(self, evidence: Evidence) -> asyncio.Task[None]:
        """The same, where there is a reason of its own that this actor ends, or is not started again."""
        if self._ending is None or self.state is CellState.RESTARTING:
            self.evidence = evidence
            self.returns = False
            self.state = CellState.STOPPING
            self._ending = self.runtime.tasks.start(self._end(None), name=f"stopping {self.identity}")
        elif self.returns:
            self.returns = False  # it ends already, and shall not come back
        return self._ending

    def suspend(self, reason: str) -> asyncio.Task[None]:
        """End this life, as others that belong to it do; there may be another. Done when it is over."""
        if self._ending is None:
            self.state = CellState.STOPPING
            self.evidence = Evidence(reason)
            self._ending = self.runtime.tasks.start(self._end(None), name=f"suspending {self.identity}")
        return self._ending

    async def revive(self, behavior: Behavior, incarnation: int, saved: bytes | None, told: Callable[[BaseException | None], None]) -> None:
        """Live again, once the life before is over: another instance, which gets what has queued. `told` hears of it."""
        await asyncio.shield(self.suspend("it was started again"))
        if self.state is not CellState.RESTARTING:  # stopped meanwhile
            told(self._died(started=False))
            return
        self.identity = self.identity._replace(incarnation=incarnation)
        self.behavior, self.handlers = behavior, behavior.handlers
        self.saved = saved
        for message in [message for message in self.mailbox if message.origin is ITSELF]:
            self.mailbox.remove(message)  # that was about the life before
        self.on_constructed = told
        self.context = contextvars.copy_context()
        self.evidence = self._ending = None
        self.born = self.runtime.loop.time()
        self.state = CellState.STARTING
        for heard in self.runtime.on_life:
            heard(self)
        self.start()

    def start(self) -> None:
        """Begin to live; see `Cell`."""
        raise NotImplementedError

    async def stop(self, reason: str) -> None:
        """Stop the actor. Returns when it has ended, for whatever reason."""
        await asyncio.shield(self.begin_stop(reason))

    def cancel(self, message: Message) -> None:
        """The caller has given up: drop a queued message, stop a running handler."""
        if message.state is State.QUEUED:
            message.state = State.CANCELLED
            message.origin.refuse(message, asyncio.CancelledError())
        elif message.state is State.RUNNING:
            message.state = State.STOPPING
            task = message.task or self.task
            if self.handlers[message.endpoint].kind == SYNC:
                if message.blocked_on is not None:
                    message.blocked_on.cancel()
            elif task is not None:
                task.cancel()

    def expire(self, message: Message) -> None:
        """The deadline of a message has passed while it was handled."""
        message.late = True
        self.cancel(message)

    def why_cancelled(self, message: Message, error: asyncio.CancelledError) -> BaseException:
        """What to tell the caller of a handler that was cancelled."""
        if message.late:
            return CallTimeout(f"{self.identity}.{message.endpoint} did not end before its deadline")
        return error if self.evidence is None else self._died(started=True)

    def reject(self, message: Message) -> None:
        """There is nobody to take this message any more."""
        message.state = State.DONE
        if message.request:
            message.origin.refuse(message, self._died(started=False))
        else:
            assert self.evidence is not None
            self.runtime.dead_letter(self.identity, message.endpoint, self.evidence)

    def _died(self, *, started: bool) -> ActorDied:
        assert self.evidence is not None
        identity = self.identity
        return died(self.evidence, identity.mesh, identity.rank, started=started, incarnation=identity.incarnation)

    async def _end(self, error: BaseException | None) -> None:
        runtime = self.runtime
        assert self.evidence is not None
        if self._save_timer is not None:
            self._save_timer.cancel()
        current_message.set(None)
        current_cell.set(self)
        if not self.returns:
            self._drop_waiting()
        self._tell_constructed()
        running = set(self._cancel_running())
        if running:
            await asyncio.wait(running, timeout=runtime.options.cleanup_timeout)
        for message in [*self.overlapping, *([self.current] if self.current else ())]:
            if message.request:
                message.origin.refuse(message, self._died(started=True))
                message.request = 0
        # Should they go on for all that, they are none of this actor's any more: the next life has its own.
        self.current, self.overlapping = None, set()
        for stop_owned in reversed(list(self.owned.values())):
            try:
                await stop_owned(self.evidence.text)
            except Exception:
                runtime.log.exception("%s: what it had spawned could not be stopped", self.identity)
        if self.instance is not None:
            await self._clean_up(error)
        if self.thread is not None:
            self.thread.stop()
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result((self.identity, self.evidence))
        self.thread = self.task = self.instance = None
        runtime.busy.discard(self)
        if self.returns:
            self.state = CellState.RESTARTING
            return
        self._drop_waiting()
        if self.state is not CellState.FAILED:
            self.state = CellState.STOPPED
        runtime.forget(self)

    def _drop_waiting(self) -> None:
        while self.mailbox:
            message = self.mailbox.popleft()
            if not message.request:
                self.debt.owe(message)
            if message.state is State.QUEUED and message.origin is not ITSELF:
                self.reject(message)
        for message in self.probes:
            if message.state is State.QUEUED:
                self.reject(message)
        self.probes.clear()
        self.debt.settle()

    def _tell_constructed(self) -> None:
        """Whoever waits for the constructor need not do so any longer."""
        told, self.on_constructed = self.on_constructed, None
        if told is not None:
            told(self._died(started=False))

    def _cancel_running(self) -> Iterator[asyncio.Task[Any]]:
        for message in list(self.overlapping):
            if message.state is State.QUEUED:
                self.reject(message)
            else:
                self.cancel(message)
            yield message.task
        if self.task is not None:
            if self.current is None:
                self.task.cancel()
            else:
                self.cancel(self.current)
            yield self.task

    async def _clean_up(self, error: BaseException | None) -> None:
        limit = self.runtime.options.cleanup_timeout
        bound = asyncio.timeout(limit)
        try:
            async with bound:
                await self.behavior.cleanup(self.instance, error, self.thread)
        except BaseException as trouble:
            task = asyncio.current_task()
            if isinstance(trouble, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(trouble, TimeoutError) and bound.expired():
                self.runtime.log.error("%s: __cleanup__ did not end within the option cleanup_timeout=%g s", self.identity, limit)
            else:
                self.runtime.log.error("%s: __cleanup__ raised", self.identity, exc_info=trouble)
