"""What code of a life that is over can do to the next one: nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from monarch_async import Actor, Restart, UsageError, concurrent_endpoint, configure, context, endpoint, this_proc, watch
from monarch_async.options import Options
from tests.api.restarting import back


class Script:
    """What a test and the actors of its process share."""

    def __init__(self) -> None:
        self.running, self.go_on, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.threads_go_on = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.outcome: BaseException | None = None

    def note(self, outcome: BaseException | None) -> None:
        self.outcome = outcome
        self.loop.call_soon_threadsafe(self.done.set)


script: Script


@pytest.fixture
async def play() -> AsyncIterator[Script]:
    global script
    script = Script()
    yield script
    script.go_on.set()
    script.threads_go_on.set()


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    before = Options()
    configure(cleanup_timeout=0.1)
    yield
    configure(cleanup_timeout=before.cleanup_timeout)


class Former(Actor):
    def __init__(self) -> None:
        self.count = 0

    def __checkpoint__(self) -> int:
        return self.count

    def __restore__(self, state: int) -> None:
        self.count = state

    def act(self, how: str, me: Any = None) -> Any:
        if how == "checkpoint":
            return self.checkpoint()
        return getattr(me or context().actor_instance, how)("from a former life")

    async def cling_on(self, how: str) -> None:
        """Does not let itself be cancelled, then acts."""
        script.running.set()
        while not script.go_on.is_set():
            try:
                await script.go_on.wait()
            except asyncio.CancelledError:
                continue
        try:
            done = self.act(how)
            if done is not None:
                await done
        except BaseException as error:
            script.note(error)
        else:
            script.note(None)

    @endpoint
    async def plain(self, how: str) -> None:
        await self.cling_on(how)

    @concurrent_endpoint
    async def overlapping(self, how: str) -> None:
        await self.cling_on(how)

    @endpoint
    def in_thread(self, how: str) -> None:
        script.loop.call_soon_threadsafe(script.running.set)
        script.threads_go_on.wait(10)
        try:
            self.act(how)
        except BaseException as error:
            script.note(error)
        else:
            script.note(None)

    @endpoint
    async def leave_running(self, how: str) -> None:
        """The handler ends, and what it has started goes on."""
        me = context().actor_instance

        async def go_on() -> None:
            await script.go_on.wait()
            try:
                done = self.act(how, me)
                if done is not None:
                    await done
            except BaseException as error:
                script.note(error)
            else:
                script.note(None)

        self.task = asyncio.create_task(go_on())
        script.running.set()

    @concurrent_endpoint
    async def add(self, number: int) -> int:
        self.count += number
        return self.count

    @concurrent_endpoint
    async def life(self) -> tuple[int, int]:
        return 0, context().actor_instance.incarnation


def crash(member: Any) -> None:
    """Let its present life fail, whatever it does now."""
    member._runtime.cells[member._key].fail(RuntimeError("crash"), "crash")


@pytest.mark.parametrize("how", ["checkpoint", "stop", "abort"])
@pytest.mark.parametrize("kind", ["plain", "overlapping", "in_thread", "leave_running"])
async def test_code_of_a_former_life_is_refused(play: Script, kind: str, how: str) -> None:
    """A handler that outlives its life, or a task it has left, neither ends the next life nor gives it its state."""
    member = this_proc().spawn("member", Former, restart=Restart())
    await member.add.call_one(100)
    getattr(member, kind).broadcast(how)
    async with asyncio.timeout(10):
        await play.running.wait()
        crash(member)
        await back(member, 1)
        play.go_on.set()
        play.threads_go_on.set()
        await play.done.wait()
        with pytest.raises(UsageError, match=rf"code of a life of member\[0\] that is over: it can't .*{how}"):
            raise play.outcome or AssertionError("it was not refused")
        assert 1 == (await member.life.call_one())[1]
        assert 5 == await member.add.call_one(5)
        crash(member)
        await back(member, 2)
        assert 0 == await member.add.call_one(0)


@pytest.mark.parametrize("kind", ["overlapping", "leave_running"])
async def test_in_the_same_life_all_is_as_ever(play: Script, kind: str) -> None:
    """In a later life than the first, too: a handler, and a task that one has left, take a checkpoint for the next."""
    member = this_proc().spawn("member", Former, restart=Restart())
    async with asyncio.timeout(10):
        crash(member)
        await back(member, 1)
        await member.add.call_one(7)
        getattr(member, kind).broadcast("checkpoint")
        await play.running.wait()
        play.go_on.set()
        await play.done.wait()
        assert None is play.outcome
        await member.add.call_one(100)
        crash(member)
        await back(member, 2)
        assert 7 == await member.add.call_one(0)


async def test_a_task_left_by_a_handler_can_stop_its_actor(play: Script) -> None:
    """It is no handler of a former life."""
    member: Any = this_proc().spawn("member", Former)
    await member.leave_running.call_one("stop")
    ended = watch(member)
    play.go_on.set()
    async with asyncio.timeout(10):
        await play.done.wait()
        assert None is play.outcome
        assert "stopped: from a former life" == (await ended).reason
