"""A cell: one actor. A mailbox, a handler table and an instance, which take one message at a time.

Rules:

* A cell is one task. While it is idle, a message is begun where it arrives, as a step of that task, and only a handler that waits for
  something is handed over to it: most calls need no turn of the loop. While it is busy, messages queue in the mailbox.
* The task never goes on after it was cancelled: the rest gets a new one.
* All plain handlers of an actor run in one `contextvars` context, as if the actor were one long task. Concurrent handlers have a copy each.
* Every message that wants an answer gets just one: a value, an error, or the news that the actor is gone.
* An exception in a call goes to the caller and the actor lives; in a cast there is nobody to tell, so the actor fails.

The cell is given its handlers and a `Behavior`; it knows no actor class.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from monarch_async._core.codec import loads
from monarch_async._core.events import Identity
from monarch_async._runtime.behavior import Behavior, CellState, Residence
from monarch_async._runtime.context import SYNC, Handler, Message, State, current_message
from monarch_async._runtime.life import ITSELF, STOP, Life
from monarch_async._runtime.resumed import Resumed
from monarch_async._runtime.suspects import Suspects
from monarch_async.errors import CallTimeout

__all__ = ["Cell"]

LATER_THAN_CALLER = 0.05
"""Seconds after its deadline until a handler is stopped from this side: the caller's own timer and word come first, where it lives."""
YIELD_EVERY = 64
"""After so many messages that never suspend, others get their turn."""


class Cell(Life):
    """One actor in this process. Its methods are called on the loop."""

    def __init__(self, runtime: Residence, key: int, identity: Identity, behavior: Behavior, limit: int) -> None:
        super().__init__(runtime, key, identity, behavior, limit)
        self.suspects = Suspects(str(identity))  # queued messages that wait for `current`
        self._wake: asyncio.Future[None] | None = None  # what the task waits for while the actor is idle
        self._handover: Resumed | None = None  # a handler that has begun, on its way to the task

    def post(self, message: Message) -> None:
        """Take a message: handle its first part at once if the actor is idle, else put it into the mailbox."""
        message.cell = self
        if self.evidence is not None and not self.returns:
            self.reject(message)
            if not message.request:
                self.debt.owe(message)
                self.debt.settle()
            return
        extras = message.extras
        if extras is not None and self._inspect(message, extras):
            return
        if self.evidence is not None:
            self.mailbox.append(message)  # for the next life
            return
        if self._wake is not None:
            handler = self.handlers.get(message.endpoint)
            if handler is not None and handler.simple and message.args is None and message.deadline is None:
                loop = self.runtime.loop
                # Else a step of another task is being made; or this one was cancelled, and does not know it yet.
                if asyncio.current_task(loop) is None and not self._wake.done():
                    self._begin(loop, message, handler)
                    return
            self._wake_up()
        self.mailbox.append(message)
        if self.task is None:
            self.start()

    def start(self) -> None:
        """Begin to live: construct the instance, the first time, and work through the mailbox."""
        self.task = self.runtime.loop.create_task(self._live(), name=f"actor {self.identity}", context=self.context)
        self._is_busy()

    def _is_busy(self) -> None:
        runtime = self.runtime
        runtime.busy.add(self)
        if not runtime.ticking:
            runtime.start_ticking()

    def _wake_up(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)
        self._is_busy()

    def _begin(self, loop: asyncio.AbstractEventLoop, message: Message, handler: Handler) -> None:
        """Run a handler up to where it first waits, here and now, as the actor's task. Most never wait."""
        if not message.request:
            self.debt.owe(message)
            if not self.runtime.ticking:
                self.runtime.start_ticking()
        task = self.task
        assert task is not None
        self.current = message
        message.state = State.RUNNING
        asyncio.tasks._enter_task(loop, task)
        try:
            begun = self.context.run(self._first_step, message, handler)
        except StopIteration as end:
            self._returned(message, end.value)  # the task itself is idle, so whether to go on is not asked
        except BaseException as error:
            self._raised(message, error)
        else:
            self._handover = begun
            self._wake_up()
        finally:
            asyncio.tasks._leave_task(loop, task)

    def _first_step(self, message: Message, handler: Handler) -> Resumed:
        current_message.set(message)
        if message.body:
            args, kwargs = loads(message.body, message.buffers or ())
            coroutine = handler.function(self.instance, *args, **kwargs)
        else:
            coroutine = handler.function(self.instance)
        return Resumed(coroutine, coroutine.send(None))

    async def _live(self) -> None:
        task = self.task
        if self.state is CellState.STARTING and not await self.construct():
            return
        while await self._drain():
            if self.evidence is not None or self.task is not task:
                return  # stopped during a handler that had answered already, through its port, so that there was nothing to cancel
            if not self.overlapping:
                self.runtime.busy.discard(self)
            self._wake = wake = self.runtime.loop.create_future()
            cancelled = False
            try:
                await wake
            except asyncio.CancelledError:
                self._wake = None
                cancelled = True
                if self._handover is None:
                    if self.mailbox:
                        self._renew()
                    elif self.task is task:
                        self.task = None  # as when the loop is ending; should there be messages all the same, there will be another task
                    return
            if self._handover is not None:
                begun, self._handover = self._handover, None
                begun.cancelled = cancelled
                message = self.current
                assert message is not None
                try:
                    result = await begun
                except BaseException as error:
                    goes_on = self._raised(message, error)
                else:
                    goes_on = self._returned(message, result)
                    del result
                del message, begun  # or they would be kept while the actor is idle
                if not goes_on:
                    self._renew()
                    return

    async def _drain(self) -> bool:
        """Handle what is in the mailbox. False if this task must not go on."""
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
                    self._renew()
                    return False
                handlers = self.handlers  # others may watch them meanwhile
                continue
            self.current = message
            message.state = State.RUNNING
            current_message.set(message)
            try:
                if message.args is not None:
                    args, kwargs = message.args
                elif message.body:
                    args, kwargs = loads(message.body, message.buffers or ())
                else:
                    args, kwargs = (), {}
                result = await handler.function(instance, *args, **kwargs)
            except BaseException as error:
                goes_on = self._raised(message, error)
            else:
                goes_on = self._returned(message, result)
            if not goes_on:
                self._renew()
                return False
            handled += 1
            if not handled % YIELD_EVERY:
                await asyncio.sleep(0)
                handlers = self.handlers
        return True

    def _returned(self, message: Message, result: Any) -> bool:
        """A handler ended well: answer. False if its task was cancelled."""
        told_to_stop = message.state is State.STOPPING
        message.state = State.DONE
        message.args = None  # with the rest as in `finish`, which is too dear here
        if message.buffers is not None:
            message.finish()
        if message.request:
            message.origin.answer(message, result)
        if message.task is not None:
            return True
        if told_to_stop and self.current is not message:
            return False  # of a life that is over
        self.current = None
        if self.suspects:
            self.suspects.clear()
        return not told_to_stop

    def _raised(self, message: Message, error: BaseException) -> bool:
        """A handler raised: tell the caller, or fail. False if its task was, or may have been, cancelled, or has no more to do."""
        told_to_stop = message.state is State.STOPPING
        message.finish()
        if message.task is None:
            if self.current is not message:
                return False  # of a life that is over
            self.current = None
            self.suspects.clear()
        elif message not in self.overlapping:
            return True  # the same
        cancelled = isinstance(error, asyncio.CancelledError)
        if message.request:
            message.origin.refuse(message, self.why_cancelled(message, error) if isinstance(error, asyncio.CancelledError) else error)
            message.request = 0
        elif self.state is CellState.READY and not cancelled:
            self.fail(error, message.endpoint)
        return message.task is not None or not (told_to_stop or cancelled or self.state is not CellState.READY)

    def _renew(self) -> None:
        """This task was cancelled, so its next await might raise: leave the rest to a new one."""
        if self.task is not asyncio.current_task(self.runtime.loop):
            return  # it is of a life that is over
        self.task = None
        if self.state is CellState.READY:
            self.start()

    async def _handle(self, message: Message, handler: Handler | None) -> bool:
        """The general way for a message: threads, overlap, explicit ports, deadlines. False if this drain must not go on."""
        if handler is None:
            if message.endpoint == STOP:
                reason = bytes(message.body).decode()
                if self.returns:
                    self.suspend(f"stopped itself: {reason}" if reason else "stopped itself")
                    self.once_over(lambda: self.runtime.left(self, reason))
                else:
                    self.begin_stop(reason)
                return False
            self.current = message
            return self._raised(message, self.unknown_endpoint(message.endpoint))
        if message.deadline is not None:
            left = message.deadline - self.runtime.loop.time()
            if left <= 0:
                message.state = State.DONE
                if message.request:
                    message.origin.refuse(message, CallTimeout(f"{self.identity}.{message.endpoint} was not started before its deadline"))
                return True
            message.timer = self.runtime.loop.call_later(left + LATER_THAN_CALLER, self.expire, message)
        if handler.concurrent:
            context = self.context.copy()
            message.task = self.runtime.loop.create_task(self._overlap(message, handler), context=context)
            self.overlapping.add(message)
            following = self.handlers.get(self.mailbox[0].endpoint) if self.mailbox else None
            if following is None or not following.concurrent:
                await asyncio.sleep(0)  # it begins before anything that comes after it
            return True
        self.current = message
        message.state = State.RUNNING
        current_message.set(message)
        return await self._run(message, handler)

    async def _overlap(self, message: Message, handler: Handler) -> None:
        try:
            if message.state is State.QUEUED:  # else it was given up before it could begin
                message.state = State.RUNNING
                current_message.set(message)
                await self._run(message, handler)
        finally:
            self.overlapping.discard(message)
            if not self.overlapping and (self.task is None or self._wake is not None):
                self.runtime.busy.discard(self)

    async def _run(self, message: Message, handler: Handler) -> bool:
        try:
            args, kwargs = message.args or (loads(message.body, message.buffers or ()) if message.body else ((), {}))
            if handler.explicit_port:
                args = (self.behavior.port(message), *args)
            if handler.kind == SYNC:
                result = await self.own_thread().run(handler.function, (self.instance, *args), kwargs, message)
                if inspect.iscoroutine(result):  # of a coroutine function that a decorator has wrapped
                    result = await result
            else:
                result = await handler.function(self.instance, *args, **kwargs)
        except BaseException as error:
            return self._raised(message, error)
        finally:
            if message.timer is not None:
                message.timer.cancel()
        if handler.explicit_port:
            # The port answers, or has; until then the request stays open.
            told_to_stop = message.state is State.STOPPING
            message.finish()
            if message.task is None:
                if self.current is not message:
                    return False  # of a life that is over
                self.current = None
                self.suspects.clear()
            return message.task is not None or not told_to_stop
        return self._returned(message, result)

    def stop_next(self, reason: str) -> None:
        """Stop once the handler that runs has ended, before anything else is handled."""
        self.handle_next(STOP, reason.encode())

    def handle_next(self, endpoint: str, body: bytes = b"") -> None:
        message = Message(ITSELF, endpoint, 0, 0, body, None, None)
        message.cell = self
        self.mailbox.appendleft(message)
        if self._wake is not None:
            self._wake_up()
        elif self.task is None:
            self.start()

    def unknown_endpoint(self, name: str) -> AttributeError:
        known = ", ".join(sorted(name for name in self.handlers if not name.endswith(")")))
        return AttributeError(f"{self.identity.class_name} has no endpoint {name!r}; it has {known or 'none'}")

    def _inspect(self, message: Message, extras: dict[str, Any]) -> bool:
        """Deadline and chain of a message that has some; true if it only asks whether the actor is up."""
        if "r" in extras:
            if self.state is CellState.READY:
                message.origin.answer(message, None)
            else:
                self.probes.append(message)
            return True
        left = extras.get("d")
        if left is not None:
            message.deadline = self.runtime.loop.time() + left
        chain = extras.get("c")
        current = self.current
        if chain and current is not None and current.number and self.suspects.note(message, chain, self.key, current):
            self._look_soon()
        return False

    def look_for_deadlock(self) -> None:
        """Refuse queued messages for which the running handler waits, and which wait for it."""
        self.suspects.look(self.current, self.task, self.runtime)

    def _look_soon(self) -> None:
        """Once the step that is being made now, and what it has started, have come to rest."""
        loop = self.runtime.loop
        loop.call_soon(loop.call_soon, self.look_for_deadlock)
