"""Ports: one-way channels for values, which can be sent along in messages.

``port, receiver = Channel.open()`` makes one in this process. A `Port` may be sent to other actors, who `send` to it; what arrives is
taken from the `PortReceiver`, in the order in which each sender sent it.

Rules: a port has a bound like a mailbox, kept by credit, past which an un-awaited `send` raises `ChannelFull`. Once its receiver is known
to be closed, `send` raises `PortClosed`; once its process is known to be gone, `ActorDied`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, NoReturn, Self, TypeVar

from monarch_async._core.codec import copy_value, dumps, is_plain
from monarch_async._core.events import Evidence
from monarch_async._core.faults import decode_fault, encode_fault
from monarch_async._runtime.context import Message, Origin, State
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import current_runtime, on_loop
from monarch_async.errors import PortClosed
from monarch_async.future import Future
from monarch_async.ids import ProcAddress, new_actor_key
from monarch_async.sent import Sent

__all__ = ["Channel", "Port", "PortReceiver", "ResponsePort"]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Port(Generic[T_contra]):
    """The sending end. Picklable; usable from any thread of a process that has a runtime."""

    def __init__(self, runtime: Runtime, address: ProcAddress, key: int, rank: int, limit: int, once: bool = False) -> None:
        self._runtime = runtime
        self._address = address
        self._once = once  # it takes a single value, so there is nothing to wait for afterwards
        self._key = key
        self._rank = rank
        self._limit = limit

    def send(self, value: T_contra) -> Sent:
        """Send a value; awaiting what this returns waits for room.

        Raises `ChannelFull`, `PortClosed`, and `TypeError` for what can't be sent.
        """
        if self._address.uid == self._runtime.me.uid:
            copy = value if is_plain(value) else copy_value(value)
            return self._post(self._here, copy, None)
        body, buffers = dumps(value) if value is not None else (b"", [])
        return self._post(self._away, body, buffers, None)

    def exception(self, error: BaseException) -> Sent:
        """Send an error, which is raised where a value would have been received."""
        fault = encode_fault(error, actor="")
        if self._address.uid == self._runtime.me.uid:
            return self._post(self._here, None, decode_fault(fault))
        return self._post(self._away, b"", [], fault)

    def with_rank(self, rank: int) -> Self:
        """The same port, whose values say that they come from `rank`."""
        return type(self)(self._runtime, self._address, self._key, rank, self._limit, self._once)

    def _post(self, function: Callable[..., Sent], *args: Any) -> Sent:
        runtime = self._runtime
        if threading.get_ident() == runtime.thread:
            return function(*args)
        sent: asyncio.Future[Sent] = asyncio.Future(loop=runtime.loop)
        there = threading.Event()

        def post() -> None:
            try:
                sent.set_result(function(*args))
            except Exception as error:
                sent.set_exception(error)
            there.set()

        runtime.loop.call_soon_threadsafe(post)
        there.wait()
        return sent.result()

    def _here(self, value: Any, error: BaseException | None) -> Sent:
        runtime = self._runtime
        receive = runtime.ports.get(self._key)
        if receive is None:
            raise PortClosed("the port is closed: its receiver takes nothing more")
        lane = runtime.local_lane(self._key, f"port {self._key:#x}", self._rank, self._limit)
        lane.check(0)
        lane.messages += 1
        receive(runtime.local, self._rank, value, error, 0)
        return Sent([] if self._once else [lane])

    def _away(self, body: bytes, buffers: list[memoryview], fault: bytes | None) -> Sent:
        runtime = self._runtime
        peer = runtime.peer(self._address)
        lane = peer.lane(self._key, f"port {self._key:#x}", self._rank, self._limit, runtime.options.mailbox_bytes)
        sent = Sent([] if self._once else [lane])
        if not lane.push(self._rank, body, buffers, fault):
            sent.fail(runtime, lane, "send")
        if self._once and not lane.closed:
            peer.lanes.pop(self._key, None)
        return sent

    def __reduce__(self) -> tuple[Any, ...]:
        return _port, (self._address, self._key, self._rank, self._limit, self._once)

    def __repr__(self) -> str:
        return f"<Port {self._key:#x} of {self._address}>"


def _port(address: ProcAddress, key: int, rank: int, limit: int, once: bool) -> Port[Any]:
    return Port(current_runtime(), address, key, rank, limit, once)


class PortReceiver(Generic[T]):
    """The receiving end. Stays in its process. Dropping it closes it, once nothing it was asked for is awaited any more."""

    def __init__(self, runtime: Runtime, key: int, limit: int, *, once: bool, ranked: bool) -> None:
        self._runtime = runtime
        self._key = key
        self._limit = limit
        self._once = once
        self._ranked = ranked
        self._arrived: deque[tuple[Origin, int, Any, BaseException | None, int]] = deque()
        self._waiting: deque[Future[T]] = deque()
        sink = weakref.WeakMethod(self._receive)

        def receive(origin: Origin, rank: int, value: Any, error: BaseException | None, size: int) -> None:
            method = sink()
            if method is not None:
                method(origin, rank, value, error, size)
            else:  # it was dropped just now
                origin.credit(key, 1, size)

        runtime.ports[key] = receive

    def recv(self) -> Future[T]:
        """The next value; `PortClosed` once the receiver is closed and empty. From any thread."""
        future: Future[T] = Future(loop=self._runtime.loop)
        future.runtime = self._runtime
        future.keeps = self
        if threading.get_ident() == self._runtime.thread:
            self._wait(future)
        else:
            self._runtime.loop.call_soon_threadsafe(self._wait, future)
        return future

    def ranked(self) -> PortReceiver[tuple[int, T]]:
        """The same receiver, giving each value with the rank of its sender: ``(rank, value)``."""
        self._ranked = True
        return self  # type: ignore[return-value]

    def close(self) -> None:
        """Take nothing more: senders will get `PortClosed`, and what was not received becomes a dead letter. From any thread."""
        on_loop(self._runtime, self._close)

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)  # the constructor may have failed
        if runtime is not None and self._key in runtime.ports and not runtime.loop.is_closed():
            runtime.loop.call_soon_threadsafe(_drop, runtime, self._key, self._arrived)

    def _close(self) -> None:
        _drop(self._runtime, self._key, self._arrived)
        for future in self._waiting:
            future.fail(0, PortClosed("the port was closed"))
        self._waiting.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PortReceiver stays where it was opened: send the Port, and open a Channel where the values are wanted")

    def __aiter__(self) -> AsyncIterator[T]:
        return self._values()

    async def _values(self) -> AsyncIterator[T]:
        while True:
            try:
                yield await self.recv()
            except PortClosed:
                return

    def __len__(self) -> int:
        """How many values wait to be received."""
        return len(self._arrived)

    def _wait(self, future: Future[T]) -> None:
        if self._arrived:
            self._give(future, *self._arrived.popleft())
        elif self._key not in self._runtime.ports:
            future.fail(0, PortClosed("the port is closed"))
        else:
            self._waiting.append(future)

    def _receive(self, origin: Origin, rank: int, value: Any, error: BaseException | None, size: int) -> None:
        if self._once:
            _forget(self._runtime, self._key)
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                self._give(future, origin, rank, value, error, size)
                return
        self._arrived.append((origin, rank, value, error, size))

    def _give(self, future: Future[T], origin: Origin, rank: int, value: Any, error: BaseException | None, size: int) -> None:
        origin.credit(self._key, 1, size)
        if error is not None:
            future.fail(0, error)
        else:
            future.settle(0, (rank, value) if self._ranked else value)


def _forget(runtime: Runtime, key: int) -> None:
    """A port takes nothing more."""
    runtime.ports.pop(key, None)
    lane = runtime.local_lanes.pop(key, None)
    if lane is not None:
        lane.reset()


def _drop(runtime: Runtime, key: int, arrived: deque[tuple[Origin, int, Any, BaseException | None, int]]) -> None:
    """A port takes nothing more, and what it has taken is not wanted. Whoever waits for room shall find that out."""
    _forget(runtime, key)
    for origin, _, _, _, size in arrived:
        origin.credit(key, 1, size)
        runtime.dead_letter(f"port {key:#x}", "send", Evidence("the port was closed"))
    arrived.clear()


class Channel(Generic[T]):
    """Makes ports: ``Channel.open()``, or ``Channel[int].open()`` for the sake of types."""

    @classmethod
    def open(cls, once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """A port of this process and its receiver; with `once` it takes a single value."""
        return cls._open(once, False)

    @classmethod
    def open_ranked(cls, once: bool = False) -> tuple[Port[T], PortReceiver[tuple[int, T]]]:
        """The same, with the rank of the sender beside each value."""
        return cls._open(once, True)

    @classmethod
    def _open(cls, once: bool, ranked: bool) -> tuple[Port[T], PortReceiver[Any]]:
        runtime = current_runtime()
        key = new_actor_key()
        limit = runtime.options.mailbox_messages
        receiver: PortReceiver[Any] = PortReceiver(runtime, key, limit, once=once, ranked=ranked)
        return Port(runtime, runtime.me, key, 0, limit, once), receiver


class ResponsePort(Port[T_contra]):
    """Answers one call, once. What is never answered because the port was dropped is answered with `PortClosed`."""

    def __init__(self, message: Message) -> None:
        runtime = message.cell.runtime
        super().__init__(runtime, runtime.me, 0, 0, runtime.options.mailbox_messages)
        self._message: Message | None = message

    def send(self, value: T_contra) -> Sent:
        message = self._take()
        return self._post(self._answer, message, value)

    def exception(self, error: BaseException) -> Sent:
        message = self._take()
        return self._post(self._refuse, message, error)

    def _take(self) -> Message:
        message, self._message = self._message, None
        if message is None:
            raise PortClosed("this call has been answered")
        return message

    def _answer(self, message: Message, value: Any) -> Sent:
        if message.state is not State.CANCELLED:
            message.state = State.DONE
            if message.request:
                message.origin.answer(message, value)
                message.request = 0
        return Sent([])

    def _refuse(self, message: Message, error: BaseException) -> Sent:
        if message.state is not State.CANCELLED:
            message.state = State.DONE
            if message.request:
                message.origin.refuse(message, error)
                message.request = 0
        return Sent([])

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent elsewhere, it becomes a port of this process that answers the call when something arrives."""
        message = self._take()
        runtime = self._runtime
        key = new_actor_key()

        def forward(origin: Origin, rank: int, value: Any, error: BaseException | None, size: int) -> None:
            _forget(runtime, key)
            origin.credit(key, 1, size)
            if error is None:
                self._answer(message, value)
            else:
                self._refuse(message, error)

        runtime.ports[key] = forward
        return _port, (runtime.me, key, self._rank, self._limit, True)

    def __del__(self) -> None:
        message = getattr(self, "_message", None)  # the constructor may have failed
        if message is not None and message.request and not self._runtime.loop.is_closed():
            error = PortClosed(f"{message.cell.identity}.{message.endpoint} dropped its response port without an answer")
            self._runtime.loop.call_soon_threadsafe(self._refuse, message, error)
