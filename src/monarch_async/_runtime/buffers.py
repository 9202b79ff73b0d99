"""The owner's half of one-sided buffers: which memory of this process others may read and write.

Rules:

* Memory that is registered is held until it is dropped, the life of the actor that registered it is over, or the runtime closes.
* Another process of this host that is lent a registration accesses the memory by itself (`direct`), and does not ask again. So it is
  told when the registration is dropped, and the memory is let go only when it has answered that it has done with it, or has ended.
* Beside the memory lies a cookie, random bytes which the borrower knows. They are wiped before anything else of a drop, so that who
  finds them whole, behind what it has read or before it writes, has the right memory of the right process.
* What processes on other hosts read and write goes through messages, and is looked up each time.
* Large memory that is lent again and again gets large pages, in a thread and bit by bit: the kernel then copies it from process to process
  up to twice as fast. It costs as much as is gained with some eight copies.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from monarch_async._channel.memory import Memory, view_of
from monarch_async._channel.pages import HUGE, blocks, join
from monarch_async._runtime.asking import ask
from monarch_async._runtime.behavior import CellState
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Message
from monarch_async._runtime.copying import Copier
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import BufferGone, BufferMismatch, UsageError
from monarch_async.ids import ProcAddress

__all__ = ["COOKIE_SIZE", "Buffers", "Grant", "Registration"]

COOKIE_SIZE = 16
JOIN_FROM = 4 * HUGE
"""Memory of so many bytes gets large pages"""
JOIN_AFTER = 4
"""when it is lent for so many times."""
JOIN_PAUSE = 0.005
"""Seconds between two of them: whoever reads the memory, or touches new one, waits while one is made (0.6 ms)."""


class Grant(NamedTuple):
    """What a borrower has to know: the process, where in it the memory and its cookie lie, and what the cookie says."""

    pid: int
    address: int
    cookie_address: int
    cookie: bytes


Part = tuple[int, int, int]
"""Of a registered memory: its key, the offset, and how many bytes."""


class Users:
    """How many transfers use something, and the wait until none does."""

    __slots__ = ("_count", "_idle", "revoked", "stops")

    def __init__(self) -> None:
        self.stops: set[Callable[[], None]] = set()  # what ends transfers that can't look at `revoked`, as they wait for others
        self.revoked = False  # no transfer may go on
        self._count = 0
        self._idle: asyncio.Future[None] | None = None

    def enter(self) -> None:
        self._count += 1

    def leave(self) -> None:
        self._count -= 1
        if not self._count and self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    async def revoke(self) -> None:
        """Have those who look at `revoked` stop, and wait until all have left."""
        self.revoked = True
        for stop in list(self.stops):
            stop()
        if self._count:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)


class Registration(Users):
    """Memory that is registered."""

    __slots__ = ("borrowers", "cookie", "lent", "memory")

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.cookie = (ctypes.c_ubyte * COOKIE_SIZE)(*os.urandom(COOKIE_SIZE))
        self.borrowers: dict[str, ProcAddress] = {}
        self.lent = 0  # how often


class Buffers:
    """What this process has registered. Used on its loop only; `table` is what others ask of it."""

    def __init__(self, runtime: Runtime, copier: Copier) -> None:
        self._runtime = runtime
        self._copier = copier
        self._joining = asyncio.Lock()  # the pages of one memory at a time
        self._registered: dict[int, Registration] = {}
        self._of_life: dict[Cell, set[int]] = {}  # what the present life of an actor has registered
        runtime.on_peer_gone.append(self._peer_gone)
        runtime.tasks.start(self._clear_at_end(), name="holding registered memory")

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        return {"buffer_open": self.open, "buffer_read": self.read, "buffer_write": self.write, "buffer_drop": self.drop_for}

    def register(self, memory: Memory, cell: Cell | None) -> int:
        """Hold memory, for the life of an actor or else for that of this runtime; returns its key."""
        if self._runtime.closing:
            raise UsageError("no buffer can be made here any more: the runtime has ended")
        key = int.from_bytes(os.urandom(8), "little")
        if cell is not None:
            self._bind(key, cell)
        self._registered[key] = Registration(memory)
        return key

    def _bind(self, key: int, cell: Cell) -> None:
        if self._runtime.cells.get(cell.key) is not cell or cell.state is CellState.RESTARTING:
            raise UsageError(f"no buffer can be made by {cell.identity}: this life of it is over")
        keys = self._of_life.get(cell)
        if keys is None:
            keys = self._of_life[cell] = set()
            over: asyncio.Future[Any] = self._runtime.loop.create_future()
            cell.watchers += (over,)
            over.add_done_callback(lambda done: self._life_over(cell, done))
        keys.add(key)

    def _life_over(self, cell: Cell, over: asyncio.Future[Any]) -> None:
        cell.watchers = tuple(other for other in cell.watchers if other is not over)
        for key in self._of_life.pop(cell, ()):
            self._begin_drop(key)

    def find(self, key: int, *, write: bool = False, end: int = 0) -> Registration:
        """Raises `BufferGone`, and `BufferMismatch` for what is read-only or has not so many bytes."""
        registration = self._registered.get(key)
        if registration is None:
            raise BufferGone("it was dropped, or the actor that made it has ended")
        memory = registration.memory
        if why := memory.check():
            raise BufferGone(why)
        if write and memory.readonly:
            raise BufferMismatch("its memory is read-only")
        if end > memory.size:
            raise BufferMismatch(f"it has {memory.size} bytes, and byte {end - 1} was asked for")
        return registration

    def drop(self, key: int) -> asyncio.Future[None]:
        """Let memory go; done when nobody uses it any more. Nothing happens if it is gone."""
        return asyncio.shield(self._begin_drop(key))

    def _begin_drop(self, key: int) -> asyncio.Task[None]:
        return self._runtime.tasks.start(self._drop(key), name=f"dropping buffer {key:#x}")

    async def _drop(self, key: int) -> None:
        registration = self._registered.pop(key, None)
        if registration is None:
            return
        ctypes.memset(registration.cookie, 0, COOKIE_SIZE)
        for keys in self._of_life.values():
            keys.discard(key)  # the actor itself stays watched: it may well make another
        runtime = self._runtime
        answers = [ask(runtime, address, "buffer_revoke", runtime.me.uid, key) for address in registration.borrowers.values()]
        if answers:
            await asyncio.wait(answers)
        await registration.revoke()

    async def _clear_at_end(self) -> None:
        """When tasks are cancelled the runtime closes; those it has started have ended by then."""
        try:
            await self._runtime.loop.create_future()
        finally:
            self._registered.clear()
            self._of_life.clear()

    def _peer_gone(self, peer: Peer) -> None:
        for registration in self._registered.values():
            registration.borrowers.pop(peer.address.uid, None)

    # What others ask for.

    def open(self, message: Message, keys: Sequence[int], lend: bool) -> list[Grant]:
        """Are these here? With `lend`, what is to be known to access them from another process of this host."""
        found = [self.find(key) for key in keys]
        borrower = self._runtime.address_of(message.origin)
        if not lend or borrower is None:
            return []
        grants = []
        for key, registration in zip(keys, found, strict=True):
            registration.borrowers[borrower.uid] = borrower
            cookie = registration.cookie
            grants.append(Grant(os.getpid(), registration.memory.address, ctypes.addressof(cookie), bytes(cookie)))
            registration.lent += 1
            if registration.lent == JOIN_AFTER and registration.memory.size >= JOIN_FROM:
                pages = blocks(registration.memory.address, registration.memory.size)
                self._runtime.tasks.start(self._join(key, pages), name="joining the pages of registered memory")
        return grants

    async def _join(self, key: int, pages: Sequence[int]) -> None:
        """Give memory large pages."""
        async with self._joining:
            for page in pages:
                if not await self._make(key, page):
                    break
                await asyncio.sleep(JOIN_PAUSE)

    async def _make(self, key: int, page: int) -> bool:
        """One of them; False if no more are to be made. What was dropped isn't held between two of them: it may be unmapped then."""
        registration = self._registered.get(key)
        if registration is None:
            return False
        registration.enter()
        try:
            return await self._copier.do(partial(join, page))
        finally:
            registration.leave()

    def read(self, message: Message, parts: Sequence[Part]) -> list[pickle.PickleBuffer]:
        """Parts of memories. They are copied when the answer is sent, which is at once."""
        return [pickle.PickleBuffer(view) for view in self._views(parts, write=False)]

    def write(self, message: Message, parts: Sequence[Part], data: Sequence[Any]) -> None:
        """Overwrite parts of memories: all, or none if any can't be."""
        for view, new in zip(self._views(parts, write=True), data, strict=True):
            view[:] = new

    def _views(self, parts: Sequence[Part], *, write: bool) -> list[memoryview]:
        found = [self.find(key, write=write, end=offset + size).memory for key, offset, size in parts]
        return [view_of(memory, offset, size) for memory, (_, offset, size) in zip(found, parts, strict=True)]

    async def drop_for(self, message: Message, key: int) -> None:
        """Let memory go; the answer comes when nobody uses it any more."""
        await self.drop(key)
