"""`watch` tells of the end of an actor, whoever owns it; dead letters can be read."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_async import (
    Actor,
    ActorMesh,
    Ended,
    MeshFailure,
    ProcMesh,
    Restart,
    UsageError,
    configure,
    endpoint,
    this_host,
    this_proc,
    watch,
)
from monarch_async._runtime.asking import ask
from monarch_async._runtime.context import current_message
from monarch_async.ambient import current_runtime
from monarch_async.ids import new_actor_key
from monarch_async.options import Options
from tests.api.waiting import until


class Worker(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    async def watched(self) -> tuple[int, int]:
        """By how many, and for how many something waits in this process."""
        message = current_message.get()
        assert message is not None
        return len(message.cell.watchers), len(watching())

    @endpoint
    async def boom(self) -> None:
        raise ValueError("boom")


def watching() -> list[str]:
    """The tasks of this process that are about watching."""
    return [name for task in asyncio.all_tasks() if (name := task.get_name()) in ("waiting", "service watch")]


class Watcher(Actor):
    """Watches from another process."""

    @endpoint
    async def see(self, worker: Worker) -> Ended:
        return await watch(worker)


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


async def test_watches_that_time_out_leave_nothing(place: ProcMesh) -> None:
    """As in a loop that does something else from time to time: no task here, and neither a watcher nor a task at the actor."""
    worker = await place.spawn("worker", Worker)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await watch(worker)
    async with asyncio.timeout(5):
        while (0, 0) != await worker.watched.call_one():  # noqa: ASYNC110  # it may be in another process
            await asyncio.sleep(0.002)
    await until(lambda: not watching(), 1)


async def test_a_stop_that_is_not_waited_for_takes_place(place: ProcMesh) -> None:
    """Whoever gives up waiting at once, or later, does not call it off; nor does anything go on waiting."""
    for turns in range(3):
        worker: Any = await place.spawn("worker", Worker)
        over, stopping = watch(worker), worker.stop("enough")
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        assert "stopped: enough" == (await over).reason
    await until(lambda: not watching(), 1)


@pytest.fixture
def hasty() -> Iterator[None]:
    """In runtimes that are started from now on; ask for it before any place."""
    before = Options()
    configure(unknown_grace=0.2)
    yield
    configure(unknown_grace=before.unknown_grace)


async def not_here(place: ProcMesh) -> ActorMesh:
    """A reference to an actor whose spawn has not come."""
    other = await place.spawn("other", Worker)
    late: Any = pickle.loads(pickle.dumps(other))
    late._key, late._name = new_actor_key(), "late"
    assert isinstance(late, ActorMesh)
    return late


async def test_an_actor_whose_spawn_comes_later_is_waited_for(
    place: ProcMesh, failures: list[MeshFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its life is watched."""
    late: Any = await not_here(place)
    seen = watch(late)
    await place.dead_letters()  # comes after it
    monkeypatch.setattr("monarch_async.procs.new_actor_key", lambda: late._key)
    worker = await place.spawn("late", Worker)
    await worker.pid.call_one()
    assert not seen.done()
    worker.boom.broadcast()
    assert ("late", 0, 0, "ValueError in boom: boom") == (await seen)[:4]


async def test_an_actor_that_does_not_come_is_given_up(hasty: None, place: ProcMesh) -> None:
    """After the option unknown_grace; a watch that is cancelled before that leaves nothing."""
    late: Any = await not_here(place)
    cancelled, began = watch(late), time.monotonic()
    seen = watch(late)
    await asyncio.sleep(0)
    cancelled.cancel()
    assert "is not here: it was never spawned, or ended long ago" == (await seen).reason
    assert time.monotonic() - began >= 0.19
    await until(lambda: not watching(), 1)
    assert {} == current_runtime().absent._awaited


async def test_an_actor_stopped_before_its_spawn_has_ended(hasty: None, place: ProcMesh) -> None:
    """Whoever waits for it is told so, as are those who watch later."""
    late: Any = await not_here(place)
    seen = watch(late)
    (address, rank), *_ = late.members()
    await ask(late._runtime, address, "stop", late._key, "enough", rank=rank)
    assert "stopped before it was spawned" == (await seen).reason == (await watch(late)).reason


async def test_the_next_life_is_waited_for_however_long_that_takes(hasty: None) -> None:
    """In a new process, which is there for another actor, and this one after its backoff, which is longer than the option unknown_grace."""
    async with this_host().spawn_procs() as procs:
        eager = await procs.spawn("eager", Worker, restart=Restart())
        worker: Any = await procs.spawn("worker", Worker, restart=Restart(backoff=0.8))
        first = watch(worker)
        worker.exit.broadcast(3)
        assert ("worker", 0, 0, "exited with code 3") == (await first)[:4]
        await eager.pid.options(retry=3).call_one()  # the next process is up
        second = watch(worker)
        await worker.pid.call_one()
        assert not second.done()
        await worker.stop("enough")
        assert ("worker", 0, 1, "stopped: enough") == (await second)[:4]


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
