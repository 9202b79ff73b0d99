"""What a policy can't deal with: who is told, once, with what; owners that are restarted themselves; what cleans up when."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from monarch_async import ActorDied, MeshFailure, ProcMesh, Restart, SpawnError, configure, endpoint, this_host, this_proc
from monarch_async.options import Options
from tests.api.restarting import Diary, Member, answers, back, gone
from tests.api.waiting import until

pytestmark = pytest.mark.usefixtures("complaints")


class Owner(Member):
    """Spawns members with policies, and says what it is told of them."""

    def __init__(self, diary: Diary, handles: bool = True) -> None:
        super().__init__(diary)
        self.handles = handles
        self.mine: Any = None

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.note(f"told {failure.mesh} {failure.ranks} {failure.incarnation} {failure.exit_code} {failure.signal} {failure.reason}")
        if self.handles is None:
            raise LookupError("while supervising")
        return self.handles

    @endpoint
    async def own(self, procs: ProcMesh, restart: Restart | None = None) -> Any:
        if restart is None:
            self.mine = procs.spawn("mine", Member, self.diary)
        else:
            self.mine = procs.spawn("mine", Member, self.diary, restart=restart)
        await self.mine
        return self.mine

    @endpoint
    async def own_procs(self, restart: Restart) -> Any:
        procs = this_host().spawn_procs(name="inner", restart=restart)
        self.mine = procs.spawn("mine", Member, self.diary)
        await self.mine
        return self.mine


async def test_the_owner_is_told_once_that_the_budget_is_used_up(diary: Diary, failures: list[MeshFailure]) -> None:
    """By actors elsewhere that it owns: mesh, rank, incarnation and reason; handled, so nobody else hears of it."""
    host = this_host()
    owner = host.spawn_procs(name="owners").spawn("owner", Owner, diary)
    procs = host.spawn_procs({"gpus": 2}, name="procs")
    mine = await owner.own.call_one(procs, Restart(max_restarts=1))
    for _ in range(2):
        mine.slice(gpus=1).end.broadcast("raise")
    await until(lambda: diary.lines("told"))
    assert [
        "told mine (1,) 1 None None RuntimeError in end: blew up; not started again: 1 restart within 5 s allowed, this would be the 2nd"
    ] == diary.lines("told")
    died = [await gone(mine.slice(gpus=rank)) for rank in range(2)]
    assert all("not started again" in error.reason for error in died)
    assert (1, 0) == (died[1].incarnation, died[0].incarnation)
    assert [] == failures


@pytest.mark.parametrize("restart", [None, Restart()])
async def test_an_actor_mesh_of_an_owner_elsewhere_on_processes_that_end(
    diary: Diary, failures: list[MeshFailure], restart: Restart | None
) -> None:
    """Processes that nobody restarts: a policy of the actors can't do it for an owner elsewhere, so that is told, with the signal."""
    host = this_host()
    owner = host.spawn_procs(name="owners").spawn("owner", Owner, diary)
    procs = host.spawn_procs({"gpus": 2}, name="procs")
    mine = await owner.own.call_one(procs, restart)
    os.kill((await mine.slice(gpus=0).life.call_one())[0], signal.SIGKILL)
    await until(lambda: diary.lines("told") and failures)
    assert ["told mine (0,) 0 None 9 process procs[0] killed by signal 9 (SIGKILL)"] == diary.lines("told")
    assert ["procs"] == [told.mesh for told in failures]
    if restart is not None:  # it can't be what its policy says, so it has failed as a whole
        assert "signal 9" in (await gone(mine.slice(gpus=1))).reason
    else:
        assert 1 == await mine.slice(gpus=1).add.call_one()


@pytest.mark.parametrize("restart", [None, Restart()])
async def test_an_actor_mesh_of_an_owner_elsewhere_on_processes_with_a_policy(
    diary: Diary, failures: list[MeshFailure], restart: Restart | None
) -> None:
    """It comes back with its process, with a policy of its own and without."""
    host = this_host()
    owner = host.spawn_procs(name="owners").spawn("owner", Owner, diary)
    mine = await owner.own.call_one(host.spawn_procs(name="procs", restart=Restart()), restart)
    for life in range(1, 3):
        os.kill((await mine.life.call_one())[0], signal.SIGKILL)
        await back(mine, life)
    assert [] == diary.lines("told") + failures


@pytest.mark.parametrize("handles", [False, None])
async def test_what_the_owner_does_not_handle_climbs(diary: Diary, failures: list[MeshFailure], handles: Any) -> None:
    """It fails too, and the program's hook fires once with the whole story."""
    owner = this_host().spawn_procs(name="owners").spawn("owner", Owner, diary, handles)
    mine = await owner.own.call_one(this_proc(), Restart(max_restarts=0))
    mine.end.broadcast("raise")
    await until(lambda: failures)
    assert [("owner", "__supervise__")] == [(told.mesh, told.endpoint) for told in failures]
    assert "0 restarts within 5 s allowed" in failures[0].report()
    assert ("LookupError" in failures[0].reason) is (handles is None)
    assert isinstance(await answers(owner.life.call_one()), ActorDied)


async def test_a_mesh_of_processes_that_is_given_up(failures: list[MeshFailure]) -> None:
    """The owner of the processes and of what is in them is told once; the other processes are stopped; calls say why."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs", restart=Restart(max_restarts=0))
    members = procs.spawn("members", Member)
    with_policy = procs.spawn("policed", Member, restart=Restart())
    pids = [pid for pid, _ in (await members.life.call()).values()]
    await with_policy
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: failures and not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert [("procs", "members", "policed")] == [told.meshes for told in failures]
    assert (9, (0,)) == (failures[0].signal, failures[0].ranks)
    assert "not started again: 0 restarts" in failures[0].reason
    for mesh in (members, with_policy):
        for rank in range(2):
            assert isinstance(await answers(mesh.slice(gpus=rank).life.call_one()), ActorDied)
    await asyncio.sleep(0.2)
    assert 1 == len(failures)


async def test_an_owner_that_is_restarted(diary: Diary, failures: list[MeshFailure]) -> None:
    """What it owned ends first, then it cleans up, then it lives again and can spawn again; old failures are none of the new life's."""
    host = this_host()
    owner = host.spawn_procs(name="owners").spawn("owner", Owner, diary, restart=Restart())
    elsewhere = host.spawn_procs(name="elsewhere")
    first = await owner.own.call_one(elsewhere, Restart())
    owner.end.broadcast("raise")
    await back(owner, 1)
    assert ["clean mine 0 0", "clean owner 0 0", "start owner 0 1"] == diary.lines()[-3:]
    assert isinstance(await answers(first.life.call_one()), ActorDied)
    second = await owner.own.call_one(elsewhere, Restart())
    assert 0 == (await second.life.call_one())[1]
    inner = await owner.own_procs.call_one(Restart())
    pid, _ = await inner.life.call_one()
    owner.end.broadcast("raise")
    await back(owner, 2)
    assert not os.path.exists(f"/proc/{pid}")
    assert [] == diary.lines("told") + failures


async def test_an_owner_whose_process_dies_in_mid_restart(diary: Diary, failures: list[MeshFailure]) -> None:
    """What it was restarting ends with it, callers are told, and its next life spawns again."""
    host = this_host()
    owner = host.spawn_procs(name="owners", restart=Restart()).spawn("owner", Owner, diary)
    elsewhere = host.spawn_procs(name="elsewhere")
    mine = await owner.own.call_one(elsewhere, Restart(backoff=30))
    mine.end.broadcast("raise")
    waiting = mine.life.call_one()
    await until(lambda: diary.lines("clean mine"))
    os.kill((await owner.life.call_one())[0], signal.SIGKILL)
    assert "the process of its owner" in (await answers(waiting)).reason
    await back(owner, 1)
    assert 0 == (await (await owner.own.call_one(elsewhere)).life.call_one())[1]
    assert [] == failures


class Stubborn(Member):
    """Does not clean up well."""

    async def __cleanup__(self, error: BaseException | None) -> None:
        self.note("cleaning")
        if self.name == "hang":
            await asyncio.sleep(60)
        raise LookupError("in cleanup")

    @endpoint
    async def cling(self) -> str:
        """Does not let itself be cancelled."""
        self.note("clinging")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            self.note("let go")
        return "late"


@pytest.fixture
def hurried() -> Any:
    before = Options()
    configure(cleanup_timeout=0.3, unknown_grace=0.5)
    yield
    configure(cleanup_timeout=before.cleanup_timeout, unknown_grace=before.unknown_grace)


@pytest.mark.parametrize("how", ["hang", "raise"])
async def test_a_cleanup_that_hangs_or_raises(hurried: Any, diary: Diary, complaints: list[str], how: str) -> None:
    """It is logged, and the next life begins all the same."""
    complaints += ["__cleanup__", "Traceback"]
    member = this_host().spawn_procs().spawn("member", Stubborn, diary, how, restart=Restart())
    await member
    member.end.broadcast("raise")
    assert 1 == await member.add.call_one()
    assert 1 == (await member.life.call_one())[1]


async def test_a_handler_that_outlives_its_life(hurried: Any, diary: Diary, complaints: list[str]) -> None:
    """When it ends at last that does nothing to the next life, which handles one message at a time as ever."""
    complaints += ["__cleanup__", "Traceback"]
    members = this_proc().spawn("member", Stubborn, diary, restart=Restart())
    clinging = members.cling.call_one()
    await until(lambda: diary.lines("clinging"))
    mesh: Any = members
    cell = mesh._runtime.cells[mesh._key]
    cell.fail(RuntimeError("from outside"), "test")
    assert (await answers(clinging)).started
    assert 1 == (await members.life.call_one())[1]
    current = members.wait.call_one(1.5)
    queued = members.add.call_one()
    await until(lambda: diary.lines("let go"))
    await asyncio.sleep(0.1)
    assert not queued.done()
    assert "waited" == await current
    assert 1 == await queued
    assert 2 == await members.add.call_one()


async def test_an_actor_that_starts_later_than_its_process(hurried: Any, failures: list[MeshFailure]) -> None:
    """Messages for it wait, longer than for one that is not known, while another mesh has the process up already."""
    procs = this_host().spawn_procs()
    quick = procs.spawn("quick", Member, restart=Restart())
    slow = procs.spawn("slow", Member, restart=Restart(backoff=1.5))
    pid, _ = await quick.life.call_one()
    await slow
    os.kill(pid, signal.SIGKILL)
    await back(quick, 1)
    assert 1 == await slow.add.call_one()
    assert 1 == (await slow.life.call_one())[1]
    assert [] == failures


async def test_a_mesh_with_and_one_without_a_policy_in_a_process(failures: list[MeshFailure]) -> None:
    """The one without is a failure at once; calls to it are refused, also when the process is back."""
    procs = this_host().spawn_procs(name="procs")
    with_policy = procs.spawn("with", Member, restart=Restart(backoff=0.3))
    without = procs.spawn("without", Member)
    pid, _ = await with_policy.life.call_one()
    await without
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    assert [("without", (0,), ("without",), 9)] == [(told.mesh, told.ranks, told.meshes, told.signal) for told in failures]
    early = without.life.call_one()
    await back(with_policy, 1)
    for call in (early, without.life.call_one()):
        died = await answers(call)
        assert ("without", 0, 0, 9, False) == (died.mesh, died.rank, died.incarnation, died.signal, died.started)
    assert 1 == len(failures)


async def test_processes_that_can_not_be_started(complaints: list[str], failures: list[MeshFailure]) -> None:
    """A first start that fails says so, to who awaits the processes or actors with a policy in them; nothing is tried again."""
    procs = this_host().spawn_procs(name="procs", preload=("no_such_module",), restart=Restart())
    member = procs.spawn("member", Member, restart=Restart())
    async with asyncio.timeout(10):
        with pytest.raises(SpawnError, match="no_such_module"):
            await procs
        with pytest.raises(ActorDied, match="no_such_module"):
            await member
    assert [] == failures
