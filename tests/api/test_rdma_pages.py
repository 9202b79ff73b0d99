"""Memory that is read again and again gets large pages; nobody sees anything else of it."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from monarch_async import Actor, RDMABuffer, endpoint, this_host
from monarch_async._channel.memory import memory_of
from monarch_async._channel.pages import HUGE, blocks
from monarch_async._runtime import buffers
from monarch_async._runtime.buffers import JOIN_AFTER, JOIN_FROM, Buffers
from monarch_async.ambient import current_runtime
from monarch_async.rdma import _halves_of
from tests.channel.large_pages import can_join, large_pages

SIZE = JOIN_FROM + HUGE


class Watched(Actor):
    """Owns a memory and tells of its pages."""

    @endpoint
    async def make(self, content: bytes) -> RDMABuffer:
        self.memory = bytearray(content)
        return RDMABuffer(self.memory, backend="cma")

    @endpoint
    async def content(self) -> bytes:
        return bytes(self.memory)

    @endpoint
    async def joined(self) -> int:
        """Bytes in large pages around it, once all has been made that was begun."""
        async with held()._joining:
            return large_pages(memory_of(self.memory).address)

    @endpoint
    async def another_has_its_turn(self) -> None:
        """From now on, and for good."""
        await held()._joining.acquire()

    @endpoint
    async def drop_and_grow(self, buffer: RDMABuffer) -> int:
        await buffer.drop()
        self.memory.append(0)
        return len(self.memory)

    @endpoint
    async def drop_while_joining(self) -> int:
        """Drop a buffer of it as soon as the first page is being made; how many were made after."""
        made: list[int] = []
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def watched(block: int) -> bool:
            made.append(block)
            loop.call_soon_threadsafe(begun.set)
            return True

        setattr(buffers, "join", watched)  # noqa: B010
        buffer, registered = RDMABuffer(self.memory), held()
        pages = blocks(memory_of(self.memory).address, len(self.memory))
        joining = asyncio.ensure_future(registered._join(buffer._ref.key, pages))
        await begun.wait()
        await buffer.drop()
        before = len(made)
        await joining
        return len(made) - before


def held() -> Buffers:
    """What this process has registered."""
    return _halves_of(current_runtime())[0]


@pytest.fixture
async def owner() -> Any:
    return this_host().spawn_procs().spawn("owner", Watched)


async def test_large_pages(owner: Any) -> None:
    """After some copies, and not after the first ones; what is read and written before, meanwhile and after is right."""
    if not can_join():
        pytest.skip("this system joins no pages when it is asked to")
    content = os.urandom(SIZE)
    buffer = await owner.make.call_one(content)
    target = bytearray(SIZE)
    at_first = await owner.joined.call_one()  # none, unless the system makes them by itself
    for count in range(2 * JOIN_AFTER):
        if count == JOIN_AFTER - 1:
            assert at_first == await owner.joined.call_one()
        target[:] = bytes(SIZE)
        await buffer.read_into(target)
        assert content == target
    assert await owner.joined.call_one() >= HUGE
    await buffer.write_from(content[::-1])
    assert content[::-1] == await owner.content.call_one()


async def test_a_drop_ends_it(owner: Any) -> None:
    """What is dropped while its pages are joined gets no more than the one that is being made."""
    await owner.make.call_one(bytes(32 * HUGE))
    assert 0 == await owner.drop_while_joining.call_one()


async def test_who_waits_for_its_turn_holds_nothing(owner: Any) -> None:
    """What is dropped before its pages come to be joined is its owner's alone: it may grow."""
    buffer = await owner.make.call_one(bytes(SIZE))
    await owner.another_has_its_turn.call_one()
    target = bytearray(SIZE)
    for _ in range(JOIN_AFTER):
        await buffer.read_into(target)
    assert SIZE + 1 == await owner.drop_and_grow.call_one(buffer)
