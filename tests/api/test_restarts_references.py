"""References to what is restarted, wherever they are held, and processes that others spawn on."""

from __future__ import annotations

import os
import pickle
import signal
from typing import Any

import pytest

from monarch_async import MeshFailure, ProcMesh, Restart, Supervisor, endpoint, this_host, this_proc
from tests.api.restarting import Member, alive, back, gone
from tests.api.waiting import until

pytestmark = pytest.mark.usefixtures("complaints")


async def test_references_stay_valid() -> None:
    """In this process and in actors elsewhere, slices, pickled before and after, and such that are first used after the restart."""
    host = this_host()
    others = host.spawn_procs({"gpus": 2}, name="others").spawn("others", Member)
    members = host.spawn_procs({"gpus": 2}, name="procs", restart=Restart()).spawn("members", Member)
    first, second = members.slice(gpus=0), others.slice(gpus=1)
    (pid, _), *_ = (await members.life.call()).values()
    assert 1 == await others.slice(gpus=0).ask.call_one(first, 1)
    pickled = pickle.dumps(first)
    os.kill(pid, signal.SIGKILL)
    await back(first, 1)
    unused = pickle.loads(pickled)
    assert 10 == await unused.add.call_one(10)
    assert 20 == await others.slice(gpus=0).ask.call_one(first, 10)
    assert 30 == await second.ask.call_one(pickle.loads(pickled), 10)
    assert 40 == await second.ask.call_one(pickle.loads(pickle.dumps(first)), 10)
    assert [50, 10] == list((await members.add.call(10)).values())


async def test_a_reference_first_used_elsewhere_after_the_restart() -> None:
    """By a process that has only the address of the first life, and never was connected to it."""
    host = this_host()
    other = host.spawn_procs(name="other").spawn("other", Keeper)
    member = host.spawn_procs(name="procs", restart=Restart()).spawn("member", Member)
    await other.keep.call_one(member)
    for count in range(1, 4):
        pid, _ = await member.life.call_one()
        os.kill(pid, signal.SIGKILL)
        await back(member, count)
    assert 7 == await other.use.call_one(7)


class Keeper(Member):
    kept: Any = None

    @endpoint
    async def keep(self, other: Any) -> None:
        self.kept = other

    @endpoint
    async def use(self, number: int) -> int:
        return int(await self.kept.add.call_one(number))

    @endpoint
    async def cast(self) -> None:
        await self.kept.add.broadcast()

    @endpoint
    async def spawn_on_kept(self, restart: Restart | None) -> Any:
        procs: ProcMesh = self.kept
        return await procs.spawn("spawned", Member, restart=restart)


@pytest.mark.parametrize("restart", [None, Restart()])
async def test_processes_that_another_one_spawns_on(failures: list[MeshFailure], restart: Restart | None) -> None:
    """By a reference from before a restart, and without ever having been linked with them: it is as if it had known."""
    host = this_host()
    keeper = host.spawn_procs(name="keepers").spawn("keeper", Keeper)
    procs = host.spawn_procs(name="procs", restart=Restart(max_restarts=10))
    member = procs.spawn("member", Member)
    await keeper.keep.call_one(procs)
    os.kill((await member.life.call_one())[0], signal.SIGKILL)
    await back(member, 1)
    spawned = await keeper.spawn_on_kept.call_one(restart)
    assert 0 == (await spawned.life.call_one())[1]
    os.kill((await member.life.call_one())[0], signal.SIGKILL)
    await back(spawned, 1)
    pid = await back(member, 2)
    await keeper.stop()
    await gone(spawned)
    assert alive(pid)
    assert [] == failures


async def test_a_reference_that_tells_of_a_restart() -> None:
    """One to the next life comes before the news of the end: what is under way to the life before fails, and nothing is booked twice."""
    host = this_host()
    keeper = host.spawn_procs(name="keepers").spawn("keeper", Keeper)
    member = host.spawn_procs(name="procs", restart=Restart(max_restarts=100)).options(mailbox_messages=8).spawn("member", Member)
    for life in range(1, 6):
        await keeper.keep.call_one(member)
        await keeper.use.call_one(1)
        os.kill((await member.life.call_one())[0], signal.SIGKILL)
        await back(member, life)
        await keeper.keep.call_one(member)
        assert 1 == await keeper.use.call_one(1)
        for _ in range(20):
            await keeper.cast.call_one()
        assert 20 < await keeper.use.call_one(1)


async def test_bounds_of_an_actor_here_that_was_gone_in_between() -> None:
    """It has left, its group brings it back: senders from before have the same account with it."""
    async with Supervisor(Restart(mode="transient", strategy="one_for_all")) as group:
        first = group.supervise(this_proc().options(mailbox_messages=4).spawn("first", Member))
        second = group.supervise(this_proc().spawn("second", Member))
        await first
        first.end.broadcast("leave")
        await gone(first)
        second.end.broadcast("raise")
        await back(first, 1)
        for _ in range(20):
            first.add.broadcast()
            await first.add.call_one(0)
        endpoint: Any = first.add
        await until(lambda: not endpoint.lanes[0].messages)
