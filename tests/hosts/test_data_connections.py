"""One-sided copies between hosts over connections of their own: that they are used, and what happens when those fail."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from monarch_async import (
    ActorDied,
    BufferGone,
    BufferMismatch,
    Future,
    MeshFailure,
    RDMAAction,
    RDMABuffer,
    attach_to_workers,
    endpoint,
    shutdown,
)
from monarch_async._core import seal
from monarch_async._core.seal import POLY1305, SHA256
from monarch_async._runtime import data, transfers
from monarch_async._runtime.connect import data_takers
from monarch_async._runtime.data import DataConnections
from monarch_async.ambient import current_runtime
from tests.api.owners import Owner, halves, pattern
from tests.api.waiting import until
from tests.hosts.workers import make_key, worker

SIZE = (40 << 20) + 77
ENDLESS = 1000
"""So many copies of `SIZE` bytes take half a minute."""


class Far(Owner):
    """An owner on another host, and what is known there of data connections."""

    @endpoint
    async def served(self) -> int:
        """How many connections it has accepted, and has."""
        return len(connections()._accepted)

    @endpoint
    async def without_poly1305(self) -> None:
        """From now on it is as if this process had no such libcrypto."""
        seal.available = lambda: False  # type: ignore[attr-defined]

    @endpoint
    async def refuse(self) -> None:
        """Take no data connections from now on."""
        halves()
        data_takers.pop(current_runtime())

    @endpoint
    async def break_connections(self) -> None:
        """As a fault of the network would."""
        for channel in connections()._accepted.values():
            channel.pipe.shut()

    @endpoint
    async def touch(self, buffer: RDMABuffer) -> None:
        """Write to its memory until cancelled."""
        memory = memoryview(self.memory[buffer])
        step = len(memory) // 64
        for number in itertools.count():
            start = number % 64 * step
            memory[start : start + step] = bytes([number % 255 + 1]) * step
            await asyncio.sleep(0)

    @endpoint
    async def write_on(self, buffer: RDMABuffer, size: int) -> None:
        """Into another's buffer, until that is stopped."""
        await (await endless(buffer, bytearray(size), write=True))

    @endpoint
    async def write(self, buffer: RDMABuffer, size: int) -> None:
        """Into another's buffer."""
        await buffer.write_from(pattern(size)[::-1])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A worker's address and the file of its key.

    Shared, as a worker takes one job after the other and nothing of a job may be left there: each test has an agent and processes of its
    own, which are looked for after it.
    """
    key = make_key(tmp_path_factory.mktemp("host"))
    with worker("--key-file", key) as (url, _):
        yield url, key


@pytest.fixture
async def far(host: tuple[str, str]) -> AsyncIterator[Any]:
    """An actor on another host."""
    url, key = host
    yield attach_to_workers([url], key=key).spawn_procs().slice(hosts=0).spawn("far", Far)
    await shutdown()


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def channels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many connections there are for one owner."""
    monkeypatch.setattr(data, "CHANNELS", request.param)
    return int(request.param)


def connections() -> DataConnections:
    return halves()[1]._data


def made() -> list[data.Channel]:
    """What this process has dialed and can use."""
    found = [data._made(dialing) for dialing in connections()._dialed.values()]
    return [channel for channel in found if channel is not None and not channel.broken]


async def endless(buffer: RDMABuffer, target: bytearray, write: bool = False) -> Future[None]:
    """A batch that goes on until it is stopped; bytes are on their way."""
    action = RDMAAction()
    for _ in range(ENDLESS):
        if write:
            action.write_from(buffer, target)
        else:
            action.read_into(buffer, target)
    copying = action.submit()
    await until(lambda: copying.done() or any(channel.busy for channel in made()))
    return copying


async def test_both_ways(far: Any, channels: int) -> None:
    """Much is read and written over data connections, which stay; a little is not worth one."""
    buffer, little = await far.make.call_one(pattern(SIZE)), await far.make.call_one(pattern(5000))
    small = bytearray(5000)
    await little.read_into(small)
    assert pattern(5000) == small
    assert [] == made()
    target = bytearray(SIZE)
    await buffer.read_into(target)
    assert pattern(SIZE) == target
    await buffer.write_from(target[::-1])
    assert pattern(SIZE)[::-1] == await far.content.call_one(buffer)
    await buffer.read_into(target)
    assert pattern(SIZE)[::-1] == target
    assert (channels, channels) == (len(made()), await far.served.call_one())
    assert [POLY1305] * channels == [channel.pipe._receive_seal._digest for channel in made()]


async def test_read_and_written_from_the_other_host(far: Any) -> None:
    """A process there copies from and to memory of the program."""
    memory = bytearray(pattern(SIZE))
    mine = RDMABuffer(memory)
    assert pattern(SIZE) == await far.read.call_one(mine)
    await far.write.call_one(mine, SIZE)
    assert pattern(SIZE)[::-1] == memory
    assert connections()._accepted
    await mine.drop()


async def test_without_poly1305(far: Any) -> None:
    """Where one side does not have it both use SHA-256, and all goes well."""
    await far.without_poly1305.call_one()
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(SIZE)
    await buffer.read_into(target)
    assert pattern(SIZE) == target
    assert [SHA256] == list({channel.pipe._receive_seal._digest for channel in made()})


async def test_many_parts(far: Any) -> None:
    """Thousands of small parts, of several buffers, with empty ones among them, each get to their places."""
    buffers = [await far.make.call_one(pattern(1 << 20)) for _ in range(3)]
    targets = [bytearray(number % 997) for number in range(6000)]
    action = RDMAAction()
    for number, target in enumerate(targets):
        action.read_into(buffers[number % 3], target, offset=number)
    await action.submit()
    assert made()
    whole = pattern(1 << 20)
    assert all(whole[number : number + len(target)] == target for number, target in enumerate(targets))


async def test_what_does_not_fit_is_refused(far: Any) -> None:
    """Memory that may not be written to, and a buffer that is gone: said as ever, and the next copy gets a connection again."""
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(SIZE)
    await buffer.read_into(target)
    gone = await far.make.call_one(pattern(SIZE))
    await gone.drop()
    with pytest.raises(BufferGone, match="by tcp failed: it was dropped"):
        await gone.read_into(target)
    with pytest.raises(BufferGone, match="by tcp failed: it was dropped"):
        await gone.write_from(target)
    with pytest.raises(BufferMismatch, match="read-only"):
        await (await far.make_readonly.call_one(pattern(SIZE))).write_from(target)
    target[:] = bytes(SIZE)
    await buffer.read_into(target)
    assert pattern(SIZE) == target
    assert len(made()) == await far.served.call_one()


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
async def test_a_lost_connection_fails_nothing(far: Any, write: bool) -> None:
    """One that breaks in the middle: the copy is made all the same, and the next one has a connection again."""
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(pattern(SIZE))
    action = RDMAAction()
    for _ in range(5):
        if write:
            action.write_from(buffer, target)
        else:
            action.read_into(buffer, target)
    copying = action.submit()
    await until(lambda: any(channel.busy for channel in made()))
    await far.break_connections.call_one()
    await copying
    assert pattern(SIZE) == target == await far.content.call_one(buffer)
    assert [] == made()
    await buffer.read_into(target)
    assert made()


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
async def test_dropped_in_the_middle(far: Any, write: bool) -> None:
    """The copy fails with `BufferGone`, and when the drop is over nobody uses the memory."""
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(SIZE)
    copying = await endless(buffer, target, write)
    await buffer.drop()
    with pytest.raises(BufferGone, match="dropped"):
        await copying
    target[:] = b"y" * SIZE
    await far.rank.call_one()
    assert target.count(b"y") == SIZE


async def test_dropped_while_its_accessor_is_frozen(far: Any) -> None:
    """In the middle of writing to it: the drop does not wait for more, and the accessor hears of it when it goes on."""
    pid, mine = await far.pid.call_one(), RDMABuffer(bytearray(SIZE))
    writing = far.write_on.call_one(mine, SIZE)
    await until(lambda: any(channel.busy for channel in connections()._accepted.values()))
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(2):
            await mine.drop()
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(BufferGone, match="dropped"):
        await writing


async def test_cancelled(far: Any, channels: int) -> None:
    """When that is told nothing more is written, no thread is at work, and the next copy goes well."""
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(SIZE)
    copying = await endless(buffer, target)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    target[:] = b"y" * SIZE
    await far.rank.call_one()
    assert target.count(b"y") == SIZE
    assert not any(channel.busy for channel in made())
    await buffer.read_into(target)
    assert pattern(SIZE) == target


async def test_given_up_while_the_owner_is_idle(far: Any) -> None:
    """As a read is that is cancelled when all has been sent: the owner keeps no connection that is over once there is another."""
    buffer, target = await far.make_zeros.call_one(3 << 20), bytearray(3 << 20)
    for _ in range(3):
        for channel in made():
            channel.shut()
        await buffer.read_into(target)
        async with asyncio.timeout(10.0):
            while len(made()) != await far.served.call_one():
                pass  # its loop may not have heard yet that the thread has sent all


async def test_who_waits_behind_one_that_is_cancelled(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets a connection of its own, and does not go by messages."""
    asked: list[object] = []
    monkeypatch.setattr(transfers._Messages, "_ask", lambda self, *args: asked.append(args))
    buffer, target, other = await far.make.call_one(pattern(SIZE)), bytearray(SIZE), bytearray(SIZE)
    copying = await endless(buffer, target)
    behind = [buffer.read_into(other), buffer.read_into(bytearray(SIZE))]
    await until(lambda: any(channel.lock._waiters for channel in made()))
    copying.cancel()
    await asyncio.gather(*behind)
    assert pattern(SIZE) == other
    assert [] == asked


async def test_the_owner_is_killed(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a copy, which then fails with what is known of its end."""
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(SIZE)
    failures: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", failures.append)
    pid = await far.pid.call_one()
    copying = await endless(buffer, target)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BufferGone, match=r"its process is gone: .*SIGKILL"):
        await copying
    with pytest.raises(ActorDied):
        await far.rank.call_one()
    assert {} == connections()._dialed
    await until(lambda: failures)


async def test_memory_that_changes_meanwhile(far: Any) -> None:
    """Who reads while the owner writes gets old bytes and new ones; no error, and no link is lost."""
    buffer, target = await far.make_zeros.call_one(SIZE), bytearray(SIZE)
    writing = far.touch.call_one(buffer)
    for _ in range(10):
        await buffer.read_into(target)
        assert any(target)
    assert {buffer._ref.owner.uid} == connections()._changing
    assert made()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert 0 == await far.rank.call_one()


async def test_a_source_that_changes_meanwhile(far: Any) -> None:
    """It must not; but all that comes of it is that old and new bytes are written."""
    buffer, source = await far.make_zeros.call_one(SIZE), bytearray(SIZE)
    over = threading.Event()

    def touch() -> None:
        view, step = memoryview(source), SIZE // 64
        for number in itertools.count():
            if over.is_set():
                return
            start = number % 64 * step
            view[start : start + step] = bytes([number % 255 + 1]) * step

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        for _ in range(10):
            await buffer.write_from(source)
    finally:
        over.set()
        await asyncio.to_thread(thread.join)
    assert {buffer._ref.owner.uid} == connections()._changing
    assert made()
    assert any(await far.content.call_one(buffer))


async def test_where_there_are_none(far: Any) -> None:
    """An owner that takes none is asked once, and copies go by messages."""
    await far.refuse.call_one()
    buffer, target = await far.make.call_one(pattern(SIZE)), bytearray(SIZE)
    for _ in range(2):
        target[:] = bytes(SIZE)
        await buffer.read_into(target)
        assert pattern(SIZE) == target
    assert [] == made()
    assert not connections().reaches(buffer._ref.owner)
