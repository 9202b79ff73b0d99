"""Restarts where several things happen at once: each of these has gone wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from monarch_async import Actor, ActorDied, MeshFailure, ProcMesh, Restart, Supervisor, configure, endpoint, this_host, this_proc
from monarch_async.ambient import current_runtime
from monarch_async.options import Options
from tests.api.restarting import Diary, Member, back
from tests.api.waiting import until


class SlowToEnd(Member):
    """Takes its time to clean up."""

    async def __cleanup__(self, error: BaseException | None) -> None:
        await asyncio.sleep(0.5)


class Owner(Member):
    """Owns a member in a process."""

    @endpoint
    async def spawn(self, procs: ProcMesh) -> int:
        self.below = procs.spawn("below", Member)
        pid, _ = await self.below.life.call_one()
        return pid


class Caller(Actor):
    """Calls from another process."""

    @endpoint
    async def call(self, member: Any) -> int:
        return int(await member.add.options(retry=5).call_one())

    @endpoint
    async def peers(self) -> int:
        return len(current_runtime().peers)


class Processes(Actor):
    """Owns processes that others have actors in."""

    @endpoint
    async def spawn(self) -> ProcMesh:
        self.procs = this_host().spawn_procs(name="lent")
        return await self.procs

    @endpoint
    async def take_back(self) -> None:
        await self.procs.stop()


async def test_a_member_slow_to_end_costs_its_neighbours_no_budget(failures: list[MeshFailure]) -> None:
    """Processes and actors both restart as one: nobody starts an actor in a process that is about to end."""
    together = Restart(strategy="one_for_all", max_restarts=3, within=60.0)
    async with this_host().spawn_procs({"gpus": 2}, restart=together) as procs:
        slow = procs.slice(gpus=1).spawn("slow", SlowToEnd)
        members = procs.spawn("members", Member, restart=together)
        await slow.life.call_one()
        pid, _ = await members.slice(gpus=0).life.call_one()
        os.kill(pid, signal.SIGKILL)
        await back(members.slice(gpus=0), 1)
        await back(members.slice(gpus=1), 1)
    assert [] == failures


async def test_a_frozen_process_does_not_hold_up_its_owners_restart() -> None:
    """The owner's end waits for what it owns, but not for ever."""
    before = Options()
    configure(stop_timeout=0.3, cleanup_timeout=0.3)
    try:
        async with this_host().spawn_procs() as own, this_host().spawn_procs() as other:
            owner = own.spawn("owner", Owner, restart=Restart())
            pid = await owner.spawn.call_one(other)
            os.kill(pid, signal.SIGSTOP)
            try:
                owner.end.broadcast("raise")
                async with asyncio.timeout(8):
                    await back(owner, 1)
            finally:
                os.kill(pid, signal.SIGCONT)
    finally:
        configure(**before._asdict())


async def test_many_retries_of_a_local_actor_that_is_gone_end(failures: list[MeshFailure]) -> None:
    """Each is another turn of the loop: neither the stack nor the end of the actor suffers."""
    local: Any = this_proc().spawn("local", Member)
    await local
    waiting = local.wait.call_one(30)
    queued = local.add.options(retry=2000).call_one()
    await asyncio.sleep(0)
    await local.stop("enough")
    for call in (waiting, queued):
        with pytest.raises(ActorDied, match="stopped: enough"):
            async with asyncio.timeout(10):
                await call
    assert [] == failures


async def test_processes_that_their_owner_stops_end_a_policy_of_others(failures: list[MeshFailure]) -> None:
    """An actor with a policy in processes of another owner: when these are stopped it has failed, and its callers hear of it."""
    lender = this_proc().spawn("lender", Processes)
    procs = await lender.spawn.call_one()
    member = procs.spawn("member", Member, restart=Restart(max_restarts=1))
    await member.life.call_one()
    await lender.take_back.call_one()
    with pytest.raises(ActorDied):
        async with asyncio.timeout(10):
            await member.add.options(retry=5).call_one()
    assert ["member"] == [failure.mesh for failure in failures]


async def test_an_old_error_of_a_constructor_does_not_end_a_new_life(failures: list[MeshFailure], tmp_path: Path) -> None:
    """A child whose constructor failed unseen is started again with its sibling, and then left alone."""
    diary = Diary(tmp_path / "diary")
    (tmp_path / "diary.fail").touch()
    async with this_host().spawn_procs() as procs, Supervisor(Restart(strategy="one_for_all", max_restarts=5)) as group:
        sibling = group.supervise(procs.spawn("sibling", Member))
        child = group.supervise(procs.spawn("child", Member, diary))
        await sibling.life.call_one()
        await until(lambda: bool(diary.lines("start child")))
        (tmp_path / "diary.fail").unlink()
        sibling.end.broadcast("raise")
        await back(child, 1)
        await asyncio.sleep(1.2)  # past the moment in which the error would have been told
        assert 1 == (await child.life.call_one())[1]
    assert [] == failures


async def test_a_child_whose_processes_were_stopped_is_left_out(failures: list[MeshFailure]) -> None:
    """Its siblings go on being restarted."""
    async with this_host().spawn_procs() as procs, Supervisor(Restart(strategy="one_for_all", max_restarts=5)) as group:
        other = this_host().spawn_procs()
        first = group.supervise(procs.spawn("first", Member))
        second = group.supervise(other.spawn("second", Member))
        await asyncio.gather(first.life.call_one(), second.life.call_one())
        await other.stop()
        first.end.broadcast("raise")
        await back(first, 1)
    assert [] == failures


async def test_what_has_ended_is_forgotten(failures: list[MeshFailure]) -> None:
    """However often a process is started again, few of its lives are remembered, here and where it is only called from."""
    procs = this_host().spawn_procs(restart=Restart(max_restarts=100))
    caller = this_host().spawn_procs().spawn("caller", Caller)
    member = procs.spawn("member", Member)
    for life in range(8):
        pid = await back(member, life)
        assert await caller.call.call_one(member) >= 1
        os.kill(pid, signal.SIGKILL)
    await back(member, 8)
    await caller.call.call_one(member)
    assert await caller.peers.call_one() <= 8
    assert len(current_runtime().peers) <= 10
    assert [] == failures
