"""`watch` tells of the end of an actor, whoever owns it; dead letters can be read."""

from __future__ import annotations

import asyncio
import os

import pytest

from monarch_async import Actor, ActorMesh, Ended, MeshFailure, ProcMesh, Restart, UsageError, endpoint, this_host, this_proc, watch


class Worker(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    async def boom(self) -> None:
        raise ValueError("boom")


class Watcher(Actor):
    """Watches from another process."""

    @endpoint
    async def see(self, worker: Worker) -> Ended:
        return await watch(worker)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told


async def test_an_exit_is_told_to_all_who_watch(failures: list[MeshFailure]) -> None:
    """By the owner's process and from another one, with rank and exit code; whoever watches afterwards is told at once."""
    async with this_host().spawn_procs({"gpus": 2}) as procs, this_host().spawn_procs() as other:
        workers = await procs.spawn("workers", Worker)
        here, there = watch(workers), other.spawn("watcher", Watcher).see.call_one(workers)
        await other.spawn("after", Watcher)  # by now the watcher watches
        workers.slice(gpus=1).exit.broadcast(7)
        wanted = ("workers", 1, 0, "exited with code 7", 7, None)
        async with asyncio.timeout(5):
            assert [wanted, wanted] == [await here, await there]
            assert wanted == await watch(workers.slice(gpus=1))
    assert ["workers"] == [failure.mesh for failure in failures]


async def test_each_life_is_watched_for_itself() -> None:
    """An actor that is restarted in its process: its first life ends of the exception, the second of the stop."""
    async with this_host().spawn_procs() as procs:
        worker = await procs.spawn("worker", Worker, restart=Restart())
        first = watch(worker)
        worker.boom.broadcast()
        assert ("worker", 0, 0, "ValueError in boom: boom") == (await first)[:4]
        await worker.pid.call_one()
        second = watch(worker)
        assert isinstance(worker, ActorMesh)
        await worker.stop("enough")
        assert ("worker", 0, 1, "stopped: enough") == (await second)[:4]
        assert ("worker", 0, 1, "stopped: enough") == (await watch(worker))[:4]


async def test_a_watch_that_is_cancelled_leaves_nothing(failures: list[MeshFailure]) -> None:
    """Neither here nor at the actor, in this process too; the next one works."""
    local = this_proc().spawn("local", Worker)
    await local
    seen = watch(local)
    await asyncio.sleep(0)
    seen.cancel()
    with pytest.raises(asyncio.CancelledError):
        await seen
    seen = watch(local)
    local.boom.broadcast()
    assert "ValueError in boom: boom" == (await seen).reason
    assert 1 == len(failures)


async def test_what_is_no_mesh_is_refused() -> None:
    """Processes have no life of an actor."""
    procs: ProcMesh = this_host().spawn_procs()
    with pytest.raises(UsageError, match="watch takes a mesh of actors"):
        watch(procs)  # type: ignore[arg-type]
    await procs.stop()


async def test_dead_letters_can_be_read() -> None:
    """A cast to a stopped actor is counted where it came to nothing, and says to whom it was and why."""
    async with this_host().spawn_procs() as procs:
        worker = await procs.spawn("worker", Worker)
        assert isinstance(worker, ActorMesh)
        await worker.stop("enough")
        await worker.boom.broadcast()
        await procs.spawn("next", Worker)  # comes after it
        letters = (await procs.dead_letters()).item()
        assert 1 == letters.count
        assert [("worker[0]", "boom", "stopped: enough")] == [letter[:3] for letter in letters.last]
