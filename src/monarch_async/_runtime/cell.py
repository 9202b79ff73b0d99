"""A cell: one actor. A mailbox, a handler table and an instance, which take one message at a time.

Rules:

* An idle cell has no task. A burst of messages is handled by one *drain* task; it ends when the mailbox is empty, and it never
  goes on after it was cancelled: the rest gets a new one.
* All plain handlers of an actor run in one `contextvars` context, as if the actor were one long task. Concurrent handlers have a copy each.
* Every message that wants an answer gets just one: a value, an error, or the news that the actor is gone.
* An exception in a call goes to the caller and the actor lives; in a cast there is nobody to tell, so the actor fails.

The cell is given its handlers and a `Behavior`; it knows no actor class.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from monarch_async._core.codec import loads
from monarch_async._core.events import Evidence, Identity, died
from monarch_async._runtime.behavior import Behavior, CellState, Residence
from monarch_async._runtime.context import SYNC, Handler, Message, State, constructing, current_message
from monarch_async._runtime.debt import Debt
from monarch_async._runtime.suspects import Suspects
from monarch_async._runtime.thread import ActorThread
from monarch_async.errors import CallTimeout

__all__ = ["Cell"]

STOP = ""  # no endpoint has this name
YIELD_EVERY = 64
"""After so many messages that never suspend, others get their turn."""


class Cell:
    """One actor in this process. Its methods are called on the loop."""

    def __init__(self, runtime: Residence, key: int, identity: Identity, behavior: Behavior, limit: int) -> None:
        self.runtime = runtime
        self.key = key
        self.identity = identity
        self.behavior = behavior
        self.handlers = behavior.handlers
        self.instance: Any = None
        self.state = CellState.STARTING
        self.evidence: Evidence | None = None  # why it is gone, once it is
        self.owner: Any = None  # whom a failure is told
        self.place: Any = None  # the mesh of processes it was spawned on, as its spawner described it
        self.owned: list[Callable[[str], Awaitable[None]]] = []  # stop what this actor has spawned; newest last
        self.probes: list[Message] = []  # those who ask whether the actor is up, while it is constructed
        self.on_constructed: Callable[[BaseException | None], None] | None = None
        self.mailbox: deque[Message] = deque()
        self.context = contextvars.copy_context()
        self.task: asyncio.Task[None] | None = None  # the drain, while there is something to do
        self.current: Message | None = None  # the message of the plain handler that runs
        self.overlapping: set[Message] = set()  # those of concurrent handlers
        self.suspects = Suspects()  # queued messages that wait for `current`
        self.thread: ActorThread | None = None
        self.debt = Debt(key, limit)

    def post(self, message: Message) -> None:
        """Put a message into the mailbox."""
        message.cell = self
        if self.evidence is not None:
            self._reject(message)
            return
        extras = message.extras
        if extras is not None and self._inspect(message, extras):
            return
        self.mailbox.append(message)
        if self.task is None:
            self.start()

    def start(self) -> None:
        """Begin to work through the mailbox (and, the first time, construct the instance)."""
        runtime = self.runtime
        self.task = runtime.loop.create_task(self._drain(), context=self.context)
        runtime.busy.add(self)
        if not runtime.ticking:
            runtime.start_ticking()

    async def _drain(self) -> None:
        if self.state is CellState.STARTING and not await self._construct():
            return
        mailbox = self.mailbox
        handlers = self.handlers
        instance = self.instance
        handled = 0
        while mailbox:
            message = mailbox.popleft()
            if not message.request:
                self.debt.owe(message)
            if message.state is not State.QUEUED:
                continue
            handler = handlers.get(message.endpoint)
            if handler is None or not handler.simple or message.deadline is not None:
                if not await self._handle(message, handler):
                    return
                continue
            self.current = message
            message.state = State.RUNNING
            current_message.set(message)
            try:
                if message.args is not None:
                    args, kwargs = message.args
                    result = await handler.function(instance, *args, **kwargs)
                elif message.body:
                    args, kwargs = loads(message.body, message.buffers or ())
                    result = await handler.function(instance, *args, **kwargs)
                else:
                    result = await handler.function(instance)
            except BaseException as error:
                if not self._raised(message, error):
                    return
            else:
                if not self._returned(message, result):
                    return
            handled += 1
            if not handled % YIELD_EVERY:
                await asyncio.sleep(0)
        self._idle()

    def _idle(self) -> None:
        self.task = None
        self.debt.settle()
        if not self.overlapping:
            self.runtime.busy.discard(self)

    def _returned(self, message: Message, result: Any) -> bool:
        """A handler ended well: answer. False if this drain must not go on."""
        told_to_stop = message.state is State.STOPPING
        message.state = State.DONE
        if message.request:
            message.origin.answer(message, result)
        if message.task is not None:
            return True
        self.current = None
        if self.suspects:
            self.suspects.clear()
        return not told_to_stop or self._renew()

    def _raised(self, message: Message, error: BaseException) -> bool:
        """A handler raised: tell the caller, or fail. False if this drain must not go on."""
        told_to_stop = message.state is State.STOPPING
        message.state = State.DONE
        if message.task is None:
            self.current = None
            self.suspects.clear()
        if message.request:
            message.origin.refuse(message, error)
        elif self.state is CellState.READY and not isinstance(error, asyncio.CancelledError):
            self.fail(error, message.endpoint)
            return False
        if message.task is not None:
            return True
        if self.state is not CellState.READY:
            return False
        if isinstance(error, (KeyboardInterrupt, SystemExit)) or told_to_stop or isinstance(error, asyncio.CancelledError):
            return self._renew()
        return True

    def _renew(self) -> bool:
        """This task was cancelled, so its next await might raise: leave the rest to a new one."""
        self.task = None
        if self.mailbox and self.state is CellState.READY:
            self.start()
        else:
            self._idle()
        return False

    async def _construct(self) -> bool:
        current_message.set(None)
        error: BaseException | None = None
        constructing.set(self)
        try:
            if self.behavior.threaded:
                self.instance = await self.own_thread().run(self.behavior.construct, (), {}, None)
            else:
                self.instance = self.behavior.construct()
        except BaseException as raised:
            error = raised
        constructing.set(None)
        told, self.on_constructed = self.on_constructed, None
        if error is None and self.state is CellState.STARTING:
            self.state = CellState.READY
        if told is not None:
            told(error)
        if error is None:
            for message in self.probes:
                message.origin.answer(message, None)
            self.probes.clear()
        if error is not None:
            self.fail(error, "__init__")
            return False
        return self.state is CellState.READY

    async def _handle(self, message: Message, handler: Handler | None) -> bool:
        """The general way for a message: threads, overlap, explicit ports, deadlines. False if this drain must not go on."""
        if handler is None:
            if message.endpoint == STOP:
                self.runtime.tasks.start(self.stop(message.body.decode()), name=f"stopping {self.identity}")
                return False
            return self._raised(message, self.unknown_endpoint(message.endpoint))
        if message.deadline is not None:
            left = message.deadline - self.runtime.loop.time()
            if left <= 0:
                message.state = State.DONE
                if message.request:
                    message.origin.refuse(message, CallTimeout(f"{self.identity}.{message.endpoint} was not started before its deadline"))
                return True
            message.timer = self.runtime.loop.call_later(left, self.cancel, message)
        message.state = State.RUNNING
        if handler.concurrent:
            context = self.context.copy()
            message.task = self.runtime.loop.create_task(self._overlap(message, handler), context=context)
            self.overlapping.add(message)
            return True
        self.current = message
        current_message.set(message)
        return await self._run(message, handler)

    async def _overlap(self, message: Message, handler: Handler) -> None:
        current_message.set(message)
        try:
            await self._run(message, handler)
        finally:
            self.overlapping.discard(message)
            if self.task is None and not self.overlapping:
                self.runtime.busy.discard(self)

    async def _run(self, message: Message, handler: Handler) -> bool:
        try:
            args, kwargs = message.args or (loads(message.body, message.buffers or ()) if message.body else ((), {}))
            if handler.explicit_port:
                args = (self.behavior.port(message), *args)
            if handler.kind == SYNC:
                result = await self.own_thread().run(handler.function, (self.instance, *args), kwargs, message)
            else:
                result = await handler.function(self.instance, *args, **kwargs)
        except BaseException as error:
            return self._raised(message, error)
        finally:
            if message.timer is not None:
                message.timer.cancel()
        if handler.explicit_port and message.request and message.state is State.RUNNING:
            # The port answers, now or later; until then the request stays open.
            message.state = State.DONE
            if message.task is None:
                self.current = None
            return True
        return self._returned(message, result)

    def stop_next(self, reason: str) -> None:
        """Stop once the handler that runs has ended, before anything else is handled."""
        message = Message(self.runtime.local, STOP, 0, 0, reason.encode(), None, None)
        self.mailbox.appendleft(message)
        if self.task is None:
            self.start()

    def own_thread(self) -> ActorThread:
        """The thread of this actor's synchronous handlers, started when first needed."""
        if self.thread is None:
            self.thread = ActorThread(self.runtime.loop, str(self.identity))
        return self.thread

    def unknown_endpoint(self, name: str) -> AttributeError:
        known = ", ".join(sorted(name for name in self.handlers if not name.endswith("()")))
        return AttributeError(f"{self.identity.class_name} has no endpoint {name!r}; it has {known or 'none'}")

    # Cancellation, deadlines, deadlock.

    def cancel(self, message: Message) -> None:
        """The caller has given up: drop a queued message, stop a running handler."""
        if message.state is State.QUEUED:
            message.state = State.CANCELLED
            message.origin.refuse(message, asyncio.CancelledError())
        elif message.state is State.RUNNING:
            message.state = State.STOPPING
            if message.flag is not None:
                message.flag.set()
            task = message.task or self.task
            handler = self.handlers[message.endpoint]
            if task is not None and handler.kind != SYNC:
                task.cancel()

    def _inspect(self, message: Message, extras: dict[str, Any]) -> bool:
        """Deadline and chain of a message that has some; true if it only asks whether the actor is up."""
        if "r" in extras:
            if self.state is CellState.STARTING:
                self.probes.append(message)
            else:
                message.origin.answer(message, None)
            return True
        left = extras.get("d")
        if left is not None:
            message.deadline = self.runtime.loop.time() + left
        chain = extras.get("c")
        current = self.current
        if chain and current is not None and current.number and self.suspects.note(message, chain, self.key, current):
            self.runtime.loop.call_soon(self.look_for_deadlock)
        return False

    def look_for_deadlock(self) -> None:
        """Refuse queued messages for which the running handler waits, and which wait for it."""
        self.suspects.look(self.current, self.runtime.find_waiter, str(self.identity))

    # The end.

    def fail(self, error: BaseException, endpoint: str) -> None:
        """The actor can't go on: clean up, tell the callers that wait, tell the owner."""
        if self.evidence is not None:
            return
        self.state = CellState.FAILED
        self.evidence = Evidence(f"{type(error).__name__} in {endpoint}: {error}")
        self.runtime.tasks.start(self._end(error), name=f"cleanup of {self.identity}")
        self.runtime.failed(self, error, endpoint)

    async def stop(self, reason: str) -> None:
        """Stop the actor: cancel what runs, drop what is queued, clean up. Returns when all that is done."""
        if self.evidence is None:
            self.state = CellState.STOPPING
            self.evidence = Evidence(f"stopped: {reason}" if reason else "stopped")
            await self._end(None)

    async def _end(self, error: BaseException | None) -> None:
        assert self.evidence is not None
        runtime = self.runtime
        while self.mailbox:
            message = self.mailbox.popleft()
            if not message.request:
                self.debt.owe(message)
            if message.state is State.QUEUED:
                self._reject(message)
        for message in self.probes:
            self._reject(message)
        self.debt.settle()
        running = [message.task for message in self.overlapping]
        for message in [*self.overlapping, *([self.current] if self.current else ())]:
            self.cancel(message)
        if self.task is not None and self.task is not asyncio.current_task():
            running.append(self.task)
            if self.current is None:
                self.task.cancel()
        if running:
            await asyncio.wait(running, timeout=runtime.options.cleanup_timeout)
        for stop_owned in reversed(self.owned):
            await stop_owned(self.evidence.text)
        if self.instance is not None:
            await self._clean_up(error)
        if self.thread is not None:
            self.thread.stop()
        if self.state is not CellState.FAILED:
            self.state = CellState.STOPPED
        self.task = None
        self.instance = None
        runtime.busy.discard(self)
        runtime.forget(self)

    async def _clean_up(self, error: BaseException | None) -> None:
        limit = self.runtime.options.cleanup_timeout
        try:
            async with asyncio.timeout(limit):
                await self.behavior.cleanup(self.instance, error, self.thread)
        except TimeoutError:
            self.runtime.log.error("%s: __cleanup__ did not end within the option cleanup_timeout=%g s", self.identity, limit)
        except Exception:
            self.runtime.log.exception("%s: __cleanup__ raised", self.identity)

    def _reject(self, message: Message) -> None:
        assert self.evidence is not None
        message.state = State.DONE
        identity = self.identity
        if message.request:
            error = died(self.evidence, identity.mesh, identity.rank, started=False, incarnation=identity.incarnation)
            message.origin.refuse(message, error)
        else:
            self.runtime.dead_letter(identity, message.endpoint, self.evidence)
