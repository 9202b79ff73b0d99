"""What is restarted together: strategies among the members of a mesh, supervisors over meshes, supervisors over supervisors."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Literal

import pytest

from monarch_async import Actor, MeshFailure, Restart, SupervisionError, Supervisor, UsageError, endpoint, this_host, this_proc
from tests.api.restarting import Diary, Member, answers, back, gone
from tests.api.waiting import until

pytestmark = pytest.mark.usefixtures("complaints")

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
TAKEN: dict[str, list[int]] = {"one_for_one": [1], "one_for_all": [0, 1, 2], "rest_for_one": [1, 2]}


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("strategy", TAKEN)
async def test_strategies_among_actors(diary: Diary, failures: list[MeshFailure], strategy: Strategy, how: str) -> None:
    """Those that go along have ended before the first of all is started again; the others notice nothing."""
    members = this_host().spawn_procs({"gpus": 3}).spawn("members", Member, diary, restart=Restart(strategy=strategy))
    await members.add.call()
    members.slice(gpus=1).end.broadcast(how)
    await back(members.slice(gpus=1), 1)
    values = list((await members.add.call()).values())
    assert [1 if rank in TAKEN[strategy] else 2 for rank in range(3)] == values
    lines = diary.lines()[3:]
    started = [f"start members {rank} 1" for rank in TAKEN[strategy]]
    cleaned = [f"clean members {rank} 0" for rank in TAKEN[strategy] if how == "raise" or rank != 1]
    assert sorted(started) == sorted(line for line in lines if line.startswith("start"))
    assert sorted(cleaned) == sorted(lines[: len(cleaned)])
    assert [] == failures


@pytest.mark.parametrize("strategy", TAKEN)
async def test_strategies_among_processes(failures: list[MeshFailure], strategy: Strategy) -> None:
    """The same for processes, and what is in them."""
    members = this_host().spawn_procs({"gpus": 3}, restart=Restart(strategy=strategy)).spawn("members", Member)
    before = [pid for pid, _ in (await members.life.call()).values()]
    os.kill(before[1], signal.SIGKILL)
    for rank in TAKEN[strategy]:
        await back(members.slice(gpus=rank), 1)
    after = list((await members.life.call()).values())
    assert [int(rank in TAKEN[strategy]) for rank in range(3)] == [life for _, life in after]
    assert [rank in TAKEN[strategy] for rank in range(3)] == [pid != old for (pid, _), old in zip(after, before, strict=True)]
    assert [] == failures


@pytest.mark.parametrize("strategy", TAKEN)
async def test_a_supervisor_restarts_meshes(diary: Diary, failures: list[MeshFailure], strategy: Strategy) -> None:
    """In the order of their start, after those that go along have ended, the last first; references stay valid."""
    procs = this_host().spawn_procs({"gpus": 2})
    async with Supervisor(Restart(strategy=strategy)) as group:
        meshes = [group.supervise(procs.spawn(f"m{number}", Member, diary)) for number in range(3)]
        for mesh in meshes:
            await mesh
        before = len(diary.lines())
        meshes[1].slice(gpus=0).end.broadcast("raise")
        await back(meshes[1].slice(gpus=0), 1)
        for number in TAKEN[strategy]:
            for rank in range(2):
                await back(meshes[number].slice(gpus=rank), 1)
        lines = diary.lines()[before:]
    order = list(dict.fromkeys(" ".join(line.split()[:2]) for line in lines))
    taken = TAKEN[strategy]
    # The one that failed has cleaned up by itself before its other members end.
    assert {"clean m1", *(f"clean m{number}" for number in taken)} == set(order[: len(taken)])
    assert [f"clean m{number}" for number in reversed(taken) if number != 1] == [line for line in order[: len(taken)] if line != "clean m1"]
    assert [f"start m{number}" for number in taken] == order[len(taken) :]
    assert [] == failures


async def test_a_supervisor_and_processes_that_die(failures: list[MeshFailure]) -> None:
    """Whatever was in the process comes back, in the order of the group."""
    procs = this_host().spawn_procs({"gpus": 2})
    async with Supervisor(Restart(strategy="one_for_all", max_restarts=10)) as group:
        first = group.supervise(procs.spawn("first", Member))
        second = group.supervise(procs.spawn("second", Member))
        await first
        pid, _ = await second.slice(gpus=1).life.call_one()
        os.kill(pid, signal.SIGKILL)
        for mesh in (first, second):
            for rank in range(2):
                await back(mesh.slice(gpus=rank), 1)
    assert [] == failures


async def test_a_child_with_a_policy_of_its_own_escalates(diary: Diary, failures: list[MeshFailure]) -> None:
    """It is restarted by itself until its budget is used up, then with its group, and then has its budget again."""
    procs = this_host().spawn_procs()
    async with Supervisor(Restart(strategy="one_for_all")) as group:
        policed = group.supervise(procs.spawn("policed", Member, restart=Restart(max_restarts=1)))
        other = group.supervise(procs.spawn("other", Member))
        await other
        for life, taken in ((1, 0), (2, 1), (3, 1), (4, 2)):
            policed.end.broadcast("raise")
            await back(policed, life)
            await back(other, taken)
    assert [] == failures


async def test_a_supervisor_that_gives_up(failures: list[MeshFailure]) -> None:
    """All children end, last first; the owner is told once, of the member and that the budget is used up; `wait` raises that."""
    procs = this_host().spawn_procs()
    async with Supervisor(Restart(max_restarts=1), name="group") as group:
        first = group.supervise(procs.spawn("first", Member))
        second = group.supervise(procs.spawn("second", Member))
        await second
        for life in range(2):
            await back(first, life)
            first.end.broadcast("raise")
        with pytest.raises(SupervisionError, match="group has given up"):
            async with asyncio.timeout(5):
                await group.wait()
        await gone(first)
        await gone(second)
        with pytest.raises(UsageError, match="has ended"):
            group.supervise(procs.spawn("third", Member))
    assert ["first"] == [told.mesh for told in failures]
    assert "not started again: 1 restart within 5 s allowed" in failures[0].reason


async def test_three_supervisors_deep(diary: Diary, failures: list[MeshFailure]) -> None:
    """The innermost gives up, the middle one restarts it and what belongs to it, and when that gives up the top restarts all."""
    procs = this_host().spawn_procs()
    top = Supervisor(Restart(strategy="one_for_all", max_restarts=1), name="top")
    middle = Supervisor(Restart(strategy="one_for_all", max_restarts=1), name="middle")
    inner = Supervisor(Restart(max_restarts=1), name="inner")
    async with top:
        at_top = top.supervise(procs.spawn("at top", Member))
        top.supervise(middle)
        in_middle = middle.supervise(procs.spawn("in middle", Member))
        middle.supervise(inner)
        deep = inner.supervise(procs.spawn("deep", Member))
        await deep
        lives = []
        for life in range(1, 5):
            deep.end.broadcast("raise")
            await back(deep, life)
            lives.append([(await mesh.life.call_one())[1] for mesh in (at_top, in_middle)])
        assert [[0, 0], [0, 1], [0, 1], [1, 2]] == lives
        assert [] == failures
        for life in range(5, 8):
            deep.end.broadcast("raise")
            await back(deep, life)
        deep.end.broadcast("raise")
        await until(lambda: failures)
        for mesh in (at_top, in_middle, deep):
            await gone(mesh)
    assert ["deep"] == [told.mesh for told in failures]


@pytest.mark.parametrize("shutdown", ["any_significant", "all_significant"])
async def test_significant_children(failures: list[MeshFailure], shutdown: Any) -> None:
    """The end of the first, or of the last, ends the whole group, which is no failure."""
    procs = this_host().spawn_procs()
    async with Supervisor(Restart(mode="transient"), auto_shutdown=shutdown) as group:
        first = group.supervise(procs.spawn("first", Member), significant=True)
        second = group.supervise(procs.spawn("second", Member), significant=True)
        third = group.supervise(procs.spawn("third", Member))
        await third
        first.end.broadcast("leave")
        await gone(first)
        if shutdown == "all_significant":
            assert 1 == await second.add.call_one()
            second.end.broadcast("leave")
        async with asyncio.timeout(5):
            await group.wait()
        await gone(second)
        await gone(third)
    assert [] == failures


async def test_a_transient_child_that_has_ended_comes_back_with_its_group(failures: list[MeshFailure]) -> None:
    """Until then calls to it are refused. One member of it that leaves is gone for itself."""
    procs = this_host().spawn_procs({"gpus": 2})
    async with Supervisor(Restart(mode="transient", strategy="one_for_all")) as group:
        first = group.supervise(procs.spawn("first", Member))
        second = group.supervise(procs.spawn("second", Member))
        await first
        await second
        for rank in range(2):
            first.slice(gpus=rank).end.broadcast("leave")
            assert "stopped itself" in (await gone(first.slice(gpus=rank))).reason
            assert rank or 1 == await first.slice(gpus=1).add.call_one()
        second.slice(gpus=0).end.broadcast("raise")
        for mesh in (first, second):
            for rank in range(2):
                await back(mesh.slice(gpus=rank), 1)
    assert [] == failures


async def test_a_child_that_its_owner_has_stopped_is_left_out(failures: list[MeshFailure]) -> None:
    """A restart of the others goes on without it."""
    procs = this_host().spawn_procs()
    async with Supervisor(Restart(strategy="one_for_all")) as group:
        first = group.supervise(procs.spawn("first", Member))
        second = group.supervise(procs.spawn("second", Member))
        await first
        await second.stop()
        first.end.broadcast("raise")
        await back(first, 1)
        await gone(second)
    assert [] == failures


class Boss(Member):
    """Has a group."""

    group: Supervisor

    @endpoint
    async def gather(self) -> Any:
        self.group = Supervisor(Restart(strategy="one_for_all", backoff=0.3))
        await self.group.__aenter__()
        first = self.group.supervise(this_proc().spawn("first", Member, self.diary))
        second = self.group.supervise(this_proc().spawn("second", Member, self.diary))
        await first
        await second
        return first

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.note(f"told {failure.reason}")
        return False


@pytest.mark.parametrize("restarting", [False, True])
async def test_the_owner_of_a_supervisor_fails(diary: Diary, failures: list[MeshFailure], restarting: bool) -> None:
    """The children end in their order, also in mid-restart; the next life is told nothing of them and has a group of its own."""
    boss = this_host().spawn_procs().spawn("boss", Boss, diary, restart=Restart())
    first = await boss.gather.call_one()
    if restarting:
        first.end.broadcast("raise")
        await until(lambda: len(diary.lines("clean")) == 2)
    boss.end.broadcast("raise")
    await back(boss, 1)
    cleaned = ["clean first 0 0", "clean second 0 0"]
    assert [*(cleaned if restarting else cleaned[::-1]), "clean boss 0 0"] == diary.lines("clean")
    await boss.gather.call_one()
    await asyncio.sleep(0.5)
    assert 1 == (await boss.life.call_one())[1]
    assert [] == diary.lines("told") + failures


class Plain(Actor):
    """Neither has checkpoints nor an argument ``restart``."""

    @endpoint
    async def nothing(self) -> None: ...


class HalfSaved(Plain):
    def __checkpoint__(self) -> int:
        return 1


class Restartable(Plain):
    def __init__(self, restart: str) -> None:
        self.restart = restart

    @endpoint
    async def given(self) -> str:
        return self.restart


async def test_what_can_not_be() -> None:
    """Refused where it is said, with what to do instead."""
    here: Any = this_proc()
    pair: Any = this_host().spawn_procs({"gpus": 2})
    with pytest.raises(UsageError, match="max_restarts must be 0"):
        Restart(max_restarts=-1)
    with pytest.raises(UsageError, match="strategy='all' is unknown: use 'one_for_one', 'one_for_all' or 'rest_for_one'"):
        Restart(strategy="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a single one has none: use 'one_for_one'"):
        here.spawn("x", Plain, restart=Restart(strategy="rest_for_one"))
    with pytest.raises(UsageError, match="a single one has none: use 'one_for_one'"):
        this_host().spawn_procs(restart=Restart(strategy="rest_for_one"))
    for wrong in (3, "permanent", Restart):
        with pytest.raises(TypeError, match="restart takes a Restart"):
            here.spawn("x", Plain, restart=wrong)
        with pytest.raises(TypeError, match="restart takes a Restart"):
            this_host().spawn_procs(restart=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a Supervisor takes a Restart"):
            Supervisor(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="checkpoint_every is set, and Plain has no __checkpoint__"):
        here.spawn("x", Plain, restart=Restart(checkpoint_every=1))
    with pytest.raises(UsageError, match="checkpoint_every is for actors"):
        this_host().spawn_procs(restart=Restart(checkpoint_every=1))
    with pytest.raises(TypeError, match="HalfSaved needs both __checkpoint__ and __restore__"):
        here.spawn("x", HalfSaved)
    async with Supervisor(name="group") as group, Supervisor(name="other") as other:
        mesh = pair.spawn("x", Plain)
        with pytest.raises(UsageError, match="a slice or a reference"):
            group.supervise(mesh.slice(gpus=0))
        with pytest.raises(TypeError, match=r"processes have spawn_procs\(restart=…\)"):
            group.supervise(pair)
        group.supervise(mesh)
        with pytest.raises(UsageError, match="x has a supervisor already"):
            other.supervise(mesh)
        with pytest.raises(UsageError, match="group can't be part of itself"):
            group.supervise(group)
        group.supervise(other)
        with pytest.raises(UsageError, match="other can't be part of itself"):
            other.supervise(group)
        with pytest.raises(UsageError, match="significant children are for automatic shutdown"):
            group.supervise(pair.spawn("y", Plain), significant=True)
    assert "given" == await here.spawn("x", Restartable, restart="given").given.call_one()
    assert await answers(here.spawn("x", Plain, restart=None).nothing.call_one()) is None
