"""How buffers and copies end: by dropping, with their actor, with their process, by cancellation. And that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import weakref
from typing import Any

import numpy
import pytest

from monarch_async import (
    Actor,
    BufferGone,
    CallTimeout,
    MeshFailure,
    ProcMesh,
    RDMAAction,
    RDMABuffer,
    Restart,
    UsageError,
    endpoint,
    shutdown,
    this_host,
    this_proc,
)
from monarch_async.rdma import _buffer
from tests.api.lending_actors import lending_here
from tests.api.owners import Owner, halves, pattern
from tests.api.waiting import until

SIZE = 64 << 20
ENDLESS = 2000
"""So many copies of `SIZE` bytes take minutes."""
LAST = 300_000
"""More than is copied at once."""


class Endless:
    """A batch that goes on for minutes, whose last copy goes to `last`."""

    def __init__(self, buffer: RDMABuffer) -> None:
        self.target = bytearray(buffer.size)
        self.last = bytearray(b"x" * LAST)
        self.action = RDMAAction()
        for _ in range(ENDLESS):
            self.action.read_into(buffer, self.target)
        self.action.read_into(buffer, self.last, size=LAST)
        self.done = self.action.submit()

    async def begun(self) -> None:
        """Bytes are being copied."""
        await until(lambda: self.target[4])

    def rests(self) -> bool:
        """Whether nobody writes to the target."""
        self.target[:] = bytes(len(self.target))
        time.sleep(0.02)
        return not any(self.target[::4096]) and self.last == b"x" * LAST


@pytest.fixture(params=["ordinary", "shared"])
def memory(request: pytest.FixtureRequest) -> str:
    """What kind of memory the owner's is; in quick runs `conftest` leaves out shared memory where it is copied as any other."""
    kind: str = request.param
    return kind


async def test_a_copy_is_cancelled(owner: Any, backend: str, memory: str) -> None:
    """When the awaiting task hears of it no more is written; the buffer can be used again."""
    buffer = await owner.make.call_one(pattern(SIZE), backend, memory == "shared")
    endless = Endless(buffer)
    await endless.begun()
    assert endless.done.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless.done
    assert endless.rests()
    assert not endless.done.cancel()
    endless = Endless(buffer)
    await endless.begun()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await endless.done
    assert endless.rests()
    await buffer.read_into(endless.target)
    assert pattern(SIZE) == endless.target


async def test_dropped_while_it_is_copied(owner: Any, backend: str, memory: str) -> None:
    """The copy fails, and the drop is done when it has come to rest. Neither side keeps anything of it."""
    buffer = await owner.make.call_one(pattern(SIZE), backend, memory == "shared")
    endless = Endless(buffer)
    await endless.begun()
    await buffer.drop()
    with pytest.raises(BufferGone, match=f"by {backend} failed: it was dropped"):
        await endless.done
    assert endless.rests()
    buffers, transfers = halves()
    assert 0 == await owner.held.call_one()
    assert ({}, {}) == (buffers._registered, transfers._leases._leases)


@pytest.mark.parametrize("backend", ["cma", "segment", "tcp"])
async def test_the_owner_is_killed_while_it_is_copied(owner: Any, backend: str, memory: str, failures: list[MeshFailure]) -> None:
    """SIGKILL: the copy fails within two seconds, saying so, and so does the next; dropping the buffer is nothing."""
    buffer = await owner.make.call_one(pattern(SIZE), backend, memory == "shared")
    pid = await owner.pid.call_one()
    endless = Endless(buffer)
    await endless.begun()
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BufferGone, match=f"by {backend} failed: its process is gone: .*SIGKILL") as caught:
        await endless.done
    assert time.monotonic() - start < 2.0
    assert backend == caught.value.backend
    assert endless.rests()
    with pytest.raises(BufferGone, match="SIGKILL"):
        await buffer.write_from(endless.target)
    await buffer.drop()
    assert {} == halves()[1]._leases._leases


async def test_what_was_seen_is_not_kept(pair: ProcMesh) -> None:
    """Once a copy from shared memory has ended, well or not, its owner's next user can have that."""
    owner = pair.slice(gpus=0).spawn("owner", Owner)
    buffer = await owner.make.call_one(pattern(SIZE), None, True)
    assert "segment" == buffer.backend
    await buffer.read_into(bytearray(SIZE))
    endless = Endless(buffer)
    await endless.begun()
    await buffer.drop()
    with pytest.raises(BufferGone, match="by segment failed: it was dropped"):
        await endless.done
    await until(lambda: not lending_here().borrowing.leases)


async def test_with_its_actor(pair: ProcMesh, backend: str) -> None:
    """What an actor has made ends with it, and not what another of the same process has."""
    place = this_proc() if backend == "local" else pair.slice(gpus=0)
    first, second = place.spawn("first", Owner), place.spawn("second", Owner)
    mine, others = await first.make.call_one(b"mine", backend), await second.make.call_one(b"others", backend)
    threaded = await first.make_in_thread.call_one(b"from a thread")
    target = bytearray(4)
    await mine.read_into(target)
    assert 3 == await second.held.call_one()
    await first.stop()
    with pytest.raises(BufferGone, match="the actor that made it has ended"):
        await mine.read_into(target)
    with pytest.raises(BufferGone, match="the actor that made it has ended"):
        await threaded.read_into(bytearray(13))
    target = bytearray(6)
    await others.read_into(target)
    assert b"others" == target
    assert 1 == await second.held.call_one()


async def test_a_life_that_is_over(pair: ProcMesh, failures: list[MeshFailure]) -> None:
    """A restarted actor's buffers were of the life before; the new life makes new ones."""
    owner = pair.slice(gpus=0).spawn("owner", Owner, restart=Restart(max_restarts=1, within=60.0))
    before = await owner.make.call_one(b"before")
    await owner.boom.broadcast()
    after = await owner.make.call_one(b"after")
    with pytest.raises(BufferGone):
        await before.read_into(bytearray(6))
    target = bytearray(5)
    await after.read_into(target)
    assert b"after" == target
    assert 1 == await owner.held.call_one()


class Straggler(Actor):
    """Makes a buffer when its life is over."""

    @endpoint
    async def leave(self) -> None:
        """Leave a task behind."""
        told.append(asyncio.get_running_loop().create_future())
        left.append(asyncio.create_task(self._later()))

    async def _later(self) -> None:
        await told[0]
        RDMABuffer(bytearray(1))


left: list[asyncio.Task[None]] = []
told: list[asyncio.Future[None]] = []


async def test_code_of_an_actor_that_has_ended() -> None:
    """It can make no buffer, which nothing would ever drop."""
    straggler = this_proc().spawn("straggler", Straggler)
    await straggler.leave.call_one()
    await straggler.stop()
    told[0].set_result(None)
    with pytest.raises(UsageError, match="this life of it is over"):
        await left.pop()
    told.clear()


async def test_a_restarted_process(failures: list[MeshFailure]) -> None:
    """A buffer of a process that was started again is gone, however it is asked for, also by one who never had to do with the first."""
    procs = this_host().spawn_procs({"gpus": 2}, restart=Restart(max_restarts=1, within=60.0))
    owner = procs.slice(gpus=0).spawn("owner", Owner)
    other = procs.slice(gpus=1).spawn("other", Owner)
    buffers = [await owner.make.call_one(b"of the first life", backend) for backend in ("cma", "segment", "tcp")]
    pid = await owner.pid.call_one()
    os.kill(pid, signal.SIGKILL)
    for buffer in buffers:
        with pytest.raises(BufferGone):
            await buffer.read_into(bytearray(17))
        with pytest.raises(BufferGone):
            await other.read.call_one(buffer)


async def test_memory_is_held_until_it_is_dropped() -> None:
    """The registration holds the array, though the buffer itself is forgotten; a drop, or the end of the runtime, lets go of it."""
    array = numpy.ones(1000)
    there = weakref.ref(array)
    ref = RDMABuffer(array)._ref
    del array
    assert there() is not None
    assert [ref.key] == list(halves()[0]._registered)
    await _buffer(ref).drop()
    assert there() is None
    array = numpy.ones(1000)
    there = weakref.ref(array)
    RDMABuffer(array)
    del array
    assert there() is not None
    await shutdown()
    assert there() is None


async def test_borrowers_keep_nothing(pair: ProcMesh) -> None:
    """A hundred buffers that were read, written and dropped leave nothing in the owner, nor in who has used them."""
    owner = pair.slice(gpus=0).spawn("owner", Owner)
    for _ in range(100):
        buffer = await owner.make.call_one(b"some")
        await buffer.write_from(b"more")
        assert 1 == len(halves()[1]._leases._leases)
        await buffer.drop()
    assert 0 == await owner.held.call_one()
    buffers, transfers = halves()
    assert ({}, {}, {}) == (buffers._registered, buffers._of_life, transfers._leases._leases)


async def test_a_borrower_that_has_ended_holds_up_no_drop(pair: ProcMesh) -> None:
    """Who has borrowed a buffer and died need not agree that it is dropped."""
    borrowers = this_host().spawn_procs()
    owner, other = pair.slice(gpus=0).spawn("owner", Owner), borrowers.spawn("other", Owner)
    buffer = await owner.make.call_one(b"borrowed")
    assert b"borrowed" == await other.read.call_one(buffer)
    await borrowers.stop()
    assert 1 == await owner.held.call_one()
    await buffer.drop()
    assert 0 == await owner.held.call_one()


async def test_an_owner_that_is_stopped() -> None:
    """Is read and written by who has done so before, up to 4 MiB at a time, since nobody asks it; larger copies wait until it goes on."""
    owner = this_host().spawn_procs(name="there").spawn("owner", Owner)
    buffer = await owner.make_zeros.call_one(8 << 20, "cma")
    small, large = bytearray(b"s" * (3 << 20)), bytearray(b"l" * (4 << 20))
    await buffer.read_into(bytearray(1), offset=0, size=1)
    pid = await owner.pid.call_one()
    os.kill(pid, signal.SIGSTOP)
    try:
        await buffer.write_from(small, offset=1, timeout=10.0)
        back = bytearray(3 << 20)
        await buffer.read_into(back, offset=1, timeout=10.0)
        assert small == back
        with pytest.raises(CallTimeout):
            await buffer.read_into(large, offset=0, timeout=0.2)
        assert bytearray(b"l" * (4 << 20)) == large
    finally:
        os.kill(pid, signal.SIGCONT)
    await buffer.read_into(large, offset=0)
    assert b"\0sss" == large[:4]
