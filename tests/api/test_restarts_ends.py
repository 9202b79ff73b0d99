"""Restarts that are interrupted: by a stop, by another death, by a start that fails, by the end of the program. And restarts in numbers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from monarch_async import ActorDied, MeshFailure, Restart, SpawnError, context, shutdown, this_host, this_proc
from tests.api.restarting import Diary, Member, alive, answers, back, gone
from tests.api.waiting import until

pytestmark = pytest.mark.usefixtures("complaints")


async def test_actors_stopped_while_they_wait_to_be_restarted(failures: list[MeshFailure]) -> None:
    """In their process, and with a process that has ended: whoever waits for them is told, and nothing is started."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs")
    members = procs.spawn("members", Member, restart=Restart(backoff=30))
    other = procs.spawn("other", Member)
    pid, _ = await members.slice(gpus=0).life.call_one()
    await other
    members.slice(gpus=1).end.broadcast("raise")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)  # of the other mesh
    waiting = [members.slice(gpus=rank).life.call_one() for rank in range(2)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await members.stop("enough")
    for call in waiting:
        assert isinstance(await answers(call), ActorDied)
    for rank in range(2):
        await gone(members.slice(gpus=rank))
    assert 1 == await other.slice(gpus=1).add.call_one()
    assert 1 == len(failures)


async def test_actors_that_nobody_restarts_while_others_are(failures: list[MeshFailure]) -> None:
    """Stopping one of two meshes that wait for a process refuses calls to it; the other comes back."""
    procs = this_host().spawn_procs(name="procs")
    meshes = [procs.spawn(f"m{number}", Member, restart=Restart(backoff=0.5)) for number in range(2)]
    pid, _ = await meshes[0].life.call_one()
    await meshes[1]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid))
    await asyncio.sleep(0.1)
    await meshes[0].stop("enough")
    assert isinstance(await gone(meshes[0]), ActorDied)
    await back(meshes[1], 1)
    assert [] == failures


@pytest.mark.parametrize("delay", [None, 30.0])
@pytest.mark.parametrize("how", ["stop", "shutdown"])
async def test_processes_stopped_while_they_are_restarted(diary: Diary, failures: list[MeshFailure], delay: Any, how: str) -> None:
    """In every stage of a restart: callers are told, no process is left, nothing is told to anybody."""
    for pause in (0.0, 0.005, 0.02, 0.05):
        procs = this_host().spawn_procs({"gpus": 2}, restart=Restart(backoff=delay, max_restarts=10))
        members = procs.spawn("members", Member, diary, restart=Restart())
        pids = [pid for pid, _ in (await members.life.call()).values()]
        os.kill(pids[0], signal.SIGKILL)
        waiting = members.slice(gpus=0).life.call_one()
        await asyncio.sleep(pause)
        async with asyncio.timeout(5):
            await (procs.stop() if how == "stop" else shutdown())
        await answers(waiting)
        if how == "stop":
            assert isinstance(await answers(members.slice(gpus=0).life.call_one()), ActorDied)
    await shutdown()
    assert [] == failures


def slow_second_time() -> None:
    """A bootstrap that is quick at first and hangs later, in a file named by the environment."""
    path = Path(os.environ["BOOTS"])
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    how = os.environ["LATER"]
    if len(path.read_text().split()) == 2:
        if how == "raise":
            raise ValueError("not again")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("later", ["raise", "exit", "kill"])
async def test_a_process_that_fails_while_it_is_started_again(tmp_path: Path, failures: list[MeshFailure], later: str) -> None:
    """By its bootstrap's error or its own end: that is one restart more, and the one after it succeeds."""
    boots = tmp_path / "boots"
    procs = this_host().spawn_procs(
        name="procs", bootstrap=slow_second_time, env={"BOOTS": str(boots), "LATER": later}, restart=Restart(max_restarts=2)
    )
    member = procs.spawn("member", Member)
    policed = procs.spawn("policed", Member, restart=Restart())
    pid, _ = await member.life.call_one()
    await policed
    os.kill(pid, signal.SIGKILL)
    for mesh in (member, policed):
        async with asyncio.timeout(10):
            again = await answers(mesh.life.call_one())
            while isinstance(again, ActorDied):
                again = await answers(mesh.life.call_one())
        assert again[0] != pid
    assert 3 == len(boots.read_text().split())
    assert [] == failures
    os.kill((await member.life.call_one())[0], signal.SIGKILL)
    await until(lambda: failures)
    assert [("procs", "member", "policed")] == [told.meshes for told in failures]
    assert "2 restarts within 5 s allowed" in failures[0].reason


async def test_a_start_that_is_refused(tmp_path: Path, failures: list[MeshFailure]) -> None:
    """The process can't even be made: each try counts, then the owner is told why, and so are callers."""
    folder = tmp_path / "folder"
    folder.mkdir()
    procs = this_host().spawn_procs(name="procs", cwd=str(folder), restart=Restart(max_restarts=2))
    member = procs.spawn("member", Member)
    pid, _ = await member.life.call_one()
    folder.rmdir()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    assert ["procs"] == [told.mesh for told in failures]
    assert "folder" in failures[0].reason
    assert "not started again: 2 restarts" in failures[0].reason
    await gone(member)
    with pytest.raises(ActorDied):
        await procs.spawn("late", Member)
    with pytest.raises(SpawnError, match="folder"):
        await this_host().spawn_procs(cwd=str(folder))


async def test_one_of_the_first_processes_dies_while_others_start(tmp_path: Path, failures: list[MeshFailure]) -> None:
    """One that was up comes back, and is not taken for the first one when the others are up."""
    gate = tmp_path / "gate"
    procs = this_host().spawn_procs(
        {"gpus": 2}, bootstrap=wait_for_gate, env=lambda point: {"GATE": str(gate), "RANK": str(point.rank)}, restart=Restart()
    )
    members = procs.spawn("members", Member)
    await until(lambda: (tmp_path / "gate.0").exists())
    first = members.slice(gpus=0)
    pid, _ = await first.life.call_one()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid))
    await asyncio.sleep(0.1)
    gate.touch()
    await procs
    await back(first, 1)
    assert 1 == await members.slice(gpus=1).add.call_one()
    await asyncio.sleep(0.2)
    assert 1 == (await first.life.call_one())[1]
    assert [] == failures


async def wait_for_gate() -> None:
    gate, rank = os.environ["GATE"], os.environ["RANK"]
    Path(f"{gate}.{rank}").touch()
    while rank == "1" and not os.path.exists(gate):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_crash_loop_beside_a_healthy_mesh(failures: list[MeshFailure]) -> None:
    """The healthy one answers every call meanwhile, in the same process and in others, and so does the owner's loop."""
    procs = this_host().spawn_procs({"gpus": 2})
    healthy = procs.spawn("healthy", Member)
    looping = procs.slice(gpus=0).spawn("looping", Looping, restart=Restart(max_restarts=10**9))
    await healthy
    looping.end.broadcast("raise")
    slowest = 0.0
    for count in range(200):
        began = asyncio.get_running_loop().time()
        assert [count + 1] * 2 == list((await healthy.add.call()).values())
        slowest = max(slowest, asyncio.get_running_loop().time() - began)
    assert slowest < 0.5
    async with asyncio.timeout(5):
        await looping.stop()
    assert [] == failures


class Looping(Member):
    """Fails at once in every life after the first."""

    def __init__(self) -> None:
        super().__init__()
        if context().actor_instance.incarnation:
            raise RuntimeError("at once")


async def test_an_owner_that_spawns_while_it_is_being_stopped(diary: Diary, failures: list[MeshFailure]) -> None:
    """Case 19: refused, also in an owner that will be restarted; nothing is left."""
    owner = this_host().spawn_procs(name="owners").spawn("owner", SpawnsLate, diary, restart=Restart())
    await owner
    owner.end.broadcast("raise")
    await back(owner, 1)
    await owner.stop()
    assert ["refused: late was not spawned: its owner is being stopped"] * 2 == diary.lines("refused")
    assert [] == failures


class SpawnsLate(Member):
    async def __cleanup__(self, error: BaseException | None) -> None:
        try:
            this_proc().spawn("late", Member)
        except SpawnError as refused:
            self.note(f"refused: {refused}")


async def test_a_thousand_actors_that_fail_at_once(failures: list[MeshFailure]) -> None:
    """In one process: all come back."""
    procs = this_host().spawn_procs()
    members = [procs.spawn(f"m{number}", Member, restart=Restart()) for number in range(1000)]
    await asyncio.gather(*(member.add.call_one() for member in members))
    for member in members:
        member.end.broadcast("raise")
    lives = await asyncio.gather(*(member.life.call_one() for member in members))
    assert [1] * 1000 == [life for _, life in lives]
    assert [] == failures


async def test_members_behind_the_tree(through_tree: None, failures: list[MeshFailure]) -> None:
    """A broadcast and a call through the agent reach the lives that are there, before and after restarts, in order."""
    members = this_host().spawn_procs({"gpus": 5}, restart=Restart(max_restarts=10)).spawn("members", Member)
    for count in range(1, 4):
        members.add.broadcast(10)
        pids = [pid for pid, _ in (await members.life.call()).values()]
        under_way = members.wait.options(return_exceptions=True).call(0.3)
        await asyncio.sleep(0.1)
        os.kill(pids[2], signal.SIGKILL)
        outcomes: list[Any] = list((await under_way).values())
        assert ["waited"] * 4 == [outcome for rank, outcome in enumerate(outcomes) if rank != 2]
        assert (9, 2) == (outcomes[2].signal, outcomes[2].rank)
        await back(members.slice(gpus=2), count)
        assert [10 * count, 10 * count, 0, 10 * count, 10 * count] == list((await members.add.call(0)).values())
    endpoint: Any = members.add
    members.add.broadcast()
    await members.add.call()
    await until(lambda: not any(lane.messages for lane in endpoint.lanes))
    assert [] == failures


async def test_a_mesh_that_was_stopped_before_its_process_came_back(failures: list[MeshFailure]) -> None:
    """However often that does: calls to the mesh are refused at once, with why, and so are those to one that has failed."""
    procs = this_host().spawn_procs(name="procs", restart=Restart(max_restarts=10))
    member = procs.spawn("member", Member)
    stopped, failed = procs.spawn("stopped", Member), procs.spawn("failed", Member, restart=Restart(max_restarts=0))
    await stopped
    await stopped.stop("enough")
    failed.end.broadcast("raise")
    await gone(failed)
    for life in range(1, 4):
        os.kill((await member.life.call_one())[0], signal.SIGKILL)
        await back(member, life)
        async with asyncio.timeout(1):
            assert "stopped: enough" == (await gone(stopped)).reason
            assert "not started again" in (await gone(failed)).reason
    assert ["failed"] == [told.mesh for told in failures]


async def test_temporary_processes_and_actors_that_would_come_back(failures: list[MeshFailure]) -> None:
    """The policy of the processes decides alone, so the actors have failed as a whole."""
    procs = this_host().spawn_procs({"gpus": 2}, restart=Restart(mode="temporary"))
    members = procs.spawn("members", Member, restart=Restart())
    pid, _ = await members.slice(gpus=0).life.call_one()
    waiting = members.slice(gpus=1).wait.call_one(30)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    assert isinstance(await answers(waiting), ActorDied)
    for rank in range(2):
        await gone(members.slice(gpus=rank))
    assert [("members", (0,), 9)] == [(told.mesh, told.ranks, told.signal) for told in failures]
