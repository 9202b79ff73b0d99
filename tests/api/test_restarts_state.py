"""Checkpoints: what a life leaves for the next one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import Any, cast

import pytest

from monarch_async import (
    Actor,
    ActorDied,
    MeshFailure,
    ProcMesh,
    Restart,
    Supervisor,
    UsageError,
    configure,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch_async.options import Options
from tests.api.restarting import Diary, Member, back, end
from tests.api.waiting import until

pytestmark = pytest.mark.usefixtures("complaints")


class Saved(Member):
    """Counts, and goes on from its last checkpoint."""

    state: Any = None

    def __checkpoint__(self) -> Any:
        self.note(f"checkpoint {self.count}")
        if self.count == 13:
            return threading.Lock()
        if self.count == 14:
            raise LookupError("no state")
        return self.count if self.state is None else self.state

    def __restore__(self, state: int) -> Any:
        self.count = state
        self.note(f"restore {state}")
        if state == 66:
            raise LookupError("no use")

    @endpoint
    async def save(self) -> None:
        await self.checkpoint()

    @endpoint
    async def save_large(self, size: int) -> None:
        self.state = b"x" * size
        await self.checkpoint()

    @endpoint
    async def save_and_fail(self, number: int) -> None:
        self.count = number
        self.checkpoint()
        raise RuntimeError("after the checkpoint")


class AsyncSaved(Saved):
    """The first checkpoint takes longer than those after it."""

    saves = 0

    async def __checkpoint__(self) -> Any:
        count = self.count
        self.saves += 1
        if self.saves == 1:
            await asyncio.sleep(0.2)
        return count

    async def __restore__(self, state: int) -> None:
        await asyncio.sleep(0)
        self.count = state

    @endpoint
    async def save_twice(self) -> None:
        first = self.checkpoint()
        self.count += 1
        await asyncio.gather(first, self.checkpoint())


class SyncSaved(Actor):
    """All in a thread, checkpoints too."""

    def __init__(self) -> None:
        self.count = 0
        self.threads = {threading.get_ident()}

    @endpoint
    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    @endpoint
    def save(self) -> None:
        self.checkpoint().get(5)

    @endpoint
    def in_one_thread(self) -> bool:
        return self.threads == {threading.get_ident()}

    @endpoint
    def end(self, how: str) -> None:
        end(how)

    @endpoint
    def life(self) -> tuple[int, int]:
        return os.getpid(), context().actor_instance.incarnation

    def __checkpoint__(self) -> int:
        self.threads.add(threading.get_ident())
        return self.count

    def __restore__(self, state: int) -> None:
        self.threads.add(threading.get_ident())
        self.count = state


@pytest.mark.parametrize("cls", [Saved, AsyncSaved, SyncSaved])
async def test_the_next_life_goes_on_from_the_last_checkpoint(place: ProcMesh, cls: type[Saved]) -> None:
    """From `def` and `async def`; what came after the checkpoint is lost."""
    member = place.spawn("member", cls, restart=Restart())
    await member.add.call_one(5)
    await member.save.call_one()
    await member.add.call_one(100)
    member.end.broadcast("raise")
    assert 6 == await member.add.call_one()
    assert 1 == (await member.life.call_one())[1]


@pytest.mark.parametrize("cls", [Saved, AsyncSaved, SyncSaved])
async def test_a_process_that_dies_leaves_its_checkpoints(cls: type[Saved]) -> None:
    """They are with the owner: for policies of the actors, of the processes, and of a supervisor."""
    host = this_host()
    policed = host.spawn_procs().spawn("policed", cls, restart=Restart())
    plain = host.spawn_procs(restart=Restart()).spawn("plain", cls)
    async with Supervisor() as group:
        supervised = group.supervise(host.spawn_procs().spawn("supervised", cls))
        for member in (policed, plain, supervised):
            await member.add.call_one(5)
            await member.save.call_one()
            os.kill((await member.life.call_one())[0], signal.SIGKILL)
            await back(member, 1)
            assert 6 == await member.add.call_one()


@pytest.mark.parametrize("cls", [Saved, AsyncSaved, SyncSaved])
async def test_checkpoints_by_time(place: ProcMesh, cls: type[Saved]) -> None:
    """Each so often, between messages; their credit is nobody's, so that bounds stay."""
    member = place.spawn("member", cls, restart=Restart(checkpoint_every=0.05, max_restarts=100))
    await member.add.call_one(5)
    await asyncio.sleep(0.5)
    assert isinstance(await member.add.call_one(100), int)
    member.end.broadcast("raise")
    assert await member.add.call_one(0) in (5, 105)
    if cls.__name__ == "SyncSaved":
        threaded: Any = member
        assert await threaded.in_one_thread.call_one()
    endpoint: Any = member.add
    await until(lambda: endpoint.lanes[0].messages <= 0)
    assert 0 == endpoint.lanes[0].messages


async def test_a_busy_actor_gets_no_heap_of_checkpoints(diary: Diary) -> None:
    """The next one by time comes after the one before it."""
    member = this_proc().spawn("member", Saved, diary, restart=Restart(checkpoint_every=0.02))
    await member.wait.call_one(0.5)
    assert len(diary.lines("checkpoint")) <= 2


async def test_checkpoints_in_order() -> None:
    """One that was begun later is the last one, whichever is ready first."""
    member = this_host().spawn_procs().spawn("member", AsyncSaved, restart=Restart())
    await member.save_twice.call_one()
    member.end.broadcast("raise")
    assert 1 == await member.add.call_one(0)


async def test_a_checkpoint_just_before_the_end() -> None:
    """It was on its way before the news of the failure, so the next life gets it; one of a former life changes nothing."""
    member = this_host().spawn_procs().spawn("member", Saved, restart=Restart(max_restarts=100))
    for number in range(1, 6):
        member.save_and_fail.broadcast(number)
        assert number == await member.add.call_one(0)


@pytest.mark.parametrize("count", [13, 14])
async def test_a_checkpoint_that_can_not_be_taken(
    diary: Diary, failures: list[MeshFailure], caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """That one fails: an error for who asks, a log line by time; the last good one is kept and the actor goes on."""
    member = this_proc().spawn("member", Saved, diary, restart=Restart(checkpoint_every=0.05))
    await member.add.call_one(5)
    await member.save.call_one()
    await member.add.call_one(count - 5)
    with pytest.raises(LookupError if count == 14 else TypeError):
        await member.save.call_one()
    assert count == await member.add.call_one(0)
    await until(lambda: "the last good one is kept" in caplog.text)
    assert all(record.name.endswith("Saved") for record in caplog.records if record.levelno >= logging.ERROR)
    member.end.broadcast("raise")
    assert 5 == await member.add.call_one(0)
    assert [] == failures


async def test_a_checkpoint_that_is_too_large() -> None:
    """The option bounds it; what was kept before stays."""
    before = Options()
    configure(checkpoint_bytes=1000)
    try:
        member = this_host().spawn_procs().spawn("member", Saved, restart=Restart())
        await member.add.call_one(5)
        await member.save.call_one()
        with pytest.raises(UsageError, match="more than the option checkpoint_bytes=1000"):
            await member.save_large.call_one(2000)
        member.end.broadcast("raise")
        assert 5 == await member.add.call_one(0)
    finally:
        configure(checkpoint_bytes=before.checkpoint_bytes)


async def test_a_state_that_can_not_be_restored(failures: list[MeshFailure]) -> None:
    """That is a constructor that fails, again and again, until the budget is used up."""
    member = this_host().spawn_procs().spawn("member", Saved, restart=Restart(max_restarts=2))
    await member.add.call_one(66)
    await member.save.call_one()
    member.end.broadcast("raise")
    with pytest.raises(ActorDied, match="no use"):
        await member.add.call_one()
    await until(lambda: failures)
    assert [("member", 2)] == [(told.mesh, told.incarnation) for told in failures]


async def test_who_can_not_take_checkpoints(place: ProcMesh) -> None:
    """Code outside of actors, and actors that don't say how."""
    with pytest.raises(UsageError, match="no code of an actor"):
        Saved.checkpoint(cast("Any", None))
    with pytest.raises(UsageError, match="Asks has no __checkpoint__ method"):
        await place.spawn("asks", Asks).ask_for_one.call_one()


class Asks(Actor):
    @endpoint
    async def ask_for_one(self) -> None:
        await self.checkpoint()
