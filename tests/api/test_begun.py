"""Handlers that begin where their message arrives, before their actor's task has its turn, and go on in that task."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from monarch_async import Actor, ProcMesh, endpoint, this_host, this_proc
from monarch_async.errors import ActorError

shared: asyncio.Future[int] | None = None


class Result:
    """Something that can be seen to be gone."""


class Waiting(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.kept: list[weakref.ref[Any]] = []

    @endpoint
    async def nothing(self) -> None: ...

    @endpoint
    async def prepare(self) -> None:
        global shared
        shared = asyncio.get_running_loop().create_future()

    @endpoint
    async def wait(self) -> int:
        assert shared is not None
        return await shared

    @endpoint
    async def settle(self, value: int) -> None:
        assert shared is not None
        shared.set_result(value)

    @endpoint
    async def time_out(self, seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            return "late"
        return "?"

    @endpoint
    async def group(self) -> list[str]:
        async def fail() -> None:
            raise LookupError("in the group")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.get_running_loop().create_future()
        except* LookupError as errors:
            self.seen += [str(error) for error in errors.exceptions]
        await asyncio.sleep(0)  # and the cancellation that ended the wait is over
        return list(self.seen)

    @endpoint
    async def cancel_itself(self, me: Any = None) -> None:
        if me is not None:
            me.note.broadcast("sent to itself")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @endpoint
    async def note(self, what: str) -> list[Any]:
        self.seen.append(what)
        return self.seen

    @endpoint
    async def note_slowly(self, what: str) -> list[Any]:
        await asyncio.sleep(0)
        self.seen.append(what)
        return self.seen

    @endpoint
    async def take(self, array: Any, pause: bool) -> None:
        memory = array.base
        while not isinstance(memory, memoryview):
            memory = memory.base
        self.kept.append(weakref.ref(memory.obj))
        if pause:
            await asyncio.sleep(0)

    @endpoint
    async def make(self, pause: bool) -> Any:
        if pause:
            await asyncio.sleep(0)
        result = Result()
        self.kept.append(weakref.ref(result))
        return result


class Observer(Actor):
    """In the same process as another actor, it looks at that without sending it anything."""

    @endpoint
    async def kept(self) -> int:
        gc.collect()
        actors = [found for found in gc.get_objects() if isinstance(found, Waiting)]
        return sum(reference() is not None for actor in actors for reference in actor.kept)


@pytest.fixture
async def there() -> ProcMesh:
    return this_host().spawn_procs(name="there")


async def idle(mesh: Any) -> Any:
    """An actor of another process that has nothing to do, so that the next message begins where it arrives."""
    await mesh
    await mesh.nothing.call_one()
    return mesh


async def test_handlers_that_begin_together_await_one_future(there: ProcMesh) -> None:
    """An actor may wait for what another one waits for already, though that one's task has not had its turn yet."""
    first, second, third = [await idle(there.spawn(name, Waiting)) for name in ("first", "second", "third")]
    await third.prepare.call_one()
    alone = third.nothing.call_one()  # leaves at once; what follows leaves together
    waiting = [first.wait.call_one(), second.wait.call_one(), first.wait.call_one()]
    await alone
    await third.settle.call_one(7)
    assert [7, 7, 7] == await asyncio.gather(*waiting)


async def test_timeouts_and_task_groups_in_a_handler(there: ProcMesh) -> None:
    """What cancels the current task, as these do, works in a handler that began before its task's turn, and ends with it."""
    actor = await idle(there.spawn("actor", Waiting))
    assert "late" == await actor.time_out.call_one(0)
    assert "late" == await actor.time_out.call_one(0.01)
    assert ["in the group"] == await actor.group.call_one()
    assert ["in the group", "after"] == await actor.note_slowly.call_one("after")


async def test_a_handler_that_has_just_begun_is_cancelled(there: ProcMesh) -> None:
    """A call and its cancellation that arrive together cancel this handler, and no other."""
    actor = await idle(there.spawn("actor", Waiting))
    other = await idle(there.spawn("other", Waiting))
    alone = other.nothing.call_one()
    late = actor.time_out.call_one(10)
    next_one = actor.note_slowly.call_one("next")
    assert late.cancel()
    await alone
    assert ["next"] == await next_one
    with pytest.raises(asyncio.CancelledError):
        await late


@pytest.mark.parametrize("to_itself", [False, True])
async def test_a_message_that_follows_the_cancellation_of_an_idle_task_is_handled(there: ProcMesh, to_itself: bool) -> None:
    """A handler that cancels its own task and ends leaves no message behind, and cancels none that comes after."""
    actor = await idle(there.spawn("actor", Waiting))
    other = await idle(there.spawn("other", Waiting))
    alone = other.nothing.call_one()
    itself = actor.cancel_itself.call_one(*([actor] if to_itself else []))
    following = actor.note_slowly.call_one("after")
    await alone
    async with asyncio.timeout(10):
        await itself
        expected = ["sent to itself", "after"] if to_itself else ["after"]
        assert expected == await following
        assert "last" == (await actor.note.call_one("last"))[-1]


async def test_a_message_to_an_actor_of_this_process_whose_idle_task_was_cancelled_is_handled() -> None:
    """The same where it comes from a task, and so goes through the mailbox."""
    actor = this_proc().spawn("actor", Waiting)
    await actor.cancel_itself.call_one()
    async with asyncio.timeout(10):
        assert ["after"] == await actor.note.call_one("after")


@pytest.mark.parametrize("pause", [False, True])
async def test_an_idle_actor_keeps_no_arguments_and_no_result(there: ProcMesh, pause: bool) -> None:
    """What the last message brought, and what its handler returned, is freed when it is done, not when the next one comes."""
    actor = await idle(there.spawn("actor", Waiting))
    observer = there.spawn("observer", Observer)
    await actor.take.call_one(np.ones(1 << 20), pause)
    assert 0 == await observer.kept.call_one()
    await actor.make.call_one(pause)
    assert 0 == await observer.kept.call_one()


async def test_cancelling_a_queued_call_on_a_mesh_in_this_process() -> None:
    """It fails while it is being cancelled, which is no trouble for the others."""
    actor = this_proc().spawn("actor", Waiting)
    running, queued = actor.time_out.call(10), actor.time_out.call(10)
    assert queued.cancel()
    assert running.cancel()
    for future in (running, queued):
        with pytest.raises((asyncio.CancelledError, ActorError)):
            await future
